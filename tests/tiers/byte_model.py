"""Simple models of the KV memory: the bytes that every context has, and the slots of tiered seats."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from lru_slots import LruSlots
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.rows import RowLayout, gqa_row, index_key_row, mla_row
from hotset.kernels.segments import Segments
from hotset.memory.device_pool import DevicePool, KvShape
from hotset.memory.geometry import Geometry
from hotset.memory.host_store import HostStore
from hotset.memory.view import View
from hotset.tiers.commands import Command, Demote, Load, Promote
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


class Contents:
    """Random rows and index keys. Contexts with the same salt and tokens have the same bytes, all others their own.

    Every context has a number, which is an index into the tensors: the row and the keys of its last token.
    """

    def __init__(self, shape: KvShape, seed: int) -> None:
        self._shape = shape
        self._numbers: dict[tuple[str | int, int], int] = {}
        self._generator = torch.Generator().manual_seed(seed)
        self._size = 512
        self._fill()

    def numbers(self, salt: str, tokens: Sequence[int]) -> list[int]:
        """Returns the number of the context that ends at each of `tokens`."""
        numbers: list[int] = []
        for token in tokens:
            context = (numbers[-1] if numbers else salt, token)
            numbers.append(self._numbers.setdefault(context, len(self._numbers)))
        if len(self._numbers) > self._size:
            self._size *= 2
            self._fill()
        return numbers

    def _fill(self) -> None:
        """Draws the values of all numbers. When there are more numbers, the earlier ones keep their values."""
        shape, key = self._shape, self._shape.key
        self.row_values = self._extended("row_values", shape.row, shape.layers)  # [layers, numbers, width]
        self.rows = as_bytes(shape.row.encode(self.row_values))  # [layers, numbers, stride_bytes]
        if key is not None:
            self.key_values = self._extended("key_values", key, shape.groups)  # [groups, numbers, width]
            self.keys = as_bytes(key.encode(self.key_values))
            self.decoded_keys = _decoded_bytes(self.keys, key)
        self.decoded_rows = _decoded_bytes(self.rows, shape.row)

    def _extended(self, name: str, layout: RowLayout, layers: int) -> Tensor:
        earlier: Tensor | None = getattr(self, name, None)
        new = self._random(layout, layers, self._size - (0 if earlier is None else earlier.shape[1]))
        return new if earlier is None else torch.cat((earlier, new), 1)

    def _random(self, layout: RowLayout, layers: int, count: int) -> Tensor:
        """Returns random values [layers, count, width]: random bits, or finite numbers if the layout quantises them."""
        if layout.quantised:
            return torch.randn((layers, count, layout.width), generator=self._generator).to(layout.dtype)
        size = (layers, count, layout.width * layout.dtype.itemsize)
        return torch.randint(256, size, generator=self._generator, dtype=torch.uint8).view(layout.dtype)


class Written:
    """The rows that one request has: the numbers of its contexts, and the positions that its newest tokens selected."""

    def __init__(self, numbers: Sequence[int], groups: int, length: int = 0) -> None:
        self.numbers = numbers  # of every position, computed or not
        self.length = length
        self.chosen: list[list[list[int]]] = [[[]] for _ in range(groups)]  # by each token of the newest step


class Attention:
    """Takes the place of a model: writes the rows of `contents`, selects random positions, and checks what it reads."""

    def __init__(self, shape: KvShape, contents: Contents, seed: int) -> None:
        self._shape = shape
        self._contents = contents
        self._random = Random(seed)

    def forward(self, view: View, batch: Sequence[Written]) -> None:
        """Runs one step and calls the view as a decoder does. `batch[i]` is the request of the view's segment i."""
        new, whole = [], []  # numbers of the step's tokens, and of all positions of each segment's context
        for segment, first, last, length in view.segments:
            new += batch[segment].numbers[length - (last - first) : length]
            whole += batch[segment].numbers[:length]
        numbers, contexts = torch.tensor(new), torch.tensor(whole)
        positions: Tensor | None = None
        selected = torch.tensor([])
        for layer in range(self._shape.layers):
            view.new_rows(layer).store(self._contents.row_values[layer, numbers])
            if not self._shape.groups:
                got = torch.cat([view.context(layer).gather(span.segment, span.length) for span in view.segments])
                same = torch.equal(as_bytes(got), self._contents.decoded_rows[layer, contexts])
                assert same, f"rows of layer {layer} differ"
                continue
            if layer in self._shape.key_layers:
                group = self._shape.key_layers.index(layer)
                self._append_keys(view, group, numbers, contexts)
                positions, selected = self._choose(view.segments, batch, group)
            assert positions is not None
            self._compare_selected(view, layer, positions, selected)
        for segment, _first, _last, length in view.segments:
            batch[segment].length = length

    def _append_keys(self, view: View, group: int, numbers: Tensor, contexts: Tensor) -> None:
        keys = view.keys(group)
        keys.store(view.segments.positions, self._contents.key_values[group, numbers])
        got = torch.cat([keys.gather(span.segment, span.length) for span in view.segments])
        same = torch.equal(as_bytes(got), self._contents.decoded_keys[group, contexts])
        assert same, f"index keys of group {group} differ"

    def _compare_selected(self, view: View, layer: int, positions: Tensor, selected: Tensor) -> None:
        found = view.select(layer, positions)
        found.wait()
        valid = positions != EMPTY
        assert torch.equal(found.row_ids != EMPTY, valid), "padding became rows, or rows became padding"
        same = (as_bytes(found.rows[found.row_ids[valid]]) == self._contents.rows[layer, selected]).all(1)
        assert bool(same.all()), f"layer {layer}: rows differ at {positions[valid][~same].tolist()}"

    def _choose(self, segments: Segments, batch: Sequence[Written], group: int) -> tuple[Tensor, Tensor]:
        """Returns positions [tokens, topk] in ascending order, EMPTY-padded at the end, as an indexer does, and the
        numbers of the contexts at these positions."""
        topk, chosen, numbers = self._shape.topk, [], []
        for segment, first, last, length in segments:
            earlier = set(batch[segment].chosen[group][-1])
            for newest in range(length - (last - first), length):
                chosen.append(self._choose_from(newest, earlier))
                numbers += [batch[segment].numbers[position] for position in chosen[-1]]
            batch[segment].chosen[group] = chosen[first:last]
        padded = [row + [EMPTY] * (topk - len(row)) for row in chosen]
        return torch.tensor(padded, dtype=torch.int64), torch.tensor(numbers, dtype=torch.int64)

    def _choose_from(self, newest: int, last_chosen: set[int]) -> list[int]:
        """Returns up to top-k positions: some of `last_chosen` (hits), recent ones (the tail) and random ones."""
        count = min(self._shape.topk, newest + 1)
        if self._random.random() < 0.1:
            count = self._random.randint(0, count)
        again = [position for position in last_chosen if position <= newest and self._random.random() < 0.5]
        recent = [position for position in range(max(0, newest - 4), newest + 1) if self._random.random() < 0.2]
        anywhere = self._random.sample(range(newest + 1), count)
        return sorted(list(dict.fromkeys(again + recent + anywhere))[:count])


class SlotModel:
    """The slots of every tiered seat, as lists, and the numbers of lookups and misses per index group."""

    def __init__(self, shape: KvShape, geometry: Geometry, seats: int) -> None:
        self._geometry = geometry
        self._tail_first: dict[int, int] = {}  # the first position that each tiered seat reads from its tail
        self.last_chosen: list[list[list[int]]] = [[[] for _ in range(shape.groups)] for _ in range(seats)]
        self.slots: dict[int, list[LruSlots]] = {}  # by seat, one for each index group
        self.lookups, self.misses = [0] * shape.groups, [0] * shape.groups

    def execute(self, command: Command) -> None:
        """Changes the slots as the KV memory should when it executes a command."""
        match command:
            case Demote(seat, length, first):
                self._tail_first[seat] = self._geometry.tail_first(length)
                self.slots[seat] = [self._demoted(chosen, length, first) for chosen in self.last_chosen[seat]]
            case Load(seat, length, Residence.TIERED):
                self._tail_first[seat] = self._geometry.tail_first(length)
                self.slots[seat] = [self._opened(chosen, length) for chosen in self.last_chosen[seat]]
            case Promote(seat):
                self.remove(seat)

    def remove(self, seat: int) -> None:
        """Removes the slots of a seat that is not tiered any more."""
        self.slots.pop(seat, None)

    def move_tail_to_slots(self, seat: int, start: int) -> None:
        """Moves the newest of the rows that a step whose first token is at `start` does not read from the tail any more
        into slots.

        Moves all of them if all rows outside the tail fit into slots. Otherwise the previous step may have used up to
        topk slots for each of its tokens, and the number of rows that move is limited to the others.
        """
        geometry = self._geometry
        if seat not in self.slots or self._tail_first[seat] == geometry.tail_first(start):
            return
        first, last = self._tail_first[seat], geometry.tail_first(start)
        self._tail_first[seat] = last
        unused = geometry.slots - geometry.slots_per_step
        count = last - first if last <= geometry.slots else min(last - first, unused)
        for slots_of_group in self.slots[seat]:
            slots_of_group.use(range(last - count, last), start - 1)

    def choose(self, seat: int, start: int, chosen: Sequence[Sequence[Sequence[int]]]) -> None:
        """Looks up the positions that each token of a step, of which the first is at `start`, selected in each index
        group."""
        self.last_chosen[seat] = [sorted(of_tokens[-1]) for of_tokens in chosen]
        tail_first = self._geometry.tail_first(start)
        for group, slots in enumerate(self.slots.get(seat, [])):
            looked_up = [position for of_token in chosen[group] for position in of_token if position < tail_first]
            missed = len(slots.use(looked_up, start))
            assert not missed or tail_first > self._geometry.slots, "a row was missing, but all rows fit into slots"
            self.lookups[group] += len(looked_up)
            self.misses[group] += missed

    def _opened(self, chosen: Sequence[int], length: int) -> LruSlots:
        slots, tail_first = self._geometry.slots, self._geometry.tail_first(length)
        opened = LruSlots.empty(slots)
        loaded = (
            range(tail_first) if tail_first <= slots else [position for position in chosen if position < tail_first]
        )
        opened.use(loaded, length - 1)
        return opened

    def _demoted(self, chosen: Sequence[int], length: int, first: int) -> LruSlots:
        """Keeps rows in place as slots.

        Selected rows that are neither in slots nor in the tail replace rows in slots that are not selected.
        """
        begin, tail_first = first * self._geometry.page_rows, self._geometry.tail_first(length)
        held = list(range(begin, begin + self._geometry.slots))
        demoted = LruSlots(held, [length - 1 if position in chosen else position for position in held])
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


@dataclass(frozen=True, slots=True)
class Landing:
    """The pages that were reserved for rows [first, last) of a context and for their index keys."""

    numbers: Sequence[int]  # of the context, see `Contents`
    first: int
    last: int
    on_device: bool  # whether the rows land in device pages
    row_pages: tuple[int, ...]  # of the whole context; the rows before `first` are not written
    key_pages: tuple[int, ...]  # device pages of the whole context; none if the index keys land on the host


class PrefillWorker:
    """Writes the rows and index keys of landings into the memory of the decode worker."""

    def __init__(self, pool: DevicePool, host: HostStore, contents: Contents) -> None:
        self._pool, self._host, self._contents = pool, host, contents

    @torch.inference_mode()
    def write(self, landing: Landing, last: int, *, poison: bool = False) -> None:
        """Writes rows [landing.first, last) and their index keys, or poison in their place."""
        geometry, shape, contents = self._pool.geometry, self._pool.shape, self._contents
        positions, numbers = torch.arange(landing.first, last), landing.numbers[landing.first : last]
        pages = torch.tensor(landing.row_pages)[positions // geometry.page_rows]
        row = positions % geometry.page_rows
        rows = POISON if poison else contents.rows[:, numbers]
        if landing.on_device:
            blocks = self._pool.bytes.unflatten(2, (geometry.page_rows, shape.row.stride_bytes))
            blocks[:, pages, row] = rows
        else:
            self._host.rows.view(torch.uint8)[:, pages * geometry.page_rows + row] = rows
        if self._host.keys is not None and not landing.key_pages:
            keys = POISON if poison else contents.keys[:, numbers]
            self._host.keys.view(torch.uint8)[:, pages * geometry.page_rows + row] = keys
        for group in range(shape.groups if landing.key_pages else 0):
            assert self._pool.key_blocks is not None
            number = positions // geometry.keys_per_block * shape.groups + group
            at = number % shape.layers, torch.tensor(landing.key_pages)[number // shape.layers]
            key_blocks = self._pool.key_blocks.view(torch.uint8)
            keys = POISON if poison else contents.keys[group, numbers]
            key_blocks[(*at, positions % geometry.keys_per_block)] = keys


def as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _decoded_bytes(stored: Tensor, layout: RowLayout) -> Tensor:
    return as_bytes(layout.decode(stored.view(layout.stored_dtype)))
