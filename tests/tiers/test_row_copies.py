"""Rows between host and device: both kinds of copies put every run in its place and write nothing else."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from hotset.kernels import page_copy
from hotset.kernels.rows import RowLayout
from hotset.memory.device_pool import DevicePool, KvShape
from hotset.memory.host_store import HostStore
from hotset.memory.tables import PageTables
from hotset.tiers import mirror
from hotset.tiers.mirror import Mirror

CPU = torch.device("cpu")
LAYERS, ROW_BYTES, POISON = 3, 16, 0xAB


class RowsOnHost:
    """One context of random rows in the host store, and pages on the device for it."""

    def __init__(self, page_rows: int, host_pages: list[int], device_pages: list[int]) -> None:
        shape = KvShape(LAYERS, RowLayout(ROW_BYTES, torch.uint8))
        geometry = shape.geometry(page_rows)
        self.length = page_rows * len(host_pages)
        self.pool = DevicePool(shape, geometry, max(device_pages) + 2, CPU)
        self.host = HostStore(shape, max(host_pages) + 2, page_rows, CPU)
        self.tables = PageTables(1, self.length, geometry, CPU)
        self.mirror = Mirror(self.pool, self.host, self.tables)
        self.host.rows.copy_(torch.randint(256, self.host.rows.shape, dtype=torch.uint8))
        self.pool.bytes.fill_(POISON)
        self.tables.extend_host(0, 0, host_pages)
        self.pages = device_pages

    def expected(self, first: int, last: int) -> torch.Tensor:
        """Returns the rows of the pool after rows [first, last) were loaded."""
        rows, page_rows = torch.full_like(self.pool.rows, POISON), self.pool.geometry.page_rows
        for position in range(first, last):
            page, number = divmod(position, page_rows)
            host_row = self.tables.host_pages[0][page] * page_rows + number
            rows[:, self.pages[page] * page_rows + number] = self.host.rows[:, host_row]
        return rows


@examples(30)
@given(
    data=st.data(), page_rows=st.integers(1, 5), pages=st.integers(1, 9), long_run_bytes=st.sampled_from((1, 1 << 30))
)
def test_loaded_rows_equal_the_rows_on_the_host(
    data: st.DataObject, page_rows: int, pages: int, long_run_bytes: int
) -> None:
    orders = [data.draw(st.permutations(range(pages + 2)))[:pages] for _ in range(2)]
    context = RowsOnHost(page_rows, *orders)
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, context.length)] * 2)))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mirror, "LONG_RUN_BYTES", long_run_bytes)
        context.mirror.load_rows(0, first, last, context.pages)
    assert torch.equal(context.pool.rows, context.expected(first, last))


def test_long_runs_are_copied_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_calls: list[torch.Tensor] = []
    monkeypatch.setattr(mirror, "LONG_RUN_BYTES", 1 << 14)
    monkeypatch.setattr(page_copy, "to_device", lambda runs, *_: kernel_calls.append(runs))
    page_rows = 256
    adjacent = list(range(mirror.LONG_RUN_BYTES // ROW_BYTES // page_rows))
    context = RowsOnHost(page_rows, adjacent, adjacent)
    context.mirror.load_rows(0, 0, context.length, adjacent)
    assert kernel_calls == []
    assert torch.equal(context.pool.rows, context.expected(0, context.length))
    context.mirror.load_rows(0, 0, context.length - 1, adjacent)
    assert [runs.tolist() for runs in kernel_calls] == [[[0, 0, context.length - 1]]]
