"""A handoff writes index keys to the stores that an engine describes to its peers, where the view reads them."""

import ctypes

import numpy as np
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from hotset.base.paged_span import PagedSpan
from hotset.fleet.handoff.layout import plan_writes
from hotset.fleet.handoff.stores import landing_stores, pool_shards
from hotset.kernels.rows import RowLayout
from hotset.memory.device_pool import DevicePool, KvShape
from hotset.memory.resident import ResidentView, make_batch
from hotset.memory.tables import PageTables

CPU = torch.device("cpu")


@examples(30)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.integers(1, 6),
    st.integers(1, 70),
    st.integers(1, 40),
    st.integers(0, 99),
)
def test_index_keys_that_land_on_the_device_are_the_keys_that_its_view_reads(
    pattern: list[int], page_rows: int, length: int, chunk: int, seed: int
) -> None:
    """The prefill worker's host pages have 16 rows. Keys arrive in chunks, in pages in random order."""
    random = np.random.default_rng(seed)
    key = RowLayout(7, torch.uint8, align=1)
    key_layers = tuple(sum(pattern[:group]) for group in range(len(pattern)))
    shape = KvShape(sum(pattern), RowLayout(16, torch.uint8), key_layers, key, topk=2)
    geometry = shape.geometry(page_rows)
    pages = random.permutation(geometry.key_pages(length) + 1).tolist()
    pool = DevicePool(shape, geometry, len(pages), CPU)
    pool.bytes.fill_(0xAB)
    target = landing_stores([], pool_shards(pool, []))["device"].keys
    assert target is not None
    host = random.integers(0, 256, (shape.groups, 5, 16, key.stride_bytes), np.uint8)
    source = PagedSpan(tuple((group.ctypes.data,) for group in host), 16 * key.stride_bytes, 16, key.stride_bytes)
    host_pages = random.permutation(5).tolist()
    for first in range(0, length, chunk):
        planned = plan_writes(source, host_pages, target, pages[:-1], first, min(length, first + chunk))
        for local, remote, nbytes in planned.tolist():
            ctypes.memmove(remote, local, nbytes)
    tables = PageTables(1, length, geometry, CPU)
    tables.extend_keys(0, 0, pages[:-1])
    tables.extend_rows(0, 0, [0] * geometry.row_pages(length))
    view = ResidentView(pool, tables, make_batch([0], [0], [length], CPU))
    for group in range(shape.groups):
        sent = host[group, host_pages].reshape(-1, key.stride_bytes)[:length]
        assert np.array_equal(view.keys(group).gather(0, length).numpy(), sent), f"keys of group {group} differ"
    assert bool((pool.bytes[:, pages[-1]] == 0xAB).all()), "a page that was not granted was written to"
