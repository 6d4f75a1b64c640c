"""Captures decode steps as CUDA graphs: one for each batch size, with and without tiered requests.

A graph is a list of kernels with fixed arguments. Everything that changes from step to step is in device memory: the
seats (`seat_of`) and positions of the tokens to compute, the page tables, the residency maps and the token ids. A batch
is padded to the next captured size with tokens of seat EMPTY, for which kernels write nothing.

Several tokens of a step can be of one seat: a short prompt is computed by a graph too, as if each of its tokens were
decoded. Each layer writes all new keys and rows before it reads any, so each token finds those before it. Tokens of a
seat are adjacent, in the order of their positions.

The graphs of several workers contain their collectives, and what pipeline stages send each other. All workers therefore
capture the same graphs in the same order, and replay the same graph in a step. `choose_graph` chooses it for all.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from hotset.base.config import EngineConfig
from hotset.kernels import EMPTY
from hotset.memory.device_pool import KvShape
from hotset.memory.view import View
from hotset.models.logprobs import LogprobTensors
from hotset.schedule.plan import Plan
from hotset.tiers.kv_memory import KvMemory
from hotset.tiers.residence import Residence

SIZES_BELOW_EIGHT = (1, 2, 4)
# A graph reads the index keys of a context again for each token of a prompt. By calculation, 2^23 keys in fp8 take
# 0.3 ms per layer on an H200. A layer without a graph is expected to take longer to launch. The limit is not tuned.
MAX_PROMPT_KEYS = 1 << 23
PROMPT_SIZES = (16, 32, 64)  # captured even if there are fewer seats


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
    hidden: Tensor | None = None  # [tokens of the step, hidden]: what the model returned; None if it is not needed


@dataclass(frozen=True, slots=True)
class StepGraph:
    """Names one of the graphs of decode steps."""

    size: int  # number of tokens, including padding
    has_tiered: bool  # a graph with tiered requests also serves steps without any, but does more than they need


@cache
def batch_sizes(most: int) -> tuple[int, ...]:
    """Returns the captured batch sizes up to `most`. Padding adds at most 7 tokens to a batch of up to
    64 tokens, and less than a quarter to larger ones."""
    sizes = [*SIZES_BELOW_EIGHT, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(64, sizes[-1] // 8 // 64 * 64))
    return *(size for size in sizes if size < most), most


def graph_sizes(seats: int) -> tuple[int, ...]:
    """Returns all sizes that an engine with this number of seats captures: those of batches, and of short prompts."""
    return *batch_sizes(seats), *(size for size in PROMPT_SIZES if size > seats)


def captures_graphs(config: EngineConfig, model: RunnerModel) -> bool:
    """Returns whether an engine captures the decode steps of this model."""
    return model.device.type == "cuda" and config.cuda_graphs == "auto" and model.dtype == torch.bfloat16


def choose_graph(step: Sequence[Plan | None], seats: int) -> StepGraph | None:
    """Returns the graph that all replicas replay in a step with these plans, or None if none of them can use a graph.

    It is large enough for each replica. `seats` is the number of seats of each. A replica without a plan, or whose plan
    has only commands, replays the graph with padding only.
    """
    plans = [plan for plan in step if plan is not None and plan.seats]
    sizes = graph_sizes(seats)
    if not plans or not all(plan.num_tokens <= sizes[-1] and _suits_graphs(plan) for plan in plans):
        return None
    size = sizes[bisect_left(sizes, max(plan.num_tokens for plan in plans))]
    return StepGraph(size, any(Residence.TIERED in plan.residences for plan in plans))


def _suits_graphs(plan: Plan) -> bool:
    """Returns whether graphs can compute this plan, and faster than without them. In a graph, a tiered request has one
    token; drafts of resident requests are computed like short prompts."""
    if plan.prompt_ranges or Residence.STREAMED in plan.residences:
        return False
    if plan.drafts and Residence.TIERED in plan.residences:
        return False
    of_prompts = ((start, count) for start, count in zip(plan.starts, plan.counts, strict=True) if count > 1)
    return sum(count * (start + count) for start, count in of_prompts) <= MAX_PROMPT_KEYS


def columns_of_tokens(
    seats: Sequence[int], starts: Sequence[int], counts: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the seat and the position of every token of the segments."""
    if sum(counts) == len(seats):
        return seats, starts
    segments = list(zip(seats, starts, counts, strict=True))
    seat_of = [seat for seat, _, count in segments for _ in range(count)]
    return seat_of, [start + index for _, start, count in segments for index in range(count)]


class DecodeGraphs:
    """Captures and replays decode steps. Replays run on the current stream. A result of `run` is valid until the next
    call of `run`, because all graphs share one buffer for their logits and one pool for everything else."""

    def __init__(
        self,
        model: RunnerModel,
        memory: KvMemory,
        tokens: Tensor,
        before_capture: Callable[[int], None] = lambda size: None,
        *,
        keep_hidden: bool = False,
    ) -> None:
        """`tokens` [seats, context + 1] int32 holds the token ids of every seat.

        `before_capture(size)` is called before a step of `size` tokens is captured. If `keep_hidden`, results have the
        model's hidden states.
        """
        self._model, self._memory, self._tokens = model, memory, tokens
        self._before_capture = before_capture
        self._sizes = graph_sizes(tokens.shape[0])
        self._input = torch.empty(2 * self._sizes[-1], dtype=torch.int64, device=tokens.device)
        self._captured: dict[StepGraph, torch.cuda.CUDAGraph] = {}
        self._memory_pool = torch.cuda.graph_pool_handle()
        # [largest size, vocab], written by each replay. The first capture makes it, unless a later pipeline stage
        # computes the logits.
        self._logits: Tensor | None = None
        self._keep_hidden = keep_hidden
        self._hidden: Tensor | None = None  # [largest size, hidden], if hidden states are kept

    @torch.inference_mode()
    def capture_all(self, progress: Callable[[int, int], None]) -> None:
        """Captures all graphs, and replays each once: the first replay uploads the graph, which takes longer.
        `progress(done, total)` counts graphs."""
        tiered_options = (False, True) if self._memory.hot_buffers is not None else (False,)
        graphs = [StepGraph(size, has_tiered) for size in reversed(self._sizes) for has_tiered in tiered_options]
        for done, graph in enumerate(graphs):
            progress(done, len(graphs))
            self.get_or_capture(graph)
        for graph in graphs:
            self.run(graph, (), (), ())
        progress(len(graphs), len(graphs))

    def run(
        self, graph: StepGraph, seats: Sequence[int], starts: Sequence[int], counts: Sequence[int]
    ) -> SampledLogits | None:
        """Computes tokens [starts[i], starts[i] + counts[i]) of `seats[i]`, for each i, and the logits of all of them.

        Without seats, it only takes part in the collectives of the step. Returns None if a later pipeline stage
        computes the logits.
        """
        has_tiered, tokens = self._memory.prepare_step(seats, starts, counts), sum(counts)
        if tokens > graph.size or (has_tiered and not graph.has_tiered):
            raise RuntimeError(f"{graph} was chosen for {tokens} tokens, {'some' if has_tiered else 'none'} tiered")
        captured = self.get_or_capture(graph)
        seat_of, positions = self._fill(graph.size, *columns_of_tokens(seats, starts, counts))
        captured.replay()
        if self._logits is None:
            return None
        hidden = None if self._hidden is None else self._hidden[:tokens]
        return SampledLogits(self._logits[:tokens], positions[:tokens], seat_of[:tokens], hidden=hidden)

    def _fill(self, size: int, seats: Sequence[int], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Copies the input of a step to the device. Returns the seats and the positions of `size` tokens."""
        padding = size - len(seats)
        host_input = torch.tensor([*seats, *[EMPTY] * padding, *positions, *[0] * padding], dtype=torch.int64)
        self._input[: 2 * size].copy_(host_input.pin_memory(), non_blocking=True)
        return self._input[:size], self._input[size : 2 * size]

    def get_or_capture(self, graph: StepGraph) -> torch.cuda.CUDAGraph:
        captured = self._captured.get(graph)
        if captured is None:
            captured = self._captured[graph] = self._capture(graph)
        return captured

    def _capture(self, graph: StepGraph) -> torch.cuda.CUDAGraph:
        self._before_capture(graph.size)
        seat_of, positions = self._fill(graph.size, (), ())  # the batch is all padding, so this step writes no KV

        def step() -> tuple[Tensor, Tensor] | None:
            view = self._memory.captured_view(seat_of, positions, graph.has_tiered)
            hidden = self._model.forward(self._tokens[seat_of, positions], view)
            return None if hidden is None else (self._model.logits(hidden, None), hidden)

        computed = step()  # compiles kernels and connects workers, which a capture cannot do
        if computed is not None and self._logits is None:
            logits, hidden = computed
            self._logits = logits.new_empty(self._sizes[-1], logits.shape[1])
            self._hidden = hidden.new_empty(self._sizes[-1], hidden.shape[1]) if self._keep_hidden else None
            del logits, hidden
        del computed
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        # Calls of other threads, which report steps or watch collectives, do not disturb a thread-local capture.
        with torch.cuda.graph(captured, pool=self._memory_pool, capture_error_mode="thread_local"):
            computed = step()
            if computed is not None and self._logits is not None:
                self._logits[: graph.size].copy_(computed[0])
                if self._hidden is not None:
                    self._hidden[: graph.size].copy_(computed[1])
        return captured
