"""Tries a tokenizer.json in a process of its own, with limits on time and memory.

A tokenizer.json comes with a model and contains patterns. The `tokenizers` library compiles and matches them without a
limit, and a pattern that backtracks can take exponential time and memory. The probe encodes texts on which such
patterns usually do so: long repetitions of one character and of the words in the pattern itself. It cannot find every
bad pattern.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hotset.base.errors import CheckpointError, RequestError
from hotset.base.fork_server import ForkServer, JobFailed

CPU_SECONDS = 20  # a tokenizer of 260,000 tokens takes 2 s
MEMORY_BYTES = 2 << 30
MEMORY_PER_FILE_BYTE = 32

REPEATED = ("a", "A", "0", " ", "\n", "\t", ".", "_", "'", "é", "中", "Ġ", "▁")
SHORT, LONG = 60, 3_000  # repetitions with which exponential and cubic patterns exceed a limit
MAX_WORDS = 40  # words of the patterns that are repeated
MAX_REASON_CHARACTERS = 300


def why_unusable(path: Path) -> str | None:
    """Returns why the tokenizer in `path` cannot be used, or None if it encoded all texts within the limits."""
    memory_bytes = MEMORY_BYTES + MEMORY_PER_FILE_BYTE * path.stat().st_size
    server, probe = ForkServer(), f"{__name__}:try_tokenizer"
    try:
        server.prepare("probe", probe, {"path": str(path)}, cpu_seconds=CPU_SECONDS, memory_bytes=memory_bytes)
    except JobFailed as failure:
        return f"the library {failure} when it loads the file and encodes a few texts; does a pattern backtrack?"
    except RequestError as refusal:
        return str(refusal)
    finally:
        server.close()
    return None


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


def try_tokenizer(path: str) -> None:
    """Runs in a process with limits. Raises `CheckpointError` if the library refuses the file or fails on a text."""
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(path)
        backend.no_truncation()
        backend.no_padding()
        parts = [part.__getstate__() for part in (backend.normalizer, backend.pre_tokenizer, backend.decoder) if part]
        for text in _texts([pattern for part in parts for pattern in _patterns(json.loads(part))]):
            backend.decode(backend.encode(text).ids)
    except MemoryError:
        raise
    except BaseException as error:  # a panic of the library is not an Exception
        raise CheckpointError(" ".join(str(error).split())[-MAX_REASON_CHARACTERS:]) from error
