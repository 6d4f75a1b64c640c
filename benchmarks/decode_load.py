"""Requests that all decode at the same time, for benchmarks that time decode steps of an engine."""

import time

import torch

from hotset.base.sampling import SamplingParams
from hotset.engine.core import Engine
from hotset.engine.input_processor import InputProcessor

PREFILL_TIMEOUT_S = 200.0
MAX_DRAIN_STEPS = 1000


def prefill(engine: Engine, requests: int, context: int, params: SamplingParams) -> list[str]:
    """Adds `requests` requests with prompts of `context` tokens and steps until all decode. Returns their ids."""
    input_processor = InputProcessor(engine.card, seed=0)
    choices = [choice for n in range(requests) for choice in input_processor.accept(str(n), [0] * context, params)]
    for choice in choices:
        engine.add(choice)
    start = time.perf_counter()
    while len(engine.step().token_ids) < requests:
        elapsed = time.perf_counter() - start
        assert elapsed < PREFILL_TIMEOUT_S, f"not all of the {requests} requests decode after {elapsed:.0f} s"
    return [choice.request_id for choice in choices]


def timed_steps(engine: Engine, steps: int) -> list[float]:
    """Returns the seconds of each of `steps` steps."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return times


def abort_all(engine: Engine, request_ids: list[str]) -> None:
    """Aborts the requests and steps until the engine is idle."""
    for request_id in request_ids:
        engine.abort(request_id)
    for _ in range(MAX_DRAIN_STEPS):
        if engine.idle:
            return
        engine.step()
    raise AssertionError(f"{len(request_ids)} aborted requests did not end within {MAX_DRAIN_STEPS} steps")
