"""Captures what the MTP layer computes after a step as CUDA graphs.

There are two kinds. One writes the layer's rows of a step's tokens, and is captured for each graph of decode steps. The
other makes drafts: it finds which drafts of the step were right, contains all iterations after the first one, and is
captured for each number of chains and of drafts. A chain that needs fewer drafts than others is padding in the later
iterations.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.engine.decode_graphs import DecodeGraphs, Replayable, StepGraph, batch_sizes
from hotset.engine.drafts.mtp import Iteration, MtpDrafts, rows_of
from hotset.engine.drafts.segments import COLUMNS, SampledSegments, SegmentTable
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
        self._output: MtpOutput | None = None  # of the tokens of a step, with as many rows as the largest graph
        device, columns = memory.pool.device, COLUMNS + mtp.max_drafts
        self._table = torch.zeros(self._sizes[-1], columns, dtype=torch.int64, device=device)
        self._sampled_ids = torch.zeros(steps.largest, dtype=torch.int64, device=device)
        self._results = torch.zeros(self._sizes[-1] * (1 + mtp.max_drafts), dtype=torch.int64, device=device)

    @torch.inference_mode()
    def capture_all(self, progress: Callable[[int, int], None]) -> None:
        """Captures all graphs and replays each once. The graphs of decode steps must exist. Does nothing if a later
        pipeline stage has the layer. `progress(done, total)` counts graphs."""
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
            self._get_or_capture(chain)
        for step in steps:  # the first replay uploads a graph
            self._steps.fill_padding(step.size)
            self._rows[step].replay()
        for chain in chains:
            self._fill_padding(0, chain.size)
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
        tokens = self._steps.fill_padding(graph.size)

        def write_rows() -> None:
            hidden = self._steps.hidden
            assert hidden is not None
            view = self._memory.captured_view(
                tokens.seat_of, tokens.positions, self._steps.tiered_tokens(graph), tokens.stamps
            )
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

    def draft(
        self, segments: SampledSegments, sampled_ids: Tensor, output: MtpOutput, num_drafts: int, *, has_tiered: bool
    ) -> Tensor:
        """Does what `MtpDrafts.draft` does. If a step is larger than the graphs, `output` has only the rows of
        its sampled tokens. The result is valid until the next call."""
        count = len(segments.rows)
        graph = ChainGraph(self._sizes[bisect_left(self._sizes, count)], num_drafts, has_tiered)
        if self._output is None:
            self._output = _like(output, self._steps.largest)
        if output is not self._output:
            _copy(self._output, output, len(sampled_ids))
        captured = self._get_or_capture(graph)
        self._fill_padding(count, graph.size)
        rows = torch.tensor(segments.rows, dtype=torch.int64)
        self._table[:count].copy_(rows.pin_memory() if self._table.is_cuda else rows, non_blocking=True)
        self._sampled_ids[: len(sampled_ids)].copy_(sampled_ids)
        captured.replay()
        results = self._results_of(graph)[:count]
        return results if results.is_cuda else results.clone()  # on a CPU, the next replay would change it

    def _results_of(self, graph: ChainGraph) -> Tensor:
        return self._results[: graph.size * (1 + graph.drafts)].view(graph.size, 1 + graph.drafts)

    def _fill_padding(self, first: int, last: int) -> None:
        """Makes chains [first, last) padding."""
        if first < last:
            self._table[first:last].zero_()
            self._table[first:last, 0].fill_(EMPTY)

    def _get_or_capture(self, graph: ChainGraph) -> Replayable:
        captured = self._chains.get(graph)
        if captured is None:
            captured = self._chains[graph] = self._capture(graph)
        return captured

    def _capture(self, graph: ChainGraph) -> Replayable:
        self._fill_padding(0, graph.size)
        rows, seat_drafts = self._table[: graph.size], self._mtp.seat_drafts

        def draft() -> None:
            assert self._output is not None, "the graphs of rows are captured first"
            table = SegmentTable(rows, seat_drafts, graph.drafts)
            accepted = table.accepted(self._sampled_ids)
            chains = table.commit(accepted)

            def iteration(number: int) -> Iteration:
                drafting = chains.counts > number
                view = self._memory.captured_view(
                    torch.where(drafting, chains.seats, EMPTY),
                    torch.where(drafting, chains.positions + number, 0),
                    int(graph.has_tiered),
                    chains.stamps,
                )
                return Iteration(slice(None), view)

            if graph.has_tiered:
                self._mtp.release_slots(chains)
            tokens = self._mtp.iterate(rows_of(self._output, chains.newest), chains, iteration)
            table.keep_drafts(tokens)
            self._results_of(graph).copy_(torch.cat((accepted[:, None], tokens), dim=1))

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
