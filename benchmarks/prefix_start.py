"""Measures how soon requests start from a prefix that is only on the host, with a large model of random weights."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from decode_server import FP8_KV
from prefix_load import Answer, Client, Clock, random_tokens

from hotset.base.config import EngineConfig
from hotset.base.request_options import TiersChoice
from hotset.base.units import ceil_div
from hotset.engine.build import assemble, model_card
from hotset.engine.build_runner import build_runner
from hotset.engine.sizing import kv_budget
from hotset.engine.workers.executor import InProcessExecutor
from hotset.memory.device_pool import KvShape
from hotset.models.checkpoint.weights import dummy_weights
from hotset.models.decoder import Decoder
from hotset.models.spec import KvStorage, ModelSpec
from hotset.tiers.commands import Command, Load
from hotset.tiers.kv_memory import KvMemory
from hotset.tiers.residence import Residence

Row = dict[str, Any]
SEED = 3
SEATS = 8


@dataclass(frozen=True, slots=True)
class StartSizes:
    prefix: int = 32768  # tokens that are on the host; whole pages
    rest: int = 64  # tokens of a prompt after the prefix
    chunk: int = 8192  # tokens that one step computes
    repeats: int = 5  # requests of each kind that start from the prefix; the median counts
    computed: int = 2  # prompts that are computed
    answer: int = 16  # tokens that are compared

    @property
    def longest(self) -> int:
        return self.prefix + self.rest + self.answer


@dataclass(slots=True)
class LoadedPrefix:
    """One copy of a prefix from the host to the device."""

    nbytes: int | None  # None if not all rows are copied
    seconds: float


class LoadTimer:
    """Times the commands that load rows and index keys of a prefix: with events on a GPU, else with a clock."""

    def __init__(self, device: torch.device, shape: KvShape, clock: Clock) -> None:
        self._on_gpu, self._shape, self._clock = device.type == "cuda", shape, clock
        self._marks: list[tuple[int | None, Any, Any]] = []

    def loads(self) -> list[LoadedPrefix]:
        """Returns the loads since the last call. Waits for the GPU."""
        marks, self._marks = self._marks, []
        if self._on_gpu:
            torch.cuda.synchronize()
            return [LoadedPrefix(nbytes, start.elapsed_time(end) * 1e-3) for nbytes, start, end in marks]
        return [LoadedPrefix(nbytes, end - start) for nbytes, start, end in marks]

    @contextmanager
    def timing(self) -> Iterator[None]:
        execute = KvMemory.execute

        def timed(memory: KvMemory, command: Command) -> None:
            if not isinstance(command, Load):
                execute(memory, command)
                return
            start = self._mark()
            execute(memory, command)
            self._marks.append((self._bytes(command), start, self._mark()))

        with patch.object(KvMemory, "execute", timed):
            yield

    def _mark(self) -> Any:
        if not self._on_gpu:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _bytes(self, command: Load) -> int | None:
        """Returns the bytes of the rows and index keys that a command copies, or None if it selects rows."""
        return command.length * self._shape.token_bytes if command.to is Residence.RESIDENT else None


def pinned_copy_speed(nbytes: int, device: torch.device, clock: Clock) -> float:
    """Returns the bytes per second of one large copy from pinned memory to the device; on a CPU, between buffers."""
    on_gpu = device.type == "cuda"
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8, device=device)
    source = source.pin_memory() if on_gpu else source
    speeds = []
    for _ in range(5):
        if on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            speeds.append(nbytes / (start.elapsed_time(end) * 1e-3))
        else:
            began = clock()
            target.copy_(source)
            speeds.append(nbytes / (clock() - began))
    return statistics.median(speeds)


class PrefixStart:
    """A model whose prefix cache holds one long prefix, and requests that start from it."""

    def __init__(
        self,
        name: str,
        spec: ModelSpec,
        device: torch.device,
        dtype: torch.dtype,
        sizes: StartSizes,
        clock: Clock,
        storage: KvStorage = FP8_KV,
    ) -> None:
        self.sizes, self._device, self._clock, self._vocab = sizes, device, clock, spec.vocab
        decoder = Decoder(spec, dummy_weights(dtype, device), storage)
        # The prefix, the prompts that are computed, and one more: nothing is evicted.
        host_tokens = (sizes.computed + 2) * ceil_div(sizes.longest, 64) * 64
        config = EngineConfig(
            model=name,
            max_num_seqs=SEATS,
            max_num_batched_tokens=sizes.chunk,
            max_model_len=sizes.longest,
            device_kv_tokens=2 * sizes.longest,
            host_kv_tokens=host_tokens,
            kv_dtype="fp8" if storage.fp8_rows else "auto",
            index_dtype="fp8" if storage.fp8_keys else "auto",
        )
        budget = kv_budget(config, decoder.kv_shape, spec.context, device)
        card = model_card(config, spec, budget, device, dtype)
        executor = InProcessExecutor(build_runner(config, decoder, budget, device, spec.vocab))
        self.engine = assemble(config, card, decoder.kv_shape, budget, executor)
        self.engine.executor.warm_up(lambda done, total: None)
        self._client = Client(self.engine, clock)
        self._timer = LoadTimer(device, decoder.kv_shape, clock)
        self._token_bytes = decoder.kv_shape.token_bytes
        self._random = Random(SEED)
        self._prefix, self._rest = self._tokens(sizes.prefix), self._tokens(sizes.rest)
        self._page_rows = budget.geometry.page_rows
        assert sizes.prefix % self._page_rows == 0, f"a prefix has whole pages of {self._page_rows} rows"
        self._expected: list[int] = []
        self._computed_s = 0.0

    def close(self) -> None:
        self.engine.close()

    def computed(self) -> Row:
        """Computes the prefix, which puts it into the cache, and then other prompts of the same length, which count."""
        (first,) = self._client.answer([self._prefix + self._rest], self.sizes.answer)  # also compiles kernels
        self._expected = first.token_ids
        times = []
        for _ in range(self.sizes.computed):
            (answer,) = self._client.answer([self._tokens(self.sizes.prefix + self.sizes.rest)], 1)
            assert not answer.cached, "this prompt must be computed"
            times.append(answer.ttft_s)
        self._computed_s = statistics.median(times)
        return self._row("computed", self._computed_s, [], same=None)

    def resident(self) -> Row:
        """Starts requests whose rows are copied into device pages."""
        return self._start("resident", "resident", self._rest)

    def known(self) -> Row:
        """Starts resident requests of whose prompt only the last token is computed."""
        return self._start("known", "resident", self._rest[:1])

    def streamed(self) -> Row:
        """Starts requests whose rows stay on the host while the rest of the prompt is computed."""
        return self._start("streamed", "tiered", self._rest)

    def tiered(self) -> Row:
        """Starts requests of whose prompt only the last token is computed."""
        return self._start("tiered", "tiered", self._rest[:1])

    def decode(self) -> Row:
        """Measures a step that computes one token of a tiered request."""
        for _ in range(2):  # the first request compiles kernels
            (answer,) = self._client.answer([self._prefix + self._rest[:1]], self.sizes.answer, "tiered")
            self._check(answer)
        step_s = (answer.ended_s - answer.first_s) / (len(answer.token_ids) - 1)
        return self._row("decode", step_s, [], same=None)

    def copy_speed(self) -> float:
        """Returns the bytes per second of one large copy, as many bytes as `resident` loads."""
        return pinned_copy_speed(self.sizes.prefix * self._token_bytes, self._device, self._clock)

    def _start(self, name: str, tiers: TiersChoice, rest: list[int]) -> Row:
        # The first request compiles kernels. Its prompt is the one that was computed, so its tokens must be the same.
        (first,) = self._client.answer([self._prefix + rest], self.sizes.answer, tiers)
        self._check(first)
        same = None
        if rest == self._rest:
            same = sum(left == right for left, right in zip(first.token_ids, self._expected, strict=True))
        times, loads = [], []
        with self._timer.timing():
            for _ in range(self.sizes.repeats):
                (answer,) = self._client.answer([self._prefix + self._tokens(len(rest))], 1, tiers)
                self._check(answer)
                times.append(answer.ttft_s)
                loads += self._timer.loads()
        return self._row(name, statistics.median(times), loads, same)

    def _check(self, answer: Answer) -> None:
        assert answer.cached == self.sizes.prefix, f"{answer.cached} of {self.sizes.prefix} tokens were in the cache"

    def _tokens(self, count: int) -> list[int]:
        return random_tokens(self._random, count, self._vocab)

    def _row(self, name: str, seconds: float, loads: list[LoadedPrefix], same: int | None) -> Row:
        copy_s = statistics.median(load.seconds for load in loads) if loads else None
        nbytes = loads[0].nbytes if loads else None
        return {
            "start": name,
            "first token ms": seconds * 1e3,
            "sooner than computed": self._computed_s / seconds,
            "copied MB": nbytes and nbytes * 1e-6,
            "copy ms": copy_s and copy_s * 1e3,
            "GB/s": nbytes / copy_s * 1e-9 if nbytes and copy_s else None,
            f"same tokens of {self.sizes.answer}": same,
        }
