"""Tries a tokenizer.json in a process of its own, with limits on time and memory.

A tokenizer.json comes with a model and contains patterns. The `tokenizers` library compiles and matches them without a
limit, and a pattern that backtracks can take exponential time and memory. The probe encodes texts on which such
patterns usually do so: long repetitions of one character and of the words in the pattern itself. It cannot find every
bad pattern.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hotset.base.fork_server import ENVIRONMENT, ONE_THREAD

CPU_SECONDS = 20  # a tokenizer of 260,000 tokens takes 2 s
WALL_SECONDS = 300  # on a machine that is busy with other work
MEMORY_BYTES = 2 << 30
MEMORY_PER_FILE_BYTE = 32

REPEATED = ("a", "A", "0", " ", "\n", "\t", ".", "_", "'", "é", "中", "Ġ", "▁")
SHORT, LONG = 60, 3_000  # repetitions: exponential and cubic patterns exceed a limit
MAX_WORDS = 40  # of the patterns


def why_unusable(path: Path) -> str | None:
    """Returns why the tokenizer in `path` cannot be used, or None if it encoded all texts within the limits."""
    start = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
    command = [sys.executable, "-I", "-c", start, str(path), str(CPU_SECONDS)]
    # The child has one thread, because the address space of threads would count as memory.
    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | ONE_THREAD
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=WALL_SECONDS
        )
    except OSError as error:
        return f"it cannot be tried in a process: {error}"
    except subprocess.TimeoutExpired:
        return f"loading it and encoding a few texts takes more than {WALL_SECONDS} s"
    if done.returncode == 0:
        return None
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"loading it and encoding a few texts takes more than {CPU_SECONDS} s; does a pattern backtrack?"
    reason = " ".join(done.stdout.decode(errors="replace").split())
    return reason[-300:] or f"the library ends with status {done.returncode} when it loads it and encodes a few texts"


def may_have_patterns(content: str) -> bool:
    """Returns whether the JSON in `content` may have the key "Regex", which may be written with escapes."""
    return "Regex" in content or "\\u00" in content


def _patterns(value: Any) -> Iterator[str]:
    """Yields every pattern in a part of a tokenizer."""
    if isinstance(value, dict):
        if isinstance(value.get("Regex"), str):
            yield value["Regex"]
        for entry in value.values():
            yield from _patterns(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _patterns(entry)


def _texts(patterns: list[str]) -> Iterator[str]:
    words = {word for pattern in patterns for word in re.findall(r"\w+", pattern)}
    words |= {character for word in words for character in word}
    literals = "".join(sorted({character for pattern in patterns for character in pattern}))
    for times in (SHORT, LONG):
        for repeated in (*REPEATED, *sorted(words)[:MAX_WORDS]):
            # The end decides whether a pattern backtracks. Without the characters that a pattern requires, the library
            # does not try to match it.
            for end in ("", "!", f"\0{literals}"):
                yield repeated * times + end


def _probe(path: str, cpu_seconds: int) -> None:
    memory = MEMORY_BYTES + MEMORY_PER_FILE_BYTE * os.path.getsize(path)
    for kind, limit in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(path)
    backend.no_truncation()
    backend.no_padding()
    parts = [part.__getstate__() for part in (backend.normalizer, backend.pre_tokenizer, backend.decoder) if part]
    for text in _texts([pattern for part in parts for pattern in _patterns(json.loads(part))]):
        backend.decode(backend.encode(text).ids)


def main() -> None:
    """Runs in the child: tries a file and prints why it fails. Arguments: the file and the limit in CPU seconds."""
    try:
        _probe(sys.argv[1], int(sys.argv[2]))
    except BaseException as error:  # a panic of the library is not an Exception
        print(error)
        sys.exit(1)
