"""Drafts tokens with the model's MTP layer, at the end of each step. docs/mtp.md describes the layer.

The device finds which drafts of the step were right. Where graphs are replayed (`mtp_graphs.py`), the host therefore
never waits for the device here.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from hotset.engine.drafts.segments import Chains, SeatDrafts, SegmentTable
from hotset.kernels import EMPTY
from hotset.kernels.device_copies import list_to_device, to_host_async
from hotset.memory.resident import ResidentView
from hotset.memory.view import View
from hotset.models.logprobs import finite_logits
from hotset.models.mtp import MtpOutput
from hotset.tiers.kv_memory import KvMemory


@runtime_checkable
class MtpModel(Protocol):
    """The interface of a model whose MTP layer is loaded. See `Decoder`."""

    def mtp_input(self, x: Tensor) -> Tensor: ...

    def run_mtp(self, token_ids: Tensor, hidden: Tensor, view: View, selected: Tensor | None = None) -> MtpOutput: ...

    def mtp_logits(self, normed: Tensor) -> Tensor: ...


# Draws the tokens of some seats at some positions from logits: see `Sampler.draft`.
DrawDrafts = Callable[[Tensor, Tensor, Tensor], Tensor]


class Iteration(NamedTuple):
    """An iteration of the layer after the first one. It drafts one more token for each of some chains."""

    chains: Tensor | slice  # the indices of these chains
    view: View


class DraftedTokens:
    """A copy to the host of the result of a step with drafts: how many drafts it accepted, and its new drafts."""

    def __init__(self, segments: Sequence[int], verified: Collection[int], columns: Tensor) -> None:
        """`columns` [segments, 1 + drafts]: how many drafts were right, and new ones, EMPTY-padded. Only the segments
        in `verified` had drafts."""
        self._segments, self._verified = segments, verified
        self._columns, self._wait = to_host_async(columns)

    def accepted(self) -> Mapping[int, int]:
        """Returns how many drafts were right, by segment. Waits for this step, but not for later ones."""
        return {segment: accepted for segment, (accepted, *_) in self._rows() if segment in self._verified}

    def next_drafts(self) -> Mapping[int, Sequence[int]]:
        """Returns the new drafts by segment. Waits for this step, but not for later ones."""
        drafts = {segment: [token for token in row if token != EMPTY] for segment, (_, *row) in self._rows()}
        return {segment: tokens for segment, tokens in drafts.items() if tokens}

    def _rows(self) -> Iterator[tuple[int, list[int]]]:
        self._wait()
        return zip(self._segments, self._columns.tolist(), strict=True)


class MtpDrafts:
    """Keeps the rows of the MTP layer complete, and drafts tokens for the next step.

    After each step, the layer computes all tokens of the step again, each together with the token that follows it. This
    writes the layer's rows, and drafts one token. Every further token needs one more iteration, at the next position
    after the newest token. The rows that these iterations write are provisional: the next step begins at the same
    position and writes them again. However many drafts the step has accepted, these rows are in its tail and its slots.
    """

    def __init__(
        self, model: MtpModel, memory: KvMemory, tokens: Tensor, max_drafts: int, draw: DrawDrafts | None = None
    ) -> None:
        """`tokens` [seats, context + 1] int32 holds the token ids of every seat. If `draw` is None, drafts are the most
        probable tokens. Otherwise `draw` draws them, and their logits are kept."""
        self._model, self._memory, self._tokens, self.max_drafts = model, memory, tokens, max_drafts
        self._draw = draw
        self.seat_drafts = SeatDrafts(tokens.shape[0], max_drafts, tokens.device)

    def write_rows(self, view: ResidentView, hidden: Tensor) -> MtpOutput:
        """Writes the layer's rows of a step's tokens. `hidden` is what the model returned for them. The tokens that
        the step sampled are in `tokens`."""
        following = self._tokens[view.seat_of, view.segments.positions + 1].long()
        return self._model.run_mtp(following, self._model.mtp_input(hidden), view)

    def draft(self, table: SegmentTable, sampled_ids: Tensor, output: MtpOutput | None) -> Tensor:
        """Finds which drafts of a step are right, and drafts tokens after the newest one of each segment. Returns
        [segments, 1 + drafts] int64: the number of right drafts, and the new ones, EMPTY-padded. `output` is what
        `write_rows` returned for the tokens that `sampled_ids` follow. If it is None, nothing is drafted."""
        accepted = table.accepted(sampled_ids)
        chains = table.commit(accepted)
        if output is None:
            return accepted[:, None]
        tokens = self._draft(chains, output)
        table.keep_drafts(tokens)
        return torch.cat((accepted[:, None], tokens), dim=1)

    def _draft(self, chains: Chains, output: MtpOutput) -> Tensor:
        """Returns drafts [chains, num_drafts], EMPTY-padded. Waits for the device."""
        columns = torch.stack((chains.seats, chains.positions, chains.stamps, chains.counts), dim=1).tolist()

        def iteration(number: int) -> Iteration | None:
            kept = [index for index, (*_, count) in enumerate(columns) if count > number]
            if not kept:
                return None
            seats, positions, stamps, _ = zip(*(columns[index] for index in kept), strict=True)
            view = self._memory.draft_view(seats, [position + number for position in positions], stamps)
            return Iteration(list_to_device(kept, torch.int64, self._tokens.device), view)

        self.release_slots(chains)
        return self.iterate(rows_of(output, chains.newest), chains, iteration)

    def release_slots(self, chains: Chains) -> None:
        """Allows the iterations after the first one to evict the layer's rows that the step has read."""
        if self._memory.hot_buffers is not None:
            self._memory.hot_buffers.release_used(self._memory.pool.shape.groups - 1, chains.seats, chains.stamps)

    def iterate(self, first: MtpOutput, chains: Chains, iteration: Callable[[int], Iteration | None]) -> Tensor:
        """Computes the iterations after the first one, and returns drafts [chains, num_drafts] int64, EMPTY-padded.

        `first` is the output of the first iteration for the newest token of each chain. It is overwritten.
        `iteration(number)` is called for 1, 2 and so on, and returns None if no chain has that many drafts.
        """
        counts, num_drafts, first_drafted = chains.counts, chains.num_drafts, chains.positions + 2
        tokens = torch.full((num_drafts, counts.shape[0]), EMPTY, dtype=torch.int64, device=counts.device)
        tokens[0] = self._choose(first, chains.seats, first_drafted, 0)
        for number in range(1, num_drafts):
            part = iteration(number)
            if part is None:
                break
            some = part.chains
            output = self._model.run_mtp(tokens[number - 1, some], first.carried[some], part.view, first.selected[some])
            first.carried[some] = output.carried
            tokens[number, some] = self._choose(output, chains.seats[some], first_drafted[some], number)
        place = torch.arange(num_drafts, device=counts.device)
        return torch.where(place < counts[:, None], tokens.T, EMPTY)

    def _choose(self, output: MtpOutput, seats: Tensor, first_drafted: Tensor, number: int) -> Tensor:
        """Returns draft `number` of each of these seats. `first_drafted` are the positions of their first drafts."""
        logits = self._model.mtp_logits(output.normed)
        if self._draw is None:
            return logits.argmax(1)
        logits = finite_logits(logits)
        self.seat_drafts.kept_logits(logits)[seats, number] = logits
        return self._draw(logits, seats, first_drafted + number)


def rows_of(output: MtpOutput, indices: Tensor) -> MtpOutput:
    """Returns a copy of the output of some tokens."""
    return MtpOutput(output.carried[indices], output.normed[indices], output.selected[indices])
