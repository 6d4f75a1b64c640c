"""Drafts tokens with the model's MTP layer, at the end of each step. docs/mtp.md describes the layer.

Which drafts of the step were right is found on the device, so nothing here waits for it where graphs are replayed
(`mtp_graphs.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from hotset.engine.decode_graphs import RunnerModel
from hotset.kernels import EMPTY
from hotset.kernels.device_copies import list_to_device, to_host_async
from hotset.memory.resident import ResidentView
from hotset.memory.view import View
from hotset.models.mtp import MtpOutput
from hotset.schedule.plan import Plan
from hotset.tiers.kv_memory import KvMemory


@runtime_checkable
class MtpModel(RunnerModel, Protocol):
    """A model whose MTP layer is loaded. See `Decoder`."""

    def mtp_input(self, x: Tensor) -> Tensor: ...

    def run_mtp(self, token_ids: Tensor, hidden: Tensor, view: View, selected: Tensor | None = None) -> MtpOutput: ...

    def mtp_logits(self, normed: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Chains:
    """The requests of a step whose next tokens are drafted. Tensors have an entry for each, int64, on the device."""

    segments: Sequence[int]
    num_drafts: int  # the most of `counts`
    seats: Tensor
    starts: Tensor  # the position where the step began
    newest: Tensor  # the index, among the step's tokens, of the last one that is kept
    positions: Tensor  # the position of that token
    counts: Tensor  # number of tokens to draft


class Iteration(NamedTuple):
    """An iteration of the layer after the first one: one token for each of some chains."""

    chains: Tensor | slice  # their indices
    view: View


class DraftedTokens:
    """The drafts of a step, which are on their way from the device to the host."""

    def __init__(self, segments: Sequence[int], tokens: Tensor) -> None:
        """`tokens` [segments, drafts] int64, EMPTY-padded."""
        self._segments = segments
        self._tokens, self._wait = to_host_async(tokens)

    def by_segment(self) -> Mapping[int, Sequence[int]]:
        """Waits for the drafts of this step, but not for later steps."""
        self._wait()
        rows: list[list[int]] = self._tokens.tolist()
        pairs = zip(self._segments, rows, strict=True)
        drafts = {segment: [token for token in row if token != EMPTY] for segment, row in pairs}
        return {segment: tokens for segment, tokens in drafts.items() if tokens}


class MtpDrafts:
    """Keeps the rows of the MTP layer complete, and drafts tokens for the next step.

    After each step, the layer computes all its tokens again, each together with the token that follows it. This writes
    the layer's rows, and drafts one token. Every further token needs one more iteration, at the next position after the
    newest token. The rows that these iterations write are provisional: the next step begins at the same position and
    writes them again. They are in the tail and in the slots of the step that they follow, whatever it accepted.
    """

    def __init__(self, model: MtpModel, memory: KvMemory, tokens: Tensor, max_drafts: int) -> None:
        """`tokens` [seats, context + 1] int32 holds the token ids of every seat."""
        self._model, self._memory, self._tokens, self.max_drafts = model, memory, tokens, max_drafts

    def write_rows(self, view: ResidentView, hidden: Tensor) -> MtpOutput:
        """Writes the layer's rows of a step's tokens. `hidden` is what the model returned for them. The tokens that
        the step sampled are in `tokens`."""
        following = self._tokens[view.seat_of, view.segments.positions + 1].long()
        return self._model.run_mtp(following, self._model.mtp_input(hidden), view)

    def chains(self, plan: Plan, token_ids: Tensor) -> Chains | None:
        """Returns the chains of a step that sampled `token_ids`, or None if nothing can be drafted."""
        segments, columns, first_token, first_sampled, sampled = [], [], 0, 0, set(plan.sampled)
        for segment, limit in enumerate(plan.draft_limits):
            seat, start, count = plan.seats[segment], plan.starts[segment], plan.counts[segment]
            if segment in sampled:
                drafts = plan.drafts.get(segment, ())
                final = count - 1 - len(drafts)  # the last token of the segment that is certainly kept
                if limit > start + final:
                    segments.append(segment)
                    padding = [EMPTY] * (self.max_drafts - len(drafts))
                    most = min(plan.num_drafts, self._most_drafts(seat))
                    column = (seat, start, first_token + final, start + final, limit, most)
                    columns.append((*column, first_sampled, *drafts, *padding))
                first_sampled += 1 + len(drafts)
            first_token += count
        if not segments or not plan.num_drafts:
            return None
        table = list_to_device(columns, torch.int64, self._tokens.device)
        seats, starts, newest, positions, limits, most_drafts, first = table[:, :7].unbind(1)
        place = torch.arange(self.max_drafts, device=table.device)
        in_place = token_ids[(first[:, None] + place).clamp_max(token_ids.shape[0] - 1)]
        accepted = (in_place == table[:, 7:]).long().cumprod(1).sum(1)
        positions = positions + accepted
        counts = torch.minimum(most_drafts, limits - positions).clamp_min(0)
        return Chains(segments, plan.num_drafts, seats, starts, newest + accepted, positions, counts)

    def draft(self, chains: Chains, output: MtpOutput) -> Tensor:
        """Returns drafts [chains, num_drafts] of the tokens after the newest one of each chain, EMPTY-padded. `output`
        is what `write_rows` returned. This waits for the device."""
        columns = torch.stack((chains.seats, chains.positions, chains.starts, chains.counts), dim=1).tolist()

        def iteration(number: int) -> Iteration | None:
            kept = [index for index, (*_, count) in enumerate(columns) if count > number]
            if not kept:
                return None
            seats, positions, starts, _ = zip(*(columns[index] for index in kept), strict=True)
            view = self._memory.draft_view(seats, [position + number for position in positions], starts)
            return Iteration(list_to_device(kept, torch.int64, self._tokens.device), view)

        newest = chains.newest
        first = MtpOutput(output.carried[newest], output.normed[newest], output.selected[newest])
        return self.iterate(first, chains.counts, chains.num_drafts, iteration)

    def iterate(
        self, first: MtpOutput, counts: Tensor, num_drafts: int, iteration: Callable[[int], Iteration | None]
    ) -> Tensor:
        """Computes the iterations after the first one, and returns drafts [chains, num_drafts] int64, EMPTY-padded.

        `first` is the output of the first iteration for the newest token of each chain, which is overwritten.
        `iteration(number)` is called for 1, 2 and so on, and returns None if no chain has so many drafts.
        """
        tokens = torch.full((num_drafts, counts.shape[0]), EMPTY, dtype=torch.int64, device=counts.device)
        tokens[0] = self._model.mtp_logits(first.normed).argmax(1)
        for number in range(1, num_drafts):
            part = iteration(number)
            if part is None:
                break
            some = part.chains
            output = self._model.run_mtp(tokens[number - 1, some], first.carried[some], part.view, first.selected[some])
            first.carried[some] = output.carried
            tokens[number, some] = self._model.mtp_logits(output.normed).argmax(1)
        place = torch.arange(num_drafts, device=counts.device)
        return torch.where(place < counts[:, None], tokens.T, EMPTY)

    def _most_drafts(self, seat: int) -> int:
        geometry = self._memory.pool.geometry
        return geometry.max_tiered_drafts if seat in self._memory.tables.tiered_seats else self.max_drafts
