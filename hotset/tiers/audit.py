"""Checks that the pages of both pools and their owners agree. Tests call them, and so does an idle engine."""

from collections import Counter
from collections.abc import Sequence

from hotset.memory.pages import PageAllocator
from hotset.tiers.prefix_cache import PrefixCache
from hotset.tiers.residence import PAGE_USES, Holding, PageUse
from hotset.tiers.shared_keys import SharedKeys

PRIVATE = frozenset(PageUse) - {PageUse.HOST, PageUse.KEYS}  # uses whose pages are never shared


def audit_device(
    device: PageAllocator, holdings: Sequence[Holding], shared_keys: SharedKeys, quarantined: Sequence[int]
) -> None:
    """Proves that every device page is free, in `quarantined`, or held by one request. Only pages of index keys that
    nobody writes are held by several."""
    device.audit()
    shared_keys.audit(holdings)
    held = [page for holding in holdings for use in PRIVATE for page in holding.pages[use]]
    held += {page for holding in holdings for page in holding.pages[PageUse.KEYS]}
    held += quarantined
    assert len(held) == len(set(held)), "a device page has two owners"
    assert len(held) == device.held, f"{len(held)} device pages have owners, {device.held} are held"
    for holding in holdings:
        for use, pages in holding.pages.items():
            allowed = not pages or use in PAGE_USES[holding.residence]
            assert allowed, f"a {holding.residence.value} request holds pages for {use.value}"


def audit_host(host: PrefixCache, holdings: Sequence[Holding], quarantined: Sequence[int]) -> None:
    """Proves that every host page is free, in `quarantined`, cached, or held by one request, and that the users of
    cached pages are counted."""
    host.audit()
    users = Counter(cached.page for holding in holdings for cached in holding.cached)
    assert users == Counter(host.users()), "the users of a cached page are not counted correctly"
    held = [page for holding in holdings for page in holding.own_host_pages]
    held += quarantined
    held += users
    assert len(held) == len(set(held)), "a host page has two owners"
    assert len(held) == host.held, f"{len(held)} host pages have owners, {host.held} are held"
