"""The requests of a benchmark: random prompts, a trace of lengths and shared prefixes, or prompts of a file."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from hotset.base.errors import ConfigError
from hotset.lab.bench.config import BenchConfig, LengthRange

Message = dict[str, Any]
Prompt = str | list[int] | list[Message]
Entry = TypeVar("Entry")

TRACE_BLOCK_TOKENS = 512
FIRST_WORD = "the"  # begins every text, because many tokenizers encode a word differently without a space before it


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send."""

    prompt: Prompt
    output_tokens: int
    offset: float | None = None  # seconds since the beginning of a trace


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Makes random prompts from units: token ids, or words if `units` are strings.

    The server counts `tokens_per_unit` tokens for each unit, and `extra_tokens` for each prompt.
    """

    units: Sequence[int | str]
    tokens_per_unit: float = 1.0
    extra_tokens: float = 0.0

    @property
    def as_text(self) -> bool:
        return isinstance(self.units[0], str)

    def num_units(self, tokens: float) -> int:
        """Returns how many units make up `tokens` tokens, at least one."""
        return max(1, round(tokens / self.tokens_per_unit))

    def num_prompt_units(self, tokens: float) -> int:
        """Returns how many units a prompt of `tokens` tokens has, at least one."""
        return self.num_units(max(0.0, tokens - self.extra_tokens))

    def draw(self, count: int, random: Random) -> list[int | str]:
        return random.choices(self.units, k=count)

    def prompt(self, units: list[Any]) -> Prompt:
        return " ".join([FIRST_WORD, *units[1:]]) if self.as_text else units


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One line of a trace, with scaled times and lengths."""

    offset: float  # in seconds
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


class Workload:
    """The requests of one benchmark. Reads the files that the configuration names.

    Raises ConfigError if a file cannot be read.
    """

    def __init__(self, config: BenchConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._trace: list[TraceEntry] | None = None
        self._dataset: list[PlannedRequest] | None = None
        if config.trace is not None:
            self._trace = read_trace(Path(config.trace), config.trace_speed, config.scale_lengths)
        if config.dataset is not None:
            self._dataset = read_dataset(Path(config.dataset), config)

    @property
    def num_requests(self) -> int | None:
        """The number of requests of each load, or None if only time limits it."""
        limit = self._config.max_requests
        if self._trace is None:
            return limit
        return len(self._trace) if limit is None else min(limit, len(self._trace))

    def longest(self) -> int:
        """Returns the largest length of a prompt and its answer together, in tokens; 0 if it is not known."""
        if self._dataset is not None:
            return 0
        if self._trace is not None:
            return max(entry.input_tokens + entry.output_tokens for entry in self._trace[: self.num_requests])
        return self._config.input_lengths.longest + self._config.output_lengths.longest

    def requests(self, source: PromptSource, load_index: int) -> Iterator[PlannedRequest]:
        """Yields the requests of one load. Loads have different prompts, but a shared prefix and blocks of a trace are
        the same in all of them."""
        random = Random(f"{self._seed}:{load_index}")
        if self._trace is not None:
            return self._trace_requests(self._trace[: self.num_requests], source, random)
        if self._dataset is not None:
            return cycle(self._dataset)
        return self._random_requests(source, random)

    def _random_requests(self, source: PromptSource, random: Random) -> Iterator[PlannedRequest]:
        config = self._config
        prefix: list[int | str] = []
        if config.prefix_tokens:
            prefix = source.draw(source.num_units(config.prefix_tokens), Random(f"{self._seed}:prefix"))
        while True:
            count = source.num_prompt_units(_pick(config.input_lengths, random))
            units = prefix[:count] + source.draw(max(0, count - len(prefix)), random)
            yield PlannedRequest(source.prompt(units), _pick(config.output_lengths, random))

    def _trace_requests(
        self, entries: Sequence[TraceEntry], source: PromptSource, random: Random
    ) -> Iterator[PlannedRequest]:
        block_units = source.num_units(TRACE_BLOCK_TOKENS * self._config.scale_lengths)
        for entry in entries:
            units: list[int | str] = []
            for block_id in entry.block_ids:
                units += source.draw(block_units, Random(f"{self._seed}:block {block_id}"))
            count = source.num_prompt_units(entry.input_tokens)
            units = units[:count] + source.draw(max(0, count - len(units)), random)
            yield PlannedRequest(source.prompt(units), entry.output_tokens, entry.offset)


def _pick(lengths: LengthRange, random: Random) -> int:
    return random.randint(lengths.shortest, lengths.longest)


def read_trace(path: Path, speed: float, scale: float) -> list[TraceEntry]:
    """Reads a trace in Mooncake's format. Entries are sorted by time, and the first one has offset 0."""

    def entry(line: dict[str, Any]) -> TraceEntry:
        tokens, blocks = int(line["input_length"]), tuple(map(int, line.get("hash_ids") or ()))
        if blocks and len(blocks) != math.ceil(tokens / TRACE_BLOCK_TOKENS):
            raise ValueError(
                f"{len(blocks)} hash_ids for {tokens} tokens; there must be one for each {TRACE_BLOCK_TOKENS} tokens"
            )
        return TraceEntry(
            offset=float(line["timestamp"]) / 1e3 / speed,
            input_tokens=max(1, round(tokens * scale)),
            output_tokens=max(1, round(int(line["output_length"]) * scale)),
            block_ids=blocks,
        )

    entries = sorted(_read_lines("trace", path, entry), key=lambda entry: entry.offset)
    first = entries[0].offset
    return [TraceEntry(e.offset - first, e.input_tokens, e.output_tokens, e.block_ids) for e in entries]


def read_dataset(path: Path, config: BenchConfig) -> list[PlannedRequest]:
    """Reads prompts or messages. A prompt becomes a user's message for --endpoint chat."""

    def request(line: dict[str, Any]) -> PlannedRequest:
        prompt: Any = line["messages"] if "messages" in line else line["prompt"]
        if "messages" in line and config.endpoint != "chat":
            raise ValueError("messages need --endpoint chat")
        if not isinstance(prompt, list if "messages" in line else str):
            raise ValueError("prompt must be a string, and messages a list")
        return PlannedRequest(prompt, int(line.get("output_tokens", config.output_lengths.longest)))

    return _read_lines("dataset", path, request)


def _read_lines(flag: str, path: Path, convert: Callable[[dict[str, Any]], Entry]) -> list[Entry]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise ConfigError(f"cannot read --{flag} {path}: {reason}") from None
    entries: list[Entry] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entries.append(convert(json.loads(line)))
        except KeyError as error:
            raise ConfigError(f"--{flag} {path}, line {number}: the field {error} is missing") from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"--{flag} {path}, line {number}: {error}") from None
    if not entries:
        raise ConfigError(f"--{flag} {path} has no lines")
    return entries
