"""Captures decode steps as CUDA graphs: one for each batch size, with and without tiered requests.

A graph is a list of kernels with fixed arguments. Everything that changes from step to step is in device memory: the
seats (`seat_of`) and positions of the tokens to compute, the page tables, the residency maps and the token ids. A batch
is padded to the next captured size with tokens of seat EMPTY, for which kernels write nothing.
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
from hotset.models.logprobs import LogprobTensors
from hotset.schedule.plan import Plan
from hotset.tiers.kv_memory import KvMemory

SIZES_BELOW_EIGHT = (1, 2, 4)


class RunnerModel(Protocol):
    """The interface that a model offers to the runner."""

    device: torch.device
    dtype: torch.dtype

    @property
    def kv_shape(self) -> KvShape:
        """The layout of the model's KV."""

    def forward(self, token_ids: Tensor, view: View) -> Tensor | None:
        """Computes the layers of a step, reading and writing KV through the view, and returns hidden states.

        A pipeline stage that is not the last returns None.
        """

    def logits(self, hidden: Tensor, indices: Tensor | None) -> Tensor:
        """Returns the logits [n, vocab] of the tokens at the n `indices`, from the hidden states of all tokens of the
        step. None means all tokens."""


@dataclass(frozen=True, slots=True)
class SampledLogits:
    """The logits from which a step samples, and the log-probabilities of prompt tokens that it computes."""

    logits: Tensor  # [tokens, vocab]
    positions: Tensor  # [tokens] int64: the position of each token in its context
    seat_of: Tensor  # [tokens] int64
    prompt_logprobs: LogprobTensors | None = None  # of all prompt ranges of the plan, in order; None if it has none


def batch_sizes(most: int) -> list[int]:
    """Returns the captured batch sizes up to `most`. Padding adds at most 7 tokens to a batch of up to
    64 tokens, and less than a quarter to larger ones."""
    sizes = [*SIZES_BELOW_EIGHT, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(64, sizes[-1] // 8 // 64 * 64))
    return [*(size for size in sizes if size < most), most]


class DecodeGraphs:
    """Captures and replays decode steps. Replays run on the current stream. A result of `run` is valid until the next
    call of `run`, because all graphs share one buffer for their logits and one pool for everything else."""

    def __init__(self, model: RunnerModel, memory: KvMemory, tokens: Tensor) -> None:
        """`tokens` [seats, context + 1] int32 holds the token ids of every seat."""
        self._model, self._memory, self._tokens = model, memory, tokens
        self._sizes = batch_sizes(tokens.shape[0])
        self._input = torch.empty(2 * self._sizes[-1], dtype=torch.int64, device=tokens.device)
        self._captured: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._memory_pool = torch.cuda.graph_pool_handle()
        self._logits: Tensor | None = None  # [largest size, vocab], written by each replay; made by the first capture

    def can_run(self, plan: Plan) -> bool:
        """Returns True if every request of the plan computes and samples one token, and none is streamed."""
        work_pages = self._memory.tables.work_pages
        one_token_each = plan.num_tokens == len(plan.seats) == len(plan.sampled)
        return one_token_each and not any(work_pages[seat] for seat in plan.seats)

    @torch.inference_mode()
    def capture_all(self, progress: Callable[[int, int], None]) -> None:
        """Captures all graphs. `progress(done, total)` counts graphs."""
        tiered_options = (False, True) if self._memory.hot_buffers is not None else (False,)
        variants = [(size, has_tiered) for size in reversed(self._sizes) for has_tiered in tiered_options]
        for done, (size, has_tiered) in enumerate(variants):
            progress(done, len(variants))
            self._get_or_capture(size, has_tiered)
        progress(len(variants), len(variants))

    def size_for(self, tokens: int) -> int:
        """Returns the captured size for a batch of `tokens` tokens."""
        return self._sizes[bisect_left(self._sizes, tokens)]

    def run(self, plan: Plan) -> SampledLogits:
        has_tiered = self._memory.prepare_step(plan.seats, plan.starts)
        tokens = len(plan.seats)
        size = self.size_for(tokens)
        graph = self._get_or_capture(size, has_tiered)
        seat_of, positions = self._fill(size, plan.seats, plan.starts)
        graph.replay()
        assert self._logits is not None, "the first capture makes the buffer"
        return SampledLogits(self._logits[:tokens], positions[:tokens], seat_of[:tokens])

    def _fill(self, size: int, seats: Sequence[int], starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Copies the input of a step to the device. Returns the seats and the positions of `size` tokens."""
        padding = size - len(seats)
        host_input = torch.tensor([*seats, *[EMPTY] * padding, *starts, *[0] * padding], dtype=torch.int64)
        self._input[: 2 * size].copy_(host_input.pin_memory(), non_blocking=True)
        return self._input[:size], self._input[size : 2 * size]

    def _get_or_capture(self, size: int, has_tiered: bool) -> torch.cuda.CUDAGraph:
        captured = self._captured.get((size, has_tiered))
        if captured is None:
            captured = self._captured[size, has_tiered] = self._capture(size, has_tiered)
        return captured

    def _capture(self, size: int, has_tiered: bool) -> torch.cuda.CUDAGraph:
        seat_of, positions = self._fill(size, (), ())  # the batch is all padding, so this step writes no KV

        def step() -> Tensor:
            view = self._memory.captured_view(seat_of, positions, has_tiered)
            hidden = self._model.forward(self._tokens[seat_of, positions], view)
            assert hidden is not None, "only whole models can be captured"
            return self._model.logits(hidden, None)

        logits = step()
        if self._logits is None:
            self._logits = logits.new_empty(self._sizes[-1], logits.shape[1])
        del logits
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory_pool):
            self._logits[:size].copy_(step())
        return graph
