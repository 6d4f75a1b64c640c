"""Simple models of the KV memory: the bytes that requests wrote at each position, and the slots of tiered seats."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.rows import RowLayout, gqa_row, index_key_row, mla_row
from hotset.kernels.segments import Segments
from hotset.memory.device_pool import DevicePool, KvShape
from hotset.memory.geometry import TAIL_PAGES, Geometry
from hotset.memory.host_store import HostStore
from hotset.memory.view import View
from hotset.tiers.commands import Command, Demote, Load, Promote
from hotset.tiers.hot_buffers import NEVER
from hotset.tiers.residence import Residence

POISON = 0xAB

# Bytes of a row and its stride, in the order of these shapes: 10 of 12, 26 of 32, 144 of 144 (fp8, two scales), 13 of
# 16, and 12 of 16. "gqa" has no indexer.
SHAPES = {
    "shared": KvShape(4, RowLayout(5, torch.bfloat16, align=4), (0, 2), index_key_row(3, torch.bfloat16), topk=3),
    "uneven": KvShape(4, mla_row(9, 4, torch.bfloat16), (0, 1, 3), index_key_row(5, torch.float32), topk=4),
    "fp8": KvShape(2, mla_row(130, 3, torch.bfloat16, fp8=True), (0, 1), index_key_row(6, torch.bfloat16, True), 2),
    "bytes": KvShape(2, RowLayout(13, torch.uint8), (0,), RowLayout(7, torch.uint8, align=1), topk=3),
    "gqa": KvShape(2, gqa_row(1, 3, torch.float16)),
}


class Written:
    """The expected rows and index keys of one request, and the positions that its newest token selected, by group."""

    def __init__(self, shape: KvShape, context: int) -> None:
        self._shape = shape
        self.length = 0
        self.rows = torch.full((shape.layers, context, shape.row.stride_bytes), POISON, dtype=torch.uint8)
        key_bytes = 0 if shape.key is None else shape.key.stride_bytes
        self.keys = torch.full((shape.groups, context, key_bytes), POISON, dtype=torch.uint8)
        self.last_chosen: list[set[int]] = [set() for _ in range(shape.groups)]

    def values(self, layer: int, length: int) -> Tensor:
        """Returns rows [0, length) as bytes, in the form in which `PagedRows.gather` should return them."""
        return _decoded_bytes(self.rows[layer, :length], self._shape.row)

    def key_values(self, group: int, length: int) -> Tensor:
        assert self._shape.key is not None
        return _decoded_bytes(self.keys[group, :length], self._shape.key)


class Attention:
    """Takes the place of a model: writes random rows, selects random positions, and checks what it reads."""

    def __init__(self, shape: KvShape, seed: int) -> None:
        self._shape = shape
        self._random = Random(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def forward(self, view: View, batch: Sequence[Written]) -> None:
        """Runs one step and calls the view as a decoder does. `batch[i]` is the request of the view's segment i."""
        positions: Tensor | None = None
        for layer in range(self._shape.layers):
            self._append(view, batch, layer)
            if not self._shape.groups:
                self._compare_context(view, batch, layer)
                continue
            if layer in self._shape.key_layers:
                group = self._shape.key_layers.index(layer)
                self._append_keys(view, batch, group)
                positions = self._choose(view.segments, batch, group)
            assert positions is not None
            self._compare_selected(view, batch, layer, positions)
        for segment, _first, _last, length in view.segments:
            batch[segment].length = length

    def _append(self, view: View, batch: Sequence[Written], layer: int) -> None:
        values = self._values(self._shape.row, view.segments)
        view.new_rows(layer).store(values)
        stored = as_bytes(self._shape.row.encode(values))
        for segment, first, last, length in view.segments:
            batch[segment].rows[layer, length - (last - first) : length] = stored[first:last]

    def _append_keys(self, view: View, batch: Sequence[Written], group: int) -> None:
        layout = self._shape.key
        assert layout is not None
        values = self._values(layout, view.segments)
        view.keys(group).store(view.segments.positions, values)
        stored = as_bytes(layout.encode(values))
        keys = view.keys(group)
        for segment, first, last, length in view.segments:
            batch[segment].keys[group, length - (last - first) : length] = stored[first:last]
            got, expected = as_bytes(keys.gather(segment, length)), batch[segment].key_values(group, length)
            assert torch.equal(got, expected), f"index keys of group {group} differ"

    def _compare_context(self, view: View, batch: Sequence[Written], layer: int) -> None:
        context = view.context(layer)
        for segment, _first, _last, length in view.segments:
            got, expected = as_bytes(context.gather(segment, length)), batch[segment].values(layer, length)
            assert torch.equal(got, expected), f"rows of layer {layer} differ"

    def _compare_selected(self, view: View, batch: Sequence[Written], layer: int, positions: Tensor) -> None:
        selected = view.select(layer, positions)
        valid = positions != EMPTY
        assert torch.equal(selected.row_ids != EMPTY, valid), "padding became rows, or rows became padding"
        got = as_bytes(selected.rows[selected.row_ids[valid]])
        expected = [
            batch[segment].rows[layer, positions[first:last][valid[first:last]]]
            for segment, first, last, _length in view.segments
        ]
        same = (got == torch.cat(expected)).all(1)
        assert bool(same.all()), f"layer {layer}: rows differ at {positions[valid][~same].tolist()}"

    def _choose(self, segments: Segments, batch: Sequence[Written], group: int) -> Tensor:
        """Returns positions [tokens, topk] in ascending order, EMPTY-padded at the end, as an indexer does."""
        topk, chosen = self._shape.topk, []
        for segment, first, last, length in segments:
            for newest in range(length - (last - first), length):
                chosen.append(self._choose_from(newest, batch[segment].last_chosen[group]))
            batch[segment].last_chosen[group] = set(chosen[-1])
        return torch.tensor([row + [EMPTY] * (topk - len(row)) for row in chosen], dtype=torch.int64)

    def _choose_from(self, newest: int, last_chosen: set[int]) -> list[int]:
        """Returns up to top-k positions: some of `last_chosen` (hits), recent ones (the tail) and random ones."""
        count = min(self._shape.topk, newest + 1)
        if self._random.random() < 0.1:
            count = self._random.randint(0, count)
        again = [position for position in last_chosen if self._random.random() < 0.5]
        recent = [position for position in range(max(0, newest - 4), newest + 1) if self._random.random() < 0.2]
        anywhere = self._random.sample(range(newest + 1), count)
        return sorted(list(dict.fromkeys(again + recent + anywhere))[:count])

    def _values(self, layout: RowLayout, segments: Segments) -> Tensor:
        """Returns random values [tokens, width]: random bits, or finite numbers if the layout quantises them."""
        size = (segments.positions.shape[0], layout.width)
        if layout.quantised:
            return torch.randn(size, generator=self._generator).to(layout.dtype)
        raw = torch.randint(256, (size[0], size[1] * layout.dtype.itemsize), generator=self._generator)
        return raw.to(torch.uint8).view(layout.dtype)


@dataclass(slots=True)
class Slots:
    """The slots of one seat and index group. The least recently used slot is evicted; ties evict the lower slot."""

    position_of: list[int]
    last_used: list[int]

    def use(self, positions: Sequence[int], stamp: int) -> int:
        """Puts missing positions into slots and stamps the slots of all `positions`. Returns how many were missing."""
        missing = [position for position in positions if position not in self.position_of]
        for slot, position in enumerate(self.position_of):
            if position in positions:
                self.last_used[slot] = stamp
        idle = [slot for slot, used in enumerate(self.last_used) if used != stamp]
        victims = sorted(idle, key=lambda slot: self.last_used[slot])[: len(missing)]
        for slot, position in zip(sorted(victims), missing, strict=True):
            self.position_of[slot], self.last_used[slot] = position, stamp
        return len(missing)


class SlotModel:
    """The slots of every tiered seat, as lists, and the numbers of lookups and misses per index group."""

    def __init__(self, shape: KvShape, geometry: Geometry, seats: int) -> None:
        self._geometry = geometry
        self._opened_at: dict[int, int] = {}  # context length at which each seat became tiered
        self.last_chosen: list[list[list[int]]] = [[[] for _ in range(shape.groups)] for _ in range(seats)]
        self.slots: dict[int, list[Slots]] = {}  # by seat, one for each index group
        self.lookups, self.misses = [0] * shape.groups, [0] * shape.groups

    def execute(self, command: Command) -> None:
        """Changes the slots as the KV memory should when it executes a command."""
        match command:
            case Demote(seat, length, first):
                self._opened_at[seat] = length
                self.slots[seat] = [self._demoted(chosen, length, first) for chosen in self.last_chosen[seat]]
            case Load(seat, length, Residence.TIERED):
                self._opened_at[seat] = length
                self.slots[seat] = [self._opened(chosen, length) for chosen in self.last_chosen[seat]]
            case Promote(seat):
                self.remove(seat)

    def remove(self, seat: int) -> None:
        """Removes the slots of a seat that is not tiered any more."""
        self.slots.pop(seat, None)

    def move_tail_to_slots(self, seat: int, start: int) -> None:
        """If the row at `start` is the first to overwrite a tail page, moves the newest rows of that page into slots.

        Moves the whole page if all rows outside the tail fit into slots. Otherwise the previous step may have used up
        to topk slots, and the number of rows that move is limited to the others.
        """
        page_rows, slots = self._geometry.page_rows, self._geometry.slots
        first = start - TAIL_PAGES * page_rows
        if seat not in self.slots or start % page_rows or first < 0 or start == self._opened_at[seat]:
            return
        count = page_rows if first + page_rows <= slots else min(page_rows, slots - self._geometry.topk)
        for slots_of_group in self.slots[seat]:
            slots_of_group.use(range(first + page_rows - count, first + page_rows), start - 1)

    def choose(self, seat: int, newest: int, chosen: Sequence[Iterable[int]]) -> None:
        """Looks up the positions that the token at `newest` selected in each index group."""
        self.last_chosen[seat] = [sorted(positions) for positions in chosen]
        tail_first = self._geometry.tail_first(newest)
        for group, slots in enumerate(self.slots.get(seat, [])):
            looked_up = [position for position in self.last_chosen[seat][group] if position < tail_first]
            missed = slots.use(looked_up, newest)
            assert not missed or tail_first > self._geometry.slots, "a row was missing, but all rows fit into slots"
            self.lookups[group] += len(looked_up)
            self.misses[group] += missed

    def _opened(self, chosen: Sequence[int], length: int) -> Slots:
        slots, tail_first = self._geometry.slots, self._geometry.tail_first(length)
        opened = Slots([EMPTY] * slots, [NEVER] * slots)
        loaded = (
            range(tail_first) if tail_first <= slots else [position for position in chosen if position < tail_first]
        )
        opened.use(loaded, length - 1)
        return opened

    def _demoted(self, chosen: Sequence[int], length: int, first: int) -> Slots:
        """Keeps rows in place as slots.

        Selected rows that are neither in slots nor in the tail replace rows in slots that are not selected.
        """
        begin, tail_first = first * self._geometry.page_rows, self._geometry.tail_first(length)
        held = list(range(begin, begin + self._geometry.slots))
        demoted = Slots(held, [length - 1 if position in chosen else position for position in held])
        moved = [position for position in chosen if position < tail_first and position not in held]
        free = [slot for slot, position in enumerate(held) if position not in chosen]
        for slot, position in zip(free, moved, strict=False):
            demoted.position_of[slot], demoted.last_used[slot] = position, length - 1
        return demoted


class Poisoner:
    """Writes POISON to memory that must not be read: at construction to all memory, in `poison` to the given pages."""

    def __init__(self, pool: DevicePool, host: HostStore) -> None:
        self._pool, self._host = pool, host
        self.poison(range(pool.pages), range(host.rows.shape[1] // host.page_rows))

    def poison(self, device_pages: Sequence[int], host_pages: Sequence[int]) -> None:
        if device_pages:
            self._pool.bytes[:, torch.tensor(device_pages)] = POISON
        if host_pages:
            rows = torch.tensor(host_pages)[:, None] * self._host.page_rows + torch.arange(self._host.page_rows)
            for tensor in (self._host.rows, self._host.keys):
                if tensor is not None:
                    tensor.view(torch.uint8)[:, rows.flatten()] = POISON


def as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _decoded_bytes(stored: Tensor, layout: RowLayout) -> Tensor:
    return as_bytes(layout.decode(stored.view(layout.stored_dtype)))
