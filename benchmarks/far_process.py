"""A second process that answers questions over a pipe until it is asked None."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any


@contextmanager
def far_process(serve: Callable[[Any, Connection], None], case: Any, patience_s: float) -> Iterator[Connection]:
    """Runs `serve(case, pipe)` there. It has so long to end when it is told to."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(case, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
        ours.send(None)
        process.join(patience_s)
    finally:
        process.kill()


def answer(pipe: Connection, question: Any, patience_s: float) -> Any:
    pipe.send(question)
    assert pipe.poll(patience_s), "the other process does not answer"
    return pipe.recv()
