"""The part of a step with drafts that only the device knows: where requests begin, which drafts they verify, and how
many of these are right.

A plan can be submitted before the results of earlier plans are known. The plan then has only the earliest positions at
which its segments can begin. `SeatDrafts` has the true ones, on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.device_copies import list_to_device
from hotset.models.sampler import DrawnDrafts
from hotset.schedule.plan import DRAFTED, NO_DRAFT, Plan

COLUMNS = 6  # of a row of `SampledSegments.rows` before its drafts


class SeatDrafts:
    """Device tensors with a row for each seat: the position at which its next step begins, and the drafts that follow
    its newest token. The last row belongs to padding, whose seat is EMPTY."""

    def __init__(self, seats: int, max_drafts: int, device: torch.device) -> None:
        self.next_starts = torch.zeros(seats + 1, dtype=torch.int64, device=device)
        self.tokens = torch.full((seats + 1, max_drafts), EMPTY, dtype=torch.int64, device=device)
        self.logits: Tensor | None = None  # [seats + 1, max_drafts, vocab]: those from which drafts were drawn

    @property
    def max_drafts(self) -> int:
        return self.tokens.shape[1]

    def starts(self, seats: Tensor, stamps: Tensor, unverified: Tensor) -> Tensor:
        """Returns where steps of these seats begin: at `stamps`, unless earlier plans have `unverified` drafts."""
        return torch.where(unverified > 0, self.next_starts[seats], stamps)

    def draft_ids(self, seats: Tensor, place: Tensor) -> Tensor:
        """Returns the drafts of these seats in these places, int32. Place 1 is the first draft. For place 0, which is
        no draft, the result has no meaning."""
        return self.tokens[seats, (place - 1).clamp_min(0)].clamp_min(0).to(torch.int32)

    def kept_logits(self, like: Tensor) -> Tensor:
        """Returns `logits`. The first call allocates them, for logits like these."""
        if self.logits is None:
            self.logits = like.new_zeros(*self.tokens.shape, like.shape[1])
        return self.logits


@dataclass(frozen=True, slots=True)
class Chains:
    """The tokens to draft after a step: for each of its sampled segments, a chain of up to `num_drafts`. Tensors have
    an entry for each, int64, on the device."""

    num_drafts: int  # no entry of `counts` is larger
    seats: Tensor
    stamps: Tensor  # of the step
    newest: Tensor  # the index, among the step's sampled tokens, of the token after the last accepted draft
    positions: Tensor  # the position of the last accepted draft, or of the token before all drafts
    counts: Tensor  # number of tokens to draft


class SampledSegments:
    """The segments of a plan that sample tokens, on the host. It implements `BatchDrafts` for the sampler.

    If earlier plans in flight verify drafts, the plan says only from where on its segments begin (`stamps`). They begin
    where the previous step of the same seat ended, which `SeatDrafts` knows.
    """

    def __init__(self, plan: Plan, seat_drafts: SeatDrafts) -> None:
        self._plan, self._seat_drafts = plan, seat_drafts
        self.segments: Sequence[int] = [*dict.fromkeys(plan.sampled)]
        # Seat, stamp, unverified drafts, tokens before the newest, index of the first sampled token, limit; drafts
        self.rows: list[Sequence[int]] = []
        first_sampled = 0
        for segment in self.segments:
            drafts = plan.drafts.get(segment, ())
            unverified = plan.unverified[segment] if plan.unverified else 0
            final = plan.counts[segment] - 1 - len(drafts)  # tokens before the last one that is certainly kept
            columns = plan.seats[segment], plan.starts[segment], unverified, final, first_sampled
            padding = [NO_DRAFT] * (seat_drafts.max_drafts - len(drafts))
            self.rows.append((*columns, plan.draft_limits[segment], *drafts, *padding))
            first_sampled += 1 + len(drafts)

    @property
    def has_drafts(self) -> bool:
        """Whether the plan verifies drafts."""
        return bool(self._plan.drafts)

    @cached_property
    def on_device(self) -> "SegmentTable":
        """The table of these segments. It reads what earlier steps wrote to `SeatDrafts`, so it must be made before
        later steps are submitted."""
        numbers = [number for row in self.rows for number in row]
        table = list_to_device(numbers, torch.int64, self._seat_drafts.tokens.device)
        return SegmentTable(table.view(len(self.rows), -1), self._seat_drafts, self._plan.num_drafts)

    def write_drafts(self, tokens: Tensor) -> None:
        """Stores drafts that only the device knows at the positions of the tokens that they guess. Rejected drafts are
        overwritten by the tokens sampled there, or by later drafts, before they are read again. `tokens` is
        [seats, context + 1] int32."""
        if self.has_drafts:
            table, (row, place, _) = self.on_device, self._places
            positions = (table.starts + table.final)[row] + 1 + place
            tokens[table.seats[row], positions] = table.verified[row, place].clamp_min(0).to(torch.int32)

    def followed_drafts(self) -> Tensor:
        """Returns [sampled tokens]: the draft whose logits yield each token. See `Plan.followed`."""
        row, place, sampled = self._places
        followed = torch.full((len(self._plan.sampled),), NO_DRAFT, dtype=torch.int64, device=row.device)
        followed[sampled] = self.on_device.verified[row, place]
        return followed

    def drawn_drafts(self) -> DrawnDrafts | None:
        """Returns the drafts to verify by rejection sampling; None if they were not drawn."""
        logits = self._seat_drafts.logits
        if logits is None or not self.has_drafts:
            return None
        table, (row, place, sampled) = self.on_device, self._places
        return DrawnDrafts(sampled - 1, table.verified[row, place], logits[table.seats[row], place])

    def starts(self) -> Sequence[int]:
        """Returns where each segment of the plan begins. Waits for the device, unless the scheduler knew it."""
        if not self._plan.unverified:
            return self._plan.starts
        starts = [*self._plan.starts]
        for segment, start in zip(self.segments, self.on_device.starts.tolist(), strict=True):
            starts[segment] = start
        return starts

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the row and the place of each draft, and the index of the sampled token that follows it."""
        places, first_sampled = [], 0
        for number, segment in enumerate(self.segments):
            drafts = range(len(self._plan.drafts.get(segment, ())))
            places += [(number, place, first_sampled + 1 + place) for place in drafts]
            first_sampled += 1 + len(drafts)
        row, place, sampled = list_to_device(places, torch.int64, self._seat_drafts.tokens.device).unbind(1)
        return row, place, sampled


class SegmentTable:
    """The sampled segments of a step on the device. Tensors have an entry for each, int64. A graph can contain this."""

    def __init__(self, table: Tensor, seat_drafts: SeatDrafts, num_drafts: int) -> None:
        """`table` has the rows of `SampledSegments`, or padding of seat EMPTY. Up to `num_drafts` tokens of each can be
        drafted after the step."""
        self._seat_drafts, self._num_drafts = seat_drafts, num_drafts
        self.seats, self.stamps, unverified, self.final, self._first_sampled, self._limits = table[:, :COLUMNS].unbind(
            1
        )
        self.starts = seat_drafts.starts(self.seats, self.stamps, unverified)
        # [segments, max_drafts]: the drafts to verify. EMPTY if the plan has none in this place, or none was drafted.
        drafts = table[:, COLUMNS:]
        self.verified = torch.where(drafts == DRAFTED, seat_drafts.tokens[self.seats], drafts)

    def accepted(self, token_ids: Tensor) -> Tensor:
        """Returns how many drafts of each segment are right, if these tokens were sampled."""
        place = torch.arange(self.verified.shape[1], device=token_ids.device)
        in_place = token_ids[(self._first_sampled[:, None] + place).clamp_max(token_ids.shape[0] - 1)]
        return (in_place == self.verified).long().cumprod(1).sum(1)

    def commit(self, accepted: Tensor) -> Chains:
        """Records where the next steps begin, and returns what can be drafted now."""
        positions = self.starts + self.final + accepted
        self._seat_drafts.next_starts[self.seats] = positions + 1
        counts = (self._limits - positions).clamp(0, self._num_drafts)
        newest = self._first_sampled + accepted
        return Chains(self._num_drafts, self.seats, self.stamps, newest, positions, counts)

    def keep_drafts(self, tokens: Tensor) -> None:
        """Keeps `tokens` [segments, drafts], EMPTY-padded, as drafts of the next steps."""
        self._seat_drafts.tokens[self.seats, : tokens.shape[1]] = tokens


def draft_columns_of_tokens(plan: Plan) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Returns three columns with an entry for every token of a plan: the first position at which its segment can begin;
    whether the segment can also begin later; and the token's place among the drafts that only the worker knows. Place 1
    is the first draft, and 0 means that the token is none of them."""
    segments = range(len(plan.seats))
    stamps = [plan.starts[segment] for segment in segments for _ in range(plan.counts[segment])]
    later = [int(drafts > 0) for drafts, count in zip(plan.unverified, plan.counts, strict=False) for _ in range(count)]
    places: list[int] = []
    for segment in segments:
        drafts = plan.drafts.get(segment, ())
        places += [0] * (plan.counts[segment] - len(drafts))
        places += [place if draft == DRAFTED else 0 for place, draft in enumerate(drafts, 1)]
    return stamps, later or [0] * len(stamps), places
