"""Index keys between device and host: keys of groups of any pattern survive, and few copies move them."""

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
from hotset.tiers.mirror import Mirror

CPU = torch.device("cpu")
POISON = 0xAB


class CopiedKeys:
    """One context of `length` random index keys in each group, on the device and nowhere else."""

    def __init__(self, pattern: list[int], page_rows: int, length: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        key = RowLayout(7, torch.uint8, align=1)
        key_layers = tuple(sum(pattern[:group]) for group in range(len(pattern)))
        self.shape = KvShape(sum(pattern), RowLayout(16, torch.uint8), key_layers, key, topk=2)
        self.geometry, self.length = self.shape.geometry(page_rows), length
        self.pool = DevicePool(self.shape, self.geometry, self.geometry.key_pages(length) + 3, CPU)
        self.host = HostStore(self.shape, self.geometry.row_pages(length) + 3, page_rows, CPU)
        self.tables = PageTables(1, length, self.geometry, CPU)
        self.mirror = Mirror(self.pool, self.host, self.tables)
        assert self.host.keys is not None
        self.host.keys.fill_(POISON)
        self.tables.extend_host(0, 0, self.random_pages(self.geometry.row_pages(length)))
        self.tables.work_pages[0] = [0]  # as in a streamed prefill: only keys are copied when the seat is flushed
        self.grant_other_pages()
        self.written = torch.randint(256, (self.shape.groups, length, key.width), generator=self.generator).byte()
        for position in range(length):
            for group in range(self.shape.groups):
                self.at(group, position).copy_(self.written[group, position])

    def random_pages(self, count: int) -> list[int]:
        return torch.randperm(count + 3, generator=self.generator)[:count].tolist()

    def grant_other_pages(self) -> None:
        """Replaces the context's key pages by others and poisons the device."""
        self.tables.key_pages[0], self.tables.key_runs[0] = [], []
        self.tables.extend_keys(0, 0, self.random_pages(self.geometry.key_pages(self.length)))
        self.pool.bytes.fill_(POISON)

    def at(self, group: int, position: int) -> torch.Tensor:
        """Returns the bytes of one key on the device."""
        block, number = divmod(position, self.geometry.keys_per_block)
        page, layer = divmod(block * self.shape.groups + group, self.shape.layers)
        return self.pool.bytes[layer, self.tables.key_pages[0][page]][7 * number : 7 * number + 7]

    def store(self) -> None:
        self.mirror.mirror_landed(0, self.length, rows=False)
        self.mirror.flush(0, self.length)


@examples(25)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 7), st.integers(1, 60), st.integers(0, 1 << 32)
)
def test_index_keys_of_any_groups_survive_parking(pattern: list[int], page_rows: int, length: int, seed: int) -> None:
    context = CopiedKeys(pattern, page_rows, length, seed)
    context.store()
    assert context.host.keys is not None
    positions = context.tables.host_at(0, torch.arange(length))
    assert torch.equal(context.host.keys[:, positions], context.written)
    context.grant_other_pages()
    context.mirror.load_keys(0, length)
    for group in range(context.shape.groups):
        found = torch.stack([context.at(group, position) for position in range(length)])
        assert torch.equal(found, context.written[group]), f"keys of group {group} differ"


@examples(25)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 7), st.integers(1, 60), st.integers(0, 1 << 32),
    st.data(),
)  # fmt: skip
def test_loading_writes_no_key_into_a_shared_page_and_all_keys_into_the_others(
    pattern: list[int], page_rows: int, length: int, seed: int, data: st.DataObject
) -> None:
    context = CopiedKeys(pattern, page_rows, length, seed)
    context.store()
    context.grant_other_pages()
    shared = data.draw(st.integers(0, context.geometry.whole_key_pages(length)))
    context.tables.shared_keys[0] = shared
    context.mirror.load_keys(0, length)
    pages, per_block = context.tables.key_pages[0], context.geometry.keys_per_block
    assert bool((context.pool.bytes[:, pages[:shared]] == POISON).all()), "a shared page was written"
    for group in range(context.shape.groups):
        for position in range(length):
            number = (position // per_block * context.shape.groups + group) // context.shape.layers
            if number >= shared:
                assert torch.equal(context.at(group, position), context.written[group, position])


def test_one_copy_moves_the_keys_of_all_groups_that_begin_in_the_same_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 21 groups begin in 26 of the 78 layers. From 6 of these, they reach the next page: 6 more copies."""
    context = CopiedKeys([1, 1, *[4] * 19], page_rows=7, length=416, seed=1)
    assert context.geometry.keys_per_block == 16
    copies: list[torch.Tensor] = []
    copy = page_copy.to_device
    monkeypatch.setattr(page_copy, "to_device", lambda runs, *tensors: (copies.append(runs), copy(runs, *tensors)))
    context.store()
    context.mirror.load_keys(0, context.length)
    assert len(copies) == 26 + 6


@examples(20)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 7), st.integers(1, 60), st.integers(0, 1 << 32)
)
def test_all_key_pages_that_a_copy_reads_are_listed(pattern: list[int], page_rows: int, length: int, seed: int) -> None:
    """A page must not be granted to another request before the mirror has read it."""
    context = CopiedKeys(pattern, page_rows, length, seed)
    context.mirror.mirror_landed(0, length, rows=False)
    whole = length - length % page_rows
    last = -(-(-(-whole // context.geometry.keys_per_block) * context.shape.groups) // context.shape.layers)
    assert context.mirror.reading == set(context.tables.key_pages[0][:last])
