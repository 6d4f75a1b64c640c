"""How rows are divided: which bytes of the whole model's row lie where, and which of two sides' shards share bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hotset.handoff.messages import Shard, Slices, Span, Store


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a shard of the target takes from a shard of the source."""

    source: int
    target: int
    pieces: tuple[tuple[int, int, int], ...]  # (first byte in the source's stored row, in the target's, bytes)

    @property
    def row_bytes(self) -> int:
        """Of each row."""
        return sum(nbytes for _, _, nbytes in self.pieces)


def whole_rows(span: Span) -> tuple[Shard, ...]:
    """Rows that lie in one piece."""
    return (Shard(span, ((0, span.row_bytes),)),)


def head_shards(spans: Sequence[Span], heads: int, head_bytes: int) -> tuple[Shard, ...]:
    """K and then V of `heads` heads, `head_bytes` each, divided over ranks of which each has a span. With more ranks
    than heads neighbours hold the same one."""
    ranks, per_rank = len(spans), max(1, heads // len(spans))
    assert heads % ranks == 0 or ranks % heads == 0, f"{heads} heads over {ranks} ranks"
    firsts = [rank * heads // ranks * head_bytes for rank in range(ranks)]
    nbytes = per_rank * head_bytes
    return tuple(
        Shard(span, ((first, nbytes), (heads * head_bytes + first, nbytes)))
        for span, first in zip(spans, firsts, strict=True)
    )


def stored_bytes(shard: Shard) -> int:
    """Of each stored row, without what is left free at its end."""
    return sum(nbytes for _, nbytes in shard.slices)


def row_bytes(store: Store) -> int:
    """Of the whole model's row."""
    return max((first + nbytes for shard in store.shards for first, nbytes in shard.slices), default=0)


def gap(store: Store) -> int | None:
    """The first byte of the whole row that no shard holds."""
    end = 0
    for first, nbytes in sorted(each for shard in store.shards for each in shard.slices):
        if first > end:
            return end
        end = max(end, first + nbytes)
    return None


def store_overlaps(source: Store, target: Store) -> tuple[Overlap, ...]:
    """Who gives what to whom, so that every byte of every target's row is written once."""
    return overlaps(tuple(each.slices for each in source.shards), tuple(each.slices for each in target.shards))


@lru_cache(maxsize=1024)
def overlaps(source: tuple[Slices, ...], target: tuple[Slices, ...]) -> tuple[Overlap, ...]:
    """The same, by their slices: in the order of targets. Of several sources with the same bytes one gives them; which
    one differs from target to target, so that none has to serve all."""
    found = []
    for number, slices in enumerate(target):
        missing, at = [], 0
        for first, nbytes in slices:
            missing.append((first, at, nbytes))
            at += nbytes
        start = number * len(source) // len(target)
        for step in range(len(source)):
            giver = (start + step) % len(source)
            pieces, missing = _taken(source[giver], missing)
            if pieces:
                found.append(Overlap(giver, number, _merged(pieces)))
    return tuple(found)


_Missing = list[tuple[int, int, int]]  # (first byte in the whole row, in the target's stored row, bytes)


def _taken(source: Slices, missing: _Missing) -> tuple[list[tuple[int, int, int]], _Missing]:
    """What of `missing` a source has, as pieces, and what is missing then."""
    pieces, at = [], 0
    for first, nbytes in source:
        rest: _Missing = []
        for wanted, there, length in missing:
            begin, end = max(first, wanted), min(first + nbytes, wanted + length)
            if begin >= end:
                rest.append((wanted, there, length))
                continue
            pieces.append((at + begin - first, there + begin - wanted, end - begin))
            if wanted < begin:
                rest.append((wanted, there, begin - wanted))
            if end < wanted + length:
                rest.append((end, there + end - wanted, wanted + length - end))
        missing, at = rest, at + nbytes
    return sorted(pieces, key=lambda piece: piece[1]), missing


def _merged(pieces: list[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    merged = pieces[:1]
    for here, there, nbytes in pieces[1:]:
        before_here, before_there, before = merged[-1]
        if (before_here + before, before_there + before) == (here, there):
            merged[-1] = (before_here, before_there, before + nbytes)
        else:
            merged.append((here, there, nbytes))
    return tuple(merged)
