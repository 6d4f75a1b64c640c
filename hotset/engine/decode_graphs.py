"""Captures decode steps as CUDA graphs: one for each batch size, with and without tiered requests, and with drafts of
tiered requests.

A graph is a list of kernels with fixed arguments. Everything that changes from step to step is in device memory: the
seats (`seat_of`) and positions of the tokens to compute, the page tables, the residency maps and the token ids. A batch
is padded to the next captured size with tokens of seat EMPTY, for which kernels write nothing.

Several tokens of a step can be of one seat: a short prompt is computed by a graph too, as if each of its tokens were
decoded. Each layer writes all new keys and rows before it reads any, so each token finds those before it. Tokens of a
seat are adjacent, in the order of their positions. Drafts of resident requests are computed in the same way. Drafts of
tiered requests need a graph of their own, which swaps in the rows of all tokens of a request together.

The graphs of several workers contain their collectives, and what pipeline stages send each other. All workers therefore
capture the same graphs in the same order, and replay the same graph in a step. `choose_graph` chooses it for all.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hotset.base.config import EngineConfig
from hotset.engine.drafts.segments import SeatDrafts, draft_columns_of_tokens
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

    def forward_once(self, token_ids: Tensor, view: View) -> Tensor | None:
        """Does what `forward` does, but computes only one layer of each kind, so that a start that tries many sizes of
        steps loads all kernels in a short time. The result has no meaning."""

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
    verifies: bool = False  # whether tiered requests can have drafts


@cache
def batch_sizes(limit: int) -> tuple[int, ...]:
    """Returns the captured batch sizes up to `limit`. Padding adds at most 7 tokens to a batch of up to
    64 tokens, and less than a quarter to larger ones."""
    sizes = [*SIZES_BELOW_EIGHT, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    while sizes[-1] < limit:
        sizes.append(sizes[-1] + max(64, sizes[-1] // 8 // 64 * 64))
    return *(size for size in sizes if size < limit), limit


def graph_sizes(max_decoded: int) -> tuple[int, ...]:
    """Returns all graph sizes that an engine captures: those of batches, and those of short prompts. `max_decoded` is
    the most tokens, drafts included, that decoding requests have in a step."""
    return *batch_sizes(max_decoded), *(size for size in PROMPT_SIZES if size > max_decoded)


def captures_graphs(config: EngineConfig, model: RunnerModel) -> bool:
    """Returns whether an engine captures the decode steps of this model."""
    return model.device.type == "cuda" and config.cuda_graphs == "auto" and model.dtype == torch.bfloat16


def choose_graph(step: Sequence[Plan | None], max_decoded: int) -> StepGraph | None:
    """Returns the graph that all replicas replay in a step with these plans, or None if none of them can use a graph.

    The graph is large enough for each replica. For `max_decoded` see `graph_sizes`. A replica without a plan, or whose
    plan has only commands, replays the graph with padding only.
    """
    plans = [plan for plan in step if plan is not None and plan.seats]
    sizes = graph_sizes(max_decoded)
    if not plans or not all(plan.num_tokens <= sizes[-1] and _suits_graphs(plan) for plan in plans):
        return None
    size = sizes[bisect_left(sizes, max(plan.num_tokens for plan in plans))]
    with_tiered = [plan for plan in plans if Residence.TIERED in plan.residences]
    return StepGraph(size, bool(with_tiered), any(plan.drafts for plan in with_tiered))


def _suits_graphs(plan: Plan) -> bool:
    """Returns whether a graph can compute this plan, and is faster than single launches of its kernels."""
    if plan.prompt_ranges or Residence.STREAMED in plan.residences:
        return False
    prompt_keys = sum(
        count * (start + count)
        for segment, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True))
        if count > 1 and segment not in plan.drafts
    )
    return prompt_keys <= MAX_PROMPT_KEYS


def columns_of_tokens(
    seats: Sequence[int], starts: Sequence[int], counts: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the seat and the position of every token of the segments."""
    if sum(counts) == len(seats):
        return seats, starts
    segments = list(zip(seats, starts, counts, strict=True))
    seat_of = [seat for seat, _, count in segments for _ in range(count)]
    return seat_of, [start + index for _, start, count in segments for index in range(count)]


class StepInput(NamedTuple):
    """The tensors from which a graph reads the tokens of a step. Each is [tokens] int64, on the device."""

    seat_of: Tensor  # EMPTY for padding
    positions: Tensor
    stamps: Tensor | None  # see `Batch.stamps`; None if steps have no drafts and begin at the positions of the plan


Forward = Callable[[Tensor, View], Tensor | None]


class Replayable(Protocol):
    """A captured graph."""

    def replay(self) -> None: ...


class DecodeGraphs:
    """Captures and replays decode steps. Replays run on the current stream. A result of `run` is valid until the next
    call of `run`, because all graphs share one buffer for their logits and one pool for everything else."""

    def __init__(
        self,
        model: RunnerModel,
        memory: KvMemory,
        tokens: Tensor,
        max_decoded: int,
        before_capture: Callable[[int], None] = lambda size: None,
        *,
        seat_drafts: SeatDrafts | None = None,
    ) -> None:
        """`tokens` [seats, context + 1] int32 holds the token ids of every seat. Decoding requests have at most
        `max_decoded` tokens in a step.

        `before_capture(size)` is called before a step of `size` tokens is captured. If the MTP layer drafts, it needs
        the hidden states of steps, and steps read from `seat_drafts` where they begin and what they verify.
        """
        self._model, self._memory, self._tokens = model, memory, tokens
        self._before_capture = before_capture
        self._sizes = graph_sizes(max_decoded)
        self._seat_drafts, columns = seat_drafts, 2 if seat_drafts is None else 5
        self._input = torch.empty(columns * self._sizes[-1], dtype=torch.int64, device=tokens.device)
        # Used only if there are drafts: the positions at which the tokens of a step really are.
        self._positions = torch.zeros(self._sizes[-1], dtype=torch.int64, device=tokens.device)
        self._captured: dict[StepGraph, Replayable] = {}
        self._memory_pool = torch.cuda.graph_pool_handle() if tokens.is_cuda else None
        # [largest size, vocab], written by each replay. The first capture makes it, unless a later pipeline stage
        # computes the logits.
        self._logits: Tensor | None = None
        self.hidden: Tensor | None = None  # [largest size, hidden], if there is an MTP layer

    @property
    def largest(self) -> int:
        """The number of tokens of the largest graphs."""
        return self._sizes[-1]

    @property
    def all_graphs(self) -> list[StepGraph]:
        """The graphs that an engine captures, the largest first."""
        options = [(False, False)]
        if self._memory.hot_buffers is not None:
            options.append((True, False))
            if self._memory.pool.geometry.max_drafts:
                options.append((True, True))
        return [StepGraph(size, *option) for size in reversed(self._sizes) for option in options]

    def tiered_tokens(self, graph: StepGraph) -> int:
        """Returns the most tokens of a tiered request in a step that `graph` computes."""
        return 1 + self._memory.pool.geometry.max_drafts if graph.verifies else int(graph.has_tiered)

    @torch.inference_mode()
    def capture_all(self, progress: Callable[[int, int], None]) -> None:
        """Captures all graphs, and replays each once: the first replay uploads the graph, which takes longer.
        `progress(done, total)` counts graphs."""
        graphs = self.all_graphs
        for done, graph in enumerate(graphs):
            progress(done, len(graphs))
            self.get_or_capture(graph)
        for graph in graphs:
            self.run(graph, None)
        progress(len(graphs), len(graphs))

    def run(self, graph: StepGraph, plan: Plan | None) -> SampledLogits | None:
        """Computes the tokens of a plan, and the logits of all of them.

        Without a plan, it only takes part in the collectives of the step. Returns None if a later pipeline stage
        computes the logits.
        """
        seats, starts, counts = ((), (), ()) if plan is None else (plan.seats, plan.starts, plan.counts)
        tiered_tokens, tokens = self._memory.prepare_step(seats, starts, counts), sum(counts)
        if tokens > graph.size or tiered_tokens > self.tiered_tokens(graph):
            raise RuntimeError(f"{graph} was chosen for {tokens} tokens, up to {tiered_tokens} of a tiered request")
        captured = self.get_or_capture(graph)
        columns = [*columns_of_tokens(seats, starts, counts)]
        if self._seat_drafts is not None:
            columns += ((), (), ()) if plan is None else draft_columns_of_tokens(plan)
        seat_of, positions, _ = self._fill(graph.size, columns)
        captured.replay()
        if self._logits is None:
            return None
        hidden = None if self.hidden is None else self.hidden[:tokens]
        return SampledLogits(self._logits[:tokens], positions[:tokens], seat_of[:tokens], hidden=hidden)

    def _fill(self, size: int, columns: Sequence[Sequence[int]]) -> StepInput:
        """Copies the input of a step to the device. Returns the tensors from which a graph of `size` tokens reads."""
        padding = size - len(columns[0])
        numbers = [*columns[0], *[EMPTY] * padding]
        for column in columns[1:]:
            numbers += [*column, *[0] * padding]
        host_input = torch.tensor(numbers, dtype=torch.int64)
        pinned = host_input.pin_memory() if self._input.is_cuda else host_input
        self._input[: len(numbers)].copy_(pinned, non_blocking=True)
        if self._seat_drafts is None:
            return StepInput(self._input[:size], self._input[size : 2 * size], None)
        return StepInput(self._input[:size], self._positions[:size], self._input[2 * size : 3 * size])

    def fill_padding(self, size: int) -> StepInput:
        """Makes all `size` tokens padding. Returns the tensors from which a graph reads them."""
        if self._seat_drafts is None:
            return self._fill(size, [()] * 2)
        self._positions[:size].zero_()
        return self._fill(size, [()] * 5)

    def _token_ids(self, size: int) -> Tensor:
        """Returns the token ids of a step. If there are drafts, first finds the positions of its tokens."""
        seat_of, planned = self._input[: 2 * size].view(2, size)
        if self._seat_drafts is None:
            return self._tokens[seat_of, planned]
        stamps, later, place = self._input[2 * size : 5 * size].view(3, size)
        starts = self._seat_drafts.starts(seat_of, stamps, later)
        positions = self._positions[:size].copy_(planned + starts - stamps)
        drafts = self._seat_drafts.draft_ids(seat_of, place)
        return torch.where(place > 0, drafts, self._tokens[seat_of, positions])

    def get_or_capture(self, graph: StepGraph) -> Replayable:
        captured = self._captured.get(graph)
        if captured is None:
            captured = self._captured[graph] = self._capture_step(graph)
        return captured

    def _capture_step(self, graph: StepGraph) -> Replayable:
        seat_of, positions, stamps = self.fill_padding(graph.size)  # so this step writes no KV

        def step(forward: Forward = self._model.forward) -> None:
            token_ids = self._token_ids(graph.size)
            view = self._memory.captured_view(seat_of, positions, self.tiered_tokens(graph), stamps)
            hidden = forward(token_ids, view)
            if hidden is None:
                return
            logits = self._model.logits(hidden, None)
            if self._logits is None:
                self._logits = logits.new_empty(self._sizes[-1], logits.shape[1])
                self.hidden = hidden.new_empty(self._sizes[-1], hidden.shape[1]) if self._seat_drafts else None
            self._logits[: graph.size].copy_(logits)
            if self.hidden is not None:
                self.hidden[: graph.size].copy_(hidden)

        # The largest graphs come first. For smaller ones, kernels differ, but not between the layers of a kind.
        first_run = step if graph.size == self.largest else partial(step, self._model.forward_once)
        return self.capture(graph.size, step, first_run)

    def capture(
        self, size: int, compute: Callable[[], None], first_run: Callable[[], None] | None = None
    ) -> Replayable:
        """Captures `compute`, which computes `size` tokens. Before that, runs it, or `first_run`, once: this compiles
        kernels and connects workers, which a capture cannot do. Tensors that the first run creates, and that later runs
        use, are not in the memory that graphs share."""
        self._before_capture(size)
        (first_run or compute)()
        return self._record(compute)

    def _record(self, compute: Callable[[], None]) -> Replayable:
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        # Calls of other threads, which report steps or watch collectives, do not disturb a thread-local capture.
        with torch.cuda.graph(captured, pool=self._memory_pool, capture_error_mode="thread_local"):
            compute()
        return captured
