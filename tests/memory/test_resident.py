"""The resident view over memory full of NaN is compared with lists of the rows that were written."""

import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from hotset.kernels import EMPTY
from hotset.kernels.rows import RowLayout, index_key_row
from hotset.memory.device_pool import DevicePool, KvShape
from hotset.memory.pages import PageAllocator
from hotset.memory.resident import ResidentView, make_batch
from hotset.memory.tables import PageTables

CPU = torch.device("cpu")
LAYERS, WIDTH, KEY_WIDTH = 2, 3, 2


class PoolWithSeats:
    """A pool that contains only NaN at first, and the rows and index keys that were written for each seat."""

    def __init__(self, page_rows: int, seats: int) -> None:
        context, pages = 40, seats * 40
        shape = KvShape(LAYERS, RowLayout(WIDTH, torch.float32), (0,), index_key_row(KEY_WIDTH, torch.float32))
        geometry = shape.geometry(page_rows)
        self.pool = DevicePool(shape, geometry, 2 * pages, CPU)
        self.pool.rows.fill_(float("nan"))
        self.pages = PageAllocator(2 * pages)
        self.tables = PageTables(seats, context, geometry, CPU)
        self.held: list[list[int]] = [[] for _ in range(seats)]
        self.held_keys: list[list[int]] = [[] for _ in range(seats)]
        self.rows: list[list[torch.Tensor]] = [[] for _ in range(seats)]  # per seat and position: [layers, width]
        self.keys: list[list[torch.Tensor]] = [[] for _ in range(seats)]
        self.page_rows = page_rows

    def step(self, seats: list[int], counts: list[int]) -> ResidentView:
        """Writes `counts[i]` random rows and index keys for `seats[i]`, and returns the view of this step."""
        starts = [len(self.rows[seat]) for seat in seats]
        for seat, start, count in zip(seats, starts, counts, strict=True):
            geometry, end = self.pool.geometry, start + count
            for held, needed, extend in (
                (self.held[seat], geometry.row_pages(end), self.tables.extend_rows),
                (self.held_keys[seat], geometry.key_pages(end), self.tables.extend_keys),
            ):
                got = self.pages.allocate(max(0, needed - len(held)))
                assert got is not None
                extend(seat, len(held), got)
                held += got
        view = ResidentView(self.pool, self.tables, make_batch(seats, starts, counts, self.pool.device))
        new_rows, new_keys = torch.randn(LAYERS, sum(counts), WIDTH), torch.randn(sum(counts), KEY_WIDTH)
        for layer in range(LAYERS):
            view.new_rows(layer).store(new_rows[layer])
        view.keys(0).store(view.segments.positions, new_keys)
        first = 0
        for seat, count in zip(seats, counts, strict=True):
            self.rows[seat] += new_rows[:, first : first + count].unbind(1)
            self.keys[seat] += new_keys[first : first + count].unbind(0)
            first += count
        return view


@examples(40)
@given(page_rows=st.integers(1, 7), seed=st.integers(0, 2**31), data=st.data())
def test_a_view_reads_the_newest_rows_after_rejections(page_rows: int, seed: int, data: st.DataObject) -> None:
    """After each step, some or all of its rows may be dropped. The next step of the same seat overwrites them."""
    torch.manual_seed(seed)
    pool = PoolWithSeats(page_rows, seats=3)
    for _ in range(data.draw(st.integers(1, 6))):
        seats = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
        counts = [data.draw(st.integers(1, 5)) for _ in seats]
        view = pool.step(seats, counts)
        for index, seat in enumerate(seats):
            length = len(pool.rows[seat])
            for layer in range(LAYERS):
                assert torch.equal(view.context(layer).gather(index, length), torch.stack(pool.rows[seat])[:, layer])
            assert torch.equal(view.keys(0).gather(index, length), torch.stack(pool.keys[seat]))
        check_select(pool, view, seats, counts)
        kept = [data.draw(st.integers(0, count)) for count in counts]
        for seat, count, keep in zip(seats, counts, kept, strict=True):
            del pool.rows[seat][len(pool.rows[seat]) - count + keep :]
            del pool.keys[seat][len(pool.keys[seat]) - count + keep :]


def test_a_cleared_seat_has_no_pages_of_its_previous_request() -> None:
    tables = PoolWithSeats(page_rows=4, seats=2).tables
    tables.extend_rows(1, 0, [3, 4])
    tables.extend_keys(1, 0, [5])
    tables.extend_host(1, 0, [6, 7])
    tables.set_tail(1, [8, 9])
    tables.set_tiered(1, True)
    tables.work_pages[1] += [10]
    tables.clear(1)
    unused = PoolWithSeats(page_rows=4, seats=2).tables
    for name, value in vars(unused).items():
        cleared = getattr(tables, name)
        assert torch.equal(cleared, value) if isinstance(value, torch.Tensor) else cleared == value, name


def check_select(pool: PoolWithSeats, view: ResidentView, seats: list[int], counts: list[int]) -> None:
    """Checks that `select` returns the rows at random positions, and EMPTY for EMPTY."""
    positions_of_tokens = []
    for seat, count in zip(seats, counts, strict=True):
        positions_of_tokens += [torch.randint(-1, len(pool.rows[seat]), (4,)) for _ in range(count)]
    positions = torch.stack(positions_of_tokens)
    for layer in range(LAYERS):
        selected = view.select(layer, positions)
        assert torch.equal(selected.row_ids == EMPTY, positions == EMPTY)
        seat_of = [seat for seat, count in zip(seats, counts, strict=True) for _ in range(count)]
        for token, seat in enumerate(seat_of):
            for row_id, position in zip(selected.row_ids[token].tolist(), positions[token].tolist(), strict=True):
                if position != EMPTY:
                    assert torch.equal(selected.layout.decode(selected.rows[row_id]), pool.rows[seat][position][layer])
