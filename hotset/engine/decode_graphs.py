"""Steps that only decode, captured as CUDA graphs: one for each size of batch, with and without tiered requests.

A graph is a list of kernels with fixed arguments. What changes from step to step lies in device memory: whose rows are
computed (`seat_of`), where they stand (`positions`), the page tables, the residency maps, the tokens. Rows that fill a
batch up to the next captured size have seat EMPTY: kernels write nothing for them.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.memory.device_pool import KvShape
from hotset.memory.view import View
from hotset.schedule.plan import Plan
from hotset.tiers.kv_memory import KvMemory

SIZES_BELOW_EIGHT = (1, 2, 4)


class RunnerModel(Protocol):
    """A model as the runner sees it."""

    device: torch.device
    dtype: torch.dtype

    @property
    def kv_shape(self) -> KvShape:
        """What one token costs in memory."""

    def forward(self, token_ids: Tensor, view: View, wanted: Tensor | None) -> Tensor | None:
        """Logits of the query rows numbered in `wanted` (None: all), KV read and written through the view. None: of a
        stage that is not the last."""


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows of a step that yield tokens."""

    logits: Tensor  # [rows, vocab]
    positions: Tensor  # [rows] int64: where each row stands in its context
    seat_of: Tensor  # [rows] int64


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [size, vocab]: written by each replay


def batch_sizes(most: int) -> list[int]:
    """Captured sizes of batches up to `most`: padding costs at most an eighth of the rows above 64, 8 rows below."""
    sizes = [*SIZES_BELOW_EIGHT, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(64, sizes[-1] // 8 // 64 * 64))
    return [*(size for size in sizes if size < most), most]


class DecodeGraphs:
    """Replays belong to the stream that is current when they are asked for; results are good until the next one."""

    def __init__(self, model: RunnerModel, memory: KvMemory, tokens: Tensor) -> None:
        """`tokens` [seats, context + 1] int32: every seat's tokens so far."""
        self._model, self._memory, self._tokens = model, memory, tokens
        self._sizes = batch_sizes(tokens.shape[0])
        self._input = torch.empty(2 * self._sizes[-1], dtype=torch.int64, device=tokens.device)
        self._captured: dict[tuple[int, bool], _Captured] = {}
        self._memory_pool = torch.cuda.graph_pool_handle()

    def serve(self, plan: Plan) -> bool:
        """Every request of the plan computes one row and yields a token, and none streams its prompt."""
        streams = self._memory.tables.work_pages
        return plan.num_tokens == len(plan.seats) == len(plan.sampled) and not any(streams[seat] for seat in plan.seats)

    @torch.inference_mode()
    def capture_all(self, progress: Callable[[int, int], None]) -> None:
        """`progress(done, total)`: graphs captured."""
        kinds = (False, True) if self._memory.hot_buffers is not None else (False,)
        wanted = [(size, has_tiered) for size in reversed(self._sizes) for has_tiered in kinds]
        for done, (size, has_tiered) in enumerate(wanted):
            progress(done, len(wanted))
            self._find(size, has_tiered)
        progress(len(wanted), len(wanted))

    def size_for(self, rows: int) -> int:
        """The captured size of a batch of so many rows."""
        return self._sizes[bisect_left(self._sizes, rows)]

    def run(self, plan: Plan) -> SampledRows:
        has_tiered = self._memory.prepare_step(plan.seats, plan.starts)
        rows = len(plan.seats)
        size = self.size_for(rows)
        captured = self._find(size, has_tiered)
        seat_of, positions = self._fill(size, plan.seats, plan.starts)
        captured.graph.replay()
        return SampledRows(captured.logits[:rows], positions[:rows], seat_of[:rows])

    def _fill(self, size: int, seats: Sequence[int], starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Writes the input of a step, and gives its two halves: seats and positions of `size` query rows."""
        padding = size - len(seats)
        numbers = torch.tensor([*seats, *[EMPTY] * padding, *starts, *[0] * padding], dtype=torch.int64)
        self._input[: 2 * size].copy_(numbers.pin_memory(), non_blocking=True)
        return self._input[:size], self._input[size : 2 * size]

    def _find(self, size: int, has_tiered: bool) -> _Captured:
        found = self._captured.get((size, has_tiered))
        if found is None:
            found = self._captured[size, has_tiered] = self._capture(size, has_tiered)
        return found

    def _capture(self, size: int, has_tiered: bool) -> _Captured:
        seat_of, positions = self._fill(size, (), ())  # nobody's rows: to compile and to capture writes nothing

        def step() -> Tensor:
            view = self._memory.captured_view(seat_of, positions, has_tiered)
            logits = self._model.forward(self._tokens[seat_of, positions], view, None)
            assert logits is not None, "only whole models are captured"
            return logits

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory_pool):
            logits = step()
        return _Captured(graph, logits)
