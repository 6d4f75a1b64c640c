"""Key pages on the device that several requests share: which pages are whole, and how many pages sharing saves."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from hotset.base.errors import InternalError
from hotset.kernels.rows import RowLayout
from hotset.memory.device_pool import KvShape
from hotset.memory.geometry import Geometry
from hotset.memory.pages import PageAllocator
from hotset.tiers.commands import Grant
from hotset.tiers.ledger import Ledger
from hotset.tiers.prefix_cache import CacheChange, PageHasher, PagesStored, PrefixCache
from hotset.tiers.residence import Holding, PageUse, Residence


@st.composite
def workers(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Returns the number of layers and the number of index groups of each worker."""
    layers = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    return [(count, draw(st.integers(1, count))) for count in layers]


@examples(80)
@given(workers(), st.integers(1, 6), st.integers(0, 60))
def test_a_key_page_is_whole_once_all_its_keys_on_every_worker_are_known(
    stages: list[tuple[int, int]], page_rows: int, tokens: int
) -> None:
    row, key = RowLayout(16, torch.uint8), RowLayout(7, torch.uint8, align=1)
    shapes = [KvShape(layers, row, tuple(range(groups)), key) for layers, groups in stages]
    geometries = [shape.geometry(page_rows) for shape in shapes]
    most_blocks = max(geometry.max_blocks_of_group for geometry in geometries)
    geometry = replace(geometries[0], max_blocks_of_group=most_blocks)
    ends = []  # for each key page: the number of tokens after which all its keys are known
    for page in range(8):
        blocks = {number // groups for layers, groups in stages for number in range(page * layers, (page + 1) * layers)}
        ends.append((max(blocks) + 1) * geometry.keys_per_block)
    assert [geometry.key_page_end(page) for page in range(8)] == ends
    whole = geometry.whole_key_pages(tokens)
    assert whole >= 8 or (ends[whole] > tokens and (whole == 0 or ends[whole - 1] <= tokens))


PAGE_ROWS = 4
BLOCKS = {"key_groups": 2, "blocks_per_page": 3, "max_blocks_of_group": Fraction(3, 2)}
# Its first key pages end at 12, 18, 30 and 36 tokens.
GEOMETRY = Geometry(PAGE_ROWS, 2, 64, keys_per_block=6, slots=8, topk=2, **BLOCKS)


def test_the_version_of_a_ledger_without_a_host_store_grows_when_a_request_loses_its_pages() -> None:
    ledger, holding = Ledger(GEOMETRY, PageAllocator(200), None), Holding()
    assert ledger.reserve(holding, on_device=True, tokens=9)
    before = ledger.version
    ledger.release(holding)
    assert ledger.version > before, "the pages that a request without a seat needs will not be counted again"


def make_ledger() -> Ledger:
    return Ledger(GEOMETRY, PageAllocator(200), PrefixCache(100))


def published(ledger: Ledger, seat: int, tokens: list[int]) -> Holding:
    """Returns the holding of a resident request that has computed and published the full pages of `tokens`."""
    holding, hashes = Holding(), hashes_of(tokens)
    assert ledger.admit(holding, seat, Residence.RESIDENT, len(tokens)) is not None
    ledger.publish(holding, hashes, tokens[: len(hashes) * PAGE_ROWS])
    return holding


def hashes_of(tokens: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    PageHasher("model", PAGE_ROWS).extend(hashes, tokens, "")
    return hashes


def test_key_pages_of_a_cached_prefix_are_shared_until_no_request_uses_them() -> None:
    ledger, tokens = make_ledger(), [*range(41)]
    first = published(ledger, 0, tokens)
    second, third = Holding(), Holding()
    for seat, holding, to in ((1, second, Residence.TIERED), (2, third, Residence.STREAMED)):
        prefix = ledger.find_prefix(hashes_of(tokens)[:8])  # 32 tokens: three key pages are whole, the next is not
        needed = ledger.pages_needed(holding, to, len(tokens), prefix)
        alone = ledger.pages_needed(Holding(), to, len(tokens))
        assert alone.device - needed.device == 3 and alone.host - needed.host == 8
        free = ledger.device.free
        commands = ledger.admit(holding, seat, to, len(tokens), prefix)
        assert commands is not None and free - ledger.device.free == needed.device
        shared = [command for command in commands if isinstance(command, Grant) and command.shared]
        assert shared == [Grant(seat, PageUse.KEYS, 0, tuple(first.pages[PageUse.KEYS][:3]), shared=True)]
        ledger.audit([first, second, third])
    keys = first.pages[PageUse.KEYS]
    ledger.release(first)
    ledger.audit([second, third])
    assert second.pages[PageUse.KEYS][:3] == third.pages[PageUse.KEYS][:3] == keys[:3]
    ledger.park(second, 36)
    ledger.audit([second, third])
    needed, free = ledger.pages_needed(second, Residence.RESIDENT, 37), ledger.device.free
    assert ledger.resume(second, 1, Residence.RESIDENT, 36, 37) is not None
    assert free - ledger.device.free == needed.device, "shared key pages were counted as needed"
    assert second.pages[PageUse.KEYS][:3] == keys[:3]
    ledger.release(second)
    ledger.audit([third])
    ledger.release(third)
    assert ledger.device.free == ledger.device.capacity
    prefix = ledger.find_prefix(hashes_of(tokens)[:8])
    assert len(prefix) == 8 and ledger.shared_keys.find(prefix) == [], "pages without users can still be shared"


def test_a_resumed_request_shares_the_key_pages_that_it_has_loaded() -> None:
    """No other request used its key pages, so they were released when it was parked."""
    ledger, tokens = make_ledger(), [*range(41)]
    first = published(ledger, 0, tokens)
    ledger.park(first, 41)
    assert ledger.device.free == ledger.device.capacity
    assert ledger.resume(first, 0, Residence.TIERED, 41, 42) is not None
    second = Holding()
    assert ledger.admit(second, 1, Residence.TIERED, len(tokens), ledger.find_prefix(hashes_of(tokens))) is not None
    assert second.pages[PageUse.KEYS][:4] == first.pages[PageUse.KEYS][:4]
    ledger.audit([first, second])


def test_a_landing_needs_no_pages_for_keys_that_it_shares() -> None:
    ledger, tokens = make_ledger(), [*range(41)]
    first, landing = published(ledger, 0, tokens), Holding()
    own_pages = GEOMETRY.row_pages(41) + GEOMETRY.key_pages(41) - 3
    assert ledger.device.allocate(ledger.device.free - own_pages) is not None
    prefix = ledger.find_prefix(hashes_of(tokens)[:8])  # 32 tokens: three key pages are whole
    assert ledger.reserve(landing, on_device=True, tokens=41, prefix=prefix)
    assert landing.pages[PageUse.KEYS][:3] == first.pages[PageUse.KEYS][:3] and ledger.device.free == 0


def test_stored_pages_have_the_page_before_them_as_parent_even_if_another_request_stored_it() -> None:
    """The second request began before the first one published its pages, so it publishes the same pages again."""
    ledger, tokens, changes = make_ledger(), [*range(32)], list[CacheChange]()
    assert ledger.host is not None
    ledger.host.on_change = changes.append
    published(ledger, 0, tokens[:16])
    published(ledger, 1, tokens)
    hashes = tuple(hashes_of(tokens))
    assert changes == [
        PagesStored(hashes[:4], None, tuple(tokens[:16]), ""),
        PagesStored(hashes[4:], hashes[3], tuple(tokens[16:]), ""),
    ]


def test_pages_of_a_landing_cannot_be_published() -> None:
    """Another process may still write to them, and index keys may be missing in its device pages."""
    ledger, tokens = make_ledger(), [*range(40)]
    landing = Holding()
    assert ledger.reserve(landing, on_device=False, tokens=40)
    with pytest.raises(InternalError, match="may still write"):
        ledger.publish(landing, hashes_of(tokens), tokens)
