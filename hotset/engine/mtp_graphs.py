"""Captures what the MTP layer computes after a step as CUDA graphs.

There are two kinds. One writes the layer's rows of a step's tokens, and is captured for each graph of decode steps. The
other drafts: it contains all iterations after the first one, and is captured for each number of chains and of drafts. A
chain that needs fewer drafts than others is padding in the later iterations.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.engine.decode_graphs import DecodeGraphs, Replayable, StepGraph, batch_sizes
from hotset.engine.mtp_drafts import Chains, Iteration, MtpDrafts
from hotset.kernels import EMPTY
from hotset.models.mtp import MtpOutput
from hotset.tiers.kv_memory import KvMemory


@dataclass(frozen=True, slots=True)
class ChainGraph:
    """Names one of the graphs that draft."""

    size: int  # number of chains, including padding
    drafts: int  # of each chain
    has_tiered: bool


class MtpGraphs:
    """Captures and replays the MTP layer. Replays run on the current stream. Results are valid until the next replay
    of the same kind. All workers capture and replay the same graphs in the same order, as in `DecodeGraphs`."""

    def __init__(self, mtp: MtpDrafts, steps: DecodeGraphs, memory: KvMemory, seats: int) -> None:
        self._mtp, self._steps, self._memory = mtp, steps, memory
        self._sizes = batch_sizes(seats)
        self._rows: dict[StepGraph, Replayable] = {}
        self._chains: dict[ChainGraph, Replayable] = {}
        self._output: MtpOutput | None = None  # of the tokens of a step; each has as many rows as the largest graph
        self._first: MtpOutput | None = None  # of the newest token of each chain
        device = memory.pool.device
        self._columns = torch.zeros(4, self._sizes[-1], dtype=torch.int64, device=device)
        self._drafts = torch.empty(self._sizes[-1] * mtp.max_drafts, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def capture_all(self, progress: Callable[[int, int], None]) -> None:
        """Captures all graphs after those of decode steps, and replays each once. Does nothing if a later pipeline
        stage has the layer. `progress(done, total)` counts graphs."""
        if self._steps.hidden is None:
            return
        steps = self._steps.all_graphs
        tiered_options = (False, True) if self._memory.hot_buffers is not None else (False,)
        options = [(drafts, tiered) for drafts in range(self._mtp.max_drafts, 0, -1) for tiered in tiered_options]
        chains = [ChainGraph(size, *option) for size in reversed(self._sizes) for option in options]
        total = len(steps) + len(chains)
        for done, step in enumerate(steps):
            progress(done, total)
            self.capture_rows(step)
        for done, chain in enumerate(chains, len(steps)):
            progress(done, total)
            self._get_or_capture(chain, self._output)
        for step in steps:  # the first replay uploads a graph
            self._steps.fill_padding(step.size)
            self._rows[step].replay()
        for chain in chains:
            self._fill_padding(chain.size)
            self._chains[chain].replay()
        progress(total, total)

    def capture_rows(self, graph: StepGraph) -> None:
        """Captures a graph that writes the rows of the tokens of `graph`, if it does not exist yet, and if no later
        pipeline stage has the layer. This overwrites the input of decode steps, so it must not be called between a step
        and `write_rows`."""
        if graph in self._rows:
            return
        self._steps.get_or_capture(graph)
        if self._steps.hidden is None:
            return
        seat_of, positions = self._steps.fill_padding(graph.size)

        def write_rows() -> None:
            hidden = self._steps.hidden
            assert hidden is not None
            view = self._memory.captured_view(seat_of, positions, self._steps.tiered_tokens(graph))
            output = self._mtp.write_rows(view, hidden[: graph.size])
            if self._output is None:
                self._output = _like(output, self._steps.largest)
            _copy(self._output, output, graph.size)

        self._rows[graph] = self._steps.capture(graph.size, write_rows)

    def write_rows(self, graph: StepGraph) -> MtpOutput:
        """Writes the layer's rows of the tokens that `graph` has just computed."""
        self._rows[graph].replay()
        assert self._output is not None
        return self._output

    def draft(self, chains: Chains, output: MtpOutput, *, has_tiered: bool) -> Tensor:
        """Returns drafts [chains, num_drafts] of the tokens after the newest one of each chain, EMPTY-padded. `output`
        is that of the step's tokens."""
        count = len(chains.segments)
        graph = ChainGraph(self._sizes[bisect_left(self._sizes, count)], chains.num_drafts, has_tiered)
        captured = self._get_or_capture(graph, output)
        if count < graph.size:
            self._fill_padding(graph.size)
        columns = (chains.seats, chains.positions, chains.starts, chains.counts)
        self._columns[:, :count].copy_(torch.stack(columns))
        assert self._first is not None
        newest = chains.newest
        torch.index_select(output.carried, 0, newest, out=self._first.carried[:count])
        torch.index_select(output.normed, 0, newest, out=self._first.normed[:count])
        torch.index_select(output.selected, 0, newest, out=self._first.selected[:count])
        captured.replay()
        return self._drafts_of(graph)[:count]

    def _drafts_of(self, graph: ChainGraph) -> Tensor:
        return self._drafts[: graph.size * graph.drafts].view(graph.size, graph.drafts)

    def _fill_padding(self, size: int) -> None:
        self._columns[:, :size].zero_()
        self._columns[0, :size].fill_(EMPTY)

    def _get_or_capture(self, graph: ChainGraph, output: MtpOutput | None) -> Replayable:
        """`output` is that of any tokens."""
        captured = self._chains.get(graph)
        if captured is None:
            assert output is not None, "the graphs of rows are captured first"
            captured = self._chains[graph] = self._capture(graph, output)
        return captured

    def _capture(self, graph: ChainGraph, output: MtpOutput) -> Replayable:
        if self._first is None:
            self._first = _like(output, self._sizes[-1])
        self._fill_padding(graph.size)
        seats, positions, starts, counts = self._columns[:, : graph.size].unbind(0)
        first = MtpOutput(
            self._first.carried[: graph.size], self._first.normed[: graph.size], self._first.selected[: graph.size]
        )

        def iteration(number: int) -> Iteration:
            drafting = counts > number
            view = self._memory.captured_view(
                torch.where(drafting, seats, EMPTY),
                torch.where(drafting, positions + number, 0),
                int(graph.has_tiered),
                starts,
            )
            return Iteration(slice(None), view)

        def draft() -> None:
            self._drafts_of(graph).copy_(self._mtp.iterate(first, counts, graph.drafts, iteration))

        return self._steps.capture(graph.size, draft)


def _like(output: MtpOutput, rows: int) -> MtpOutput:
    carried, normed, selected = output.carried, output.normed, output.selected
    return MtpOutput(
        carried.new_zeros(rows, carried.shape[1]),
        normed.new_zeros(rows, normed.shape[1]),
        selected.new_full((rows, selected.shape[1]), EMPTY),
    )


def _copy(target: MtpOutput, source: MtpOutput, rows: int) -> None:
    """Copies the output of the first `rows` tokens."""
    target.carried[:rows].copy_(source.carried[:rows])
    target.normed[:rows].copy_(source.normed[:rows])
    target.selected[:rows].copy_(source.selected[:rows])
