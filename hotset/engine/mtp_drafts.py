"""Drafts tokens with the model's MTP layer, at the end of each step. docs/mtp.md describes the layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hotset.engine.decode_graphs import RunnerModel
from hotset.kernels.device_copies import list_to_device
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
class _Chain:
    """A segment whose next tokens are drafted."""

    segment: int
    newest: int  # the index, among the step's tokens, of the last one that is kept
    position: int  # the position of that token
    count: int  # number of tokens to draft


class MtpDrafts:
    """Keeps the rows of the MTP layer complete, and drafts tokens for the next step.

    After each step, the layer computes all its tokens again, each together with the token that follows it. This writes
    the layer's rows, and drafts one token. Every further token needs one more iteration, at the positions after the
    newest token. The rows that these iterations write are provisional: the next step begins at the same position and
    writes them again.
    """

    def __init__(self, model: MtpModel, memory: KvMemory, tokens: Tensor, max_drafts: int) -> None:
        """`tokens` [seats, context + 1] int32 holds the token ids of every seat."""
        self._model, self._memory, self._tokens, self._max_drafts = model, memory, tokens, max_drafts

    def write_rows(self, view: ResidentView, hidden: Tensor) -> MtpOutput:
        """Writes the layer's rows of a step's tokens. `hidden` is what the model returned for them. The tokens that
        the step sampled are in `tokens`."""
        following = self._tokens[view.seat_of, view.segments.positions + 1].long()
        return self._model.run_mtp(following, self._model.mtp_input(hidden), view)

    def draft(self, plan: Plan, output: MtpOutput, token_ids: Sequence[int]) -> Mapping[int, Sequence[int]]:
        """Returns drafts of the tokens after the newest one of each segment, by segment. `token_ids` are those that the
        step sampled."""
        chains = [chain for chain in self._chains(plan, token_ids) if chain.count > 0]
        if not chains:
            return {}
        newest = list_to_device([chain.newest for chain in chains], torch.int64, self._tokens.device)
        hidden, selected = output.carried[newest, None], output.selected[newest]  # hidden: [chains, iterations, hidden]
        drafted = self._model.mtp_logits(output.normed[newest]).argmax(1)[:, None]  # [chains, iterations]
        drafts = {chain.segment: [token] for chain, token in zip(chains, drafted[:, 0].tolist(), strict=True)}
        for number in range(1, self._max_drafts):
            kept = [index for index, chain in enumerate(chains) if chain.count > number]
            if not kept:
                break
            chains = [chains[index] for index in kept]
            rows = list_to_device(kept, torch.int64, self._tokens.device)
            hidden, selected, drafted = hidden[rows], selected[rows], drafted[rows]
            carried, tokens = self._next(plan, chains, hidden, selected, drafted)
            hidden = torch.cat((hidden, carried[:, None]), dim=1)
            drafted = torch.cat((drafted, tokens[:, None]), dim=1)
            for chain, token in zip(chains, tokens.tolist(), strict=True):
                drafts[chain.segment].append(token)
        return drafts

    def _next(
        self, plan: Plan, chains: Sequence[_Chain], hidden: Tensor, selected: Tensor, drafted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Computes the tokens drafted so far, and returns the newest ones' hidden states and the tokens after them.

        Only tokens before the start of a view are final, so it begins at the first draft, and the earlier drafts are
        computed again. That takes hardly longer, because the layer's weights are read once for all tokens.
        """
        count = drafted.shape[1]
        view = self._memory.view(
            [plan.seats[chain.segment] for chain in chains],
            [chain.position + 1 for chain in chains],
            [count] * len(chains),
        )
        output = self._model.run_mtp(
            drafted.flatten(), hidden.flatten(0, 1), view, selected.repeat_interleave(count, dim=0)
        )
        tokens = self._model.mtp_logits(output.normed[count - 1 :: count]).argmax(1)
        return output.carried[count - 1 :: count], tokens

    def _chains(self, plan: Plan, token_ids: Sequence[int]) -> list[_Chain]:
        """Returns a chain for each segment that sampled tokens."""
        num_kept = dict.fromkeys(plan.sampled, 0)
        for index in plan.kept(token_ids):
            num_kept[plan.sampled[index]] += 1
        chains, first = [], 0
        for segment, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
            if segment in num_kept:
                rejected = len(plan.drafts.get(segment, ())) + 1 - num_kept[segment]
                position = start + count - 1 - rejected
                room = plan.draft_limits[segment] - position if plan.draft_limits else 0
                most = self._most_drafts(plan.seats[segment])
                chains.append(_Chain(segment, first + count - 1 - rejected, position, min(most, room)))
            first += count
        return chains

    def _most_drafts(self, seat: int) -> int:
        """Returns how many tokens of a request can be drafted.

        Drafting n tokens of a tiered request selects rows for n - 1 of them, and the step that verifies them begins at
        the same position and selects rows for n + 1 tokens. No slot that one of them uses is evicted for another, and
        hot buffers are made for 1 + `max_drafts` selections.
        """
        return (1 + self._max_drafts) // 2 if seat in self._memory.tables.tiered_seats else self._max_drafts
