"""Index keys in the device pool: groups of any pattern fill the layers of the key pages, and share no bytes."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from hotset.kernels.rows import RowLayout, index_key_row, mla_row
from hotset.memory.device_pool import DevicePool, KvShape
from hotset.memory.geometry import Geometry
from hotset.memory.resident import ResidentView, make_batch
from hotset.memory.tables import PageTables
from hotset.models.attention.dsa_spec import MlaSpec
from hotset.models.decoder import worker_kv_shape
from hotset.models.families import read_spec
from hotset.models.spec import KvStorage

CPU = torch.device("cpu")
CONFIGS = Path(__file__).resolve().parents[2] / "hotset" / "lab" / "plan" / "configs"
POISON = 0xAB
KEYS = [
    index_key_row(6, torch.bfloat16, fp8=True),  # 6 values and a scale, 12 bytes
    index_key_row(3, torch.bfloat16),  # padded to 8 bytes
    RowLayout(7, torch.uint8, align=1),
]


@st.composite
def patterns(draw: st.DrawFn) -> tuple[int, ...]:
    """Returns the number of layers of each index group."""
    return tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=6)))


def make_shape(pattern: Sequence[int], row: RowLayout, key: RowLayout) -> KvShape:
    return KvShape(sum(pattern), row, tuple(sum(pattern[:group]) for group in range(len(pattern))), key, topk=2)


@examples(30)
@given(patterns(), st.integers(1, 9), st.sampled_from(KEYS), st.integers(0, 1 << 32), st.data())
def test_keys_of_all_groups_and_positions_are_read_back_and_lie_in_turn_in_the_layers_of_their_pages(
    pattern: tuple[int, ...], page_rows: int, key: RowLayout, seed: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = make_shape(pattern, RowLayout(13, torch.uint8), key)
    geometry = shape.geometry(page_rows)
    lengths = [data.draw(st.integers(1, 60)), data.draw(st.integers(1, 60))]
    counts = [geometry.key_pages(length) for length in lengths]
    order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    granted = [order[: counts[0]], order[counts[0] : sum(counts)]]
    pool = DevicePool(shape, geometry, len(order), CPU)
    pool.bytes.fill_(POISON)
    tables = PageTables(2, 60, geometry, CPU)
    for seat, pages in enumerate(granted):
        tables.extend_keys(seat, 0, pages)
        tables.extend_rows(seat, 0, [0] * geometry.row_pages(lengths[seat]))
    view = ResidentView(pool, tables, make_batch([0, 1], [0, 0], lengths, CPU))
    written = []  # of each group
    for group in range(shape.groups):
        values = torch.randint(256, (sum(lengths), key.width), generator=generator).to(key.dtype)
        view.keys(group).store(view.segments.positions, values)
        written.append(key.encode(values).split(lengths))
    for group in range(shape.groups):
        for seat, length in enumerate(lengths):
            stored = written[group][seat]
            assert torch.equal(view.keys(group).gather(seat, length), key.decode(stored))
            for position in range(length):
                block, number = divmod(position, geometry.keys_per_block)
                page, layer = divmod(block * shape.groups + group, shape.layers)
                found = pool.bytes[layer, granted[seat][page]][number * key.stride_bytes :][: key.stride_bytes]
                assert torch.equal(found, stored[position].contiguous().view(torch.uint8))
    assert bool((pool.bytes[:, order[sum(counts) :]] == POISON).all()), "a key was written to a page of nobody"


@examples(40)
@given(patterns(), st.integers(1, 9), st.sampled_from(KEYS), st.integers(1, 2000))
def test_key_pages_are_as_few_as_possible(
    pattern: tuple[int, ...], page_rows: int, key: RowLayout, tokens: int
) -> None:
    geometry = make_shape(pattern, RowLayout(13, torch.uint8), key).geometry(page_rows)
    pages = geometry.key_pages(tokens)
    blocks = -(-tokens // geometry.keys_per_block) * len(pattern)
    assert pages * sum(pattern) - blocks in range(sum(pattern)), "a page is missing, or the last one is empty"
    assert geometry.key_capacity(pages) >= tokens > geometry.key_capacity(pages - 1)


def published(name: str, fp8: bool) -> KvShape:
    fields = json.loads((CONFIGS / f"{name}.json").read_text())
    spec = read_spec(fields, {}, "config.json")
    assert isinstance(spec.attention, MlaSpec)
    return worker_kv_shape(spec, torch.bfloat16, KvStorage(fp8, fp8))


ROWS = {True: mla_row(512, 64, torch.bfloat16, fp8=True), False: mla_row(512, 64, torch.bfloat16)}
KEY_ROWS = {True: index_key_row(128, torch.bfloat16, fp8=True), False: index_key_row(128, torch.bfloat16)}
MODELS = {
    "DeepSeek-V3.2": (1,) * 61,
    "GLM-5.2": (1, 1, *(4,) * 19),
    "groups of 4": (4,) * 15,
    "a stage of GLM-5.2 that begins within the first layers": (1, *(4,) * 4),
    "one layer": (1,),
    "two layers, one group": (2,),
}


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("pattern", MODELS.values(), ids=MODELS)
def test_index_keys_take_at_most_5_percent_more_than_their_bytes(pattern: tuple[int, ...], fp8: bool) -> None:
    shape, tokens = make_shape(pattern, ROWS[fp8], KEY_ROWS[fp8]), 128 << 10
    geometry = shape.geometry(page_rows=64)
    device_bytes = geometry.key_pages(tokens) * geometry.page_bytes
    assert device_bytes <= 1.05 * tokens * shape.groups * KEY_ROWS[fp8].stride_bytes


@pytest.mark.parametrize(
    ("name", "groups", "layers", "bytes_per_token"), [("glm-5.2", 21, 78, 2798), ("deepseek-v3.2", 61, 61, 8070)]
)
def test_sizes_of_fp8_index_keys_of_published_models(name: str, groups: int, layers: int, bytes_per_token: int) -> None:
    """132 bytes for each group would be 2,772 and 8,052."""
    shape, tokens = published(name, fp8=True), 128 << 10
    geometry = shape.geometry(page_rows=64)
    assert (shape.groups, shape.layers, geometry.keys_per_block) == (groups, layers, 318)
    assert round(geometry.key_pages(tokens) * geometry.page_bytes / tokens) == bytes_per_token


@examples(40)
@given(patterns(), st.integers(1, 9), st.sampled_from(KEYS), st.integers(1, 150))
def test_no_set_of_resident_contexts_has_more_row_pages_than_the_bound(
    pattern: tuple[int, ...], page_rows: int, key: RowLayout, pages: int
) -> None:
    geometry = make_shape(pattern, RowLayout(13, torch.uint8), key).geometry(page_rows)
    most = most_row_pages(geometry, pages)
    assert most <= geometry.max_row_pages(pages)
    # The bound is exact up to the pages of one context that fills a cycle of key pages.
    period = geometry.key_groups + geometry.row_pages(geometry.key_capacity(geometry.key_groups))
    assert geometry.max_row_pages(pages) < most + period


def most_row_pages(geometry: Geometry, pages: int) -> int:
    """Tries all combinations of contexts, by dynamic programming over the number of pages."""
    contexts = {}  # number of pages of a context: the most row pages among them
    for key_pages in range(1, pages):
        for row_pages in range(1, geometry.row_pages(geometry.key_capacity(key_pages)) + 1):
            if key_pages + row_pages <= pages:
                size = key_pages + row_pages
                contexts[size] = max(contexts.get(size, 0), row_pages)
    most = [0] * (pages + 1)
    for count in range(1, pages + 1):
        most[count] = max(
            [most[count - 1], *(most[count - size] + rows for size, rows in contexts.items() if size <= count)]
        )
    return most[pages]
