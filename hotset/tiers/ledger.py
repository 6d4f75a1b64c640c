"""The ledger records which request holds which pages of which pool, and in which residence it is. It has no tensors.

Every change is all or nothing. A change that workers carry out returns commands. If it needs more pages than are free,
it returns None and changes nothing. Freed pages can be granted again at once, because workers execute commands in
order.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from hotset.base.errors import InternalError
from hotset.memory.geometry import Geometry
from hotset.memory.pages import PageAllocator
from hotset.tiers.audit import audit_device, audit_host
from hotset.tiers.commands import Command, Demote, Flush, Grant, Load, MirrorLanded, Promote
from hotset.tiers.prefix_cache import CachedPage, PrefixCache
from hotset.tiers.residence import Holding, PageUse, Residence, device_capacity, required_pages
from hotset.tiers.shared_keys import SharedKeys

NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Numbers of pages in each pool."""

    device: int
    host: int


NO_PAGES = PageCounts(0, 0)


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Pages that the writer of a failed landing may still write to. No request holds them."""

    device: list[int]
    host: list[int]


@dataclass(frozen=True, slots=True)
class LandingPolicy:
    """Where KV from a prefill worker arrives."""

    on_device: bool = True  # peers can write to device pages
    keys_on_host: bool = False  # index keys of rows that land on the host land there, too, not on the device
    prefer_host: bool = False  # rows land on the device only if the client requires it, or if there is no host store

    def __post_init__(self) -> None:
        if not (self.on_device or self.keys_on_host):
            raise InternalError("index keys cannot land on a device that peers cannot write to")


LAND_ANYWHERE = LandingPolicy()


class Ledger:
    """Owns the page allocators of both pools. Without a host store, no request is streamed, tiered or parked, and no
    prefix is reused."""

    def __init__(
        self,
        geometry: Geometry,
        device: PageAllocator,
        host: PrefixCache | None,
        landing: LandingPolicy = LAND_ANYWHERE,
    ) -> None:
        self.geometry = geometry
        self.landing = landing  # of prefill workers that are not in `landing_of_peer`
        # By control address: chosen when the peer is connected, for later reservations
        self.landing_of_peer: dict[str, LandingPolicy] = {}
        self.device = device
        self.host = host
        self.shared_keys = SharedKeys(geometry)
        self._quarantined: dict[Hashable, Quarantined] = {}  # by landing

    @property
    def tiers(self) -> bool:
        """True if requests can be tiered: there is a host store, and hot buffers have slots."""
        return self.host is not None and self.geometry.slots > 0

    def pages_needed(
        self, holding: Holding, to: Residence, tokens: int, prefix: Sequence[CachedPage] = ()
    ) -> PageCounts:
        """Returns the pages that a context of `tokens` rows needs in residence `to` beyond those that it holds.

        The context uses the cached pages `prefix`. Cached pages without users count as free, so they are among the
        needed ones. Index keys that other requests with the same cached pages have on the device need no page.
        """
        return self._missing(holding, self._required(to, tokens), prefix)

    def fits(self, need: PageCounts, spare: PageCounts = NO_PAGES) -> bool:
        """Returns True if `need` pages and another `spare` pages are free."""
        if need.device + spare.device > self.device.free:
            return False
        return self.host is None or need.host + spare.host <= self.host.free

    def admit(
        self, holding: Holding, seat: int, to: Residence, tokens: int, prefix: Sequence[CachedPage] = ()
    ) -> list[Command] | None:
        """Gives an absent request a seat, the cached pages of its `prefix`, and pages for the rest of `tokens` rows."""
        if not self.fits(self.pages_needed(holding, to, tokens, prefix)):
            return None
        if prefix:
            holding.move(Residence.PARKED)
            self._use_cached(holding, prefix)
            return self.resume(holding, seat, to, len(prefix) * self.geometry.page_rows, tokens)
        return self._start(holding, seat, to, tokens)

    @property
    def version(self) -> int:
        """Grows whenever `find_prefix` may find other pages, or a request without a seat may need more or fewer."""
        return self.shared_keys.version + (0 if self.host is None else self.host.version)

    def find_prefix(self, hashes: Sequence[bytes]) -> list[CachedPage]:
        """Returns the cached pages of the longest known prefix of a context with these page hashes."""
        return [] if self.host is None else self.host.find(hashes)

    @property
    def announces_tokens(self) -> bool:
        """True if subscribers receive the tokens of pages that enter the prefix cache."""
        return self.host is not None and self.host.on_change is not None

    def publish(self, holding: Holding, hashes: Sequence[bytes], token_ids: Sequence[int], salt: str = "") -> None:
        """Adds the full pages of a request that follow `holding.cached` to the prefix cache. `hashes` and `token_ids`
        are those of these pages. Their rows are on the host, or will be before any later command is executed.
        Without subscribers, `token_ids` can be empty."""
        if holding.residence is Residence.LANDING:
            raise InternalError("another process may still write to its pages")
        if self.host is not None:
            first = len(holding.cached)
            pages = holding.pages[PageUse.HOST][first : first + len(hashes)]
            self.host.publish(holding.cached, pages, hashes, token_ids, salt)
            self.shared_keys.register(holding.cached, holding.pages[PageUse.KEYS], first)

    def grow(self, holding: Holding, tokens: int) -> list[Command] | None:
        """Grants pages for rows [0, tokens) in the request's present residence."""
        required = self._required(holding.residence, tokens)
        if not self.fits(self._missing(holding, required)):
            return None
        return self._grant(holding, required)

    def end_streaming(self, holding: Holding, length: int) -> list[Command]:
        """Makes a streamed request tiered when its prefill is complete.

        Its workspace is released, and slots, tail and maps are granted. They never take more pages than the workspace.
        """
        holding.move(Residence.TIERED)
        self.device.release(self._take(holding, PageUse.WORK))
        commands = self._grant(holding, self._required(Residence.TIERED, length))
        return [*commands, Load(holding.seat, length, Residence.TIERED, keys=False)]

    def pages_freed_by_demotion(self, holding: Holding, length: int) -> int:
        """Returns how many device pages demotion would free. At 0 or less, demotion is impossible or useless."""
        if not self.tiers or holding.residence is not Residence.RESIDENT:
            return 0
        geometry = self.geometry
        surplus = length // geometry.page_rows - 1 - geometry.slot_pages  # pages before those kept as slots
        granted = len(holding.pages[PageUse.ROWS]) - length // geometry.page_rows  # pages of the next rows
        return surplus - geometry.map_pages(length) - (geometry.tail_pages - 1 - granted)

    def demote(self, holding: Holding, length: int) -> list[Command]:
        """Makes a resident request tiered on some of its pages and releases the others, at least one.

        The tail's pages stay in place, and the pages just before them stay in place as slots. The maps are put into
        older pages, after the rows that were selected last have been copied from there into slots. If too few
        pages are granted for the next rows yet, older pages also become the last pages of the tail.
        """
        if self.pages_freed_by_demotion(holding, length) <= 0:
            raise InternalError("a demotion must free at least one page")
        geometry, rows = self.geometry, holding.pages[PageUse.ROWS]
        newest = length // geometry.page_rows
        first = newest - 1 - geometry.slot_pages
        tail = rows[newest - 1 : newest - 1 + geometry.tail_pages]
        surplus = rows[newest - 1 + len(tail) :] + rows[:first]
        maps = [surplus.pop() for _ in range(geometry.map_pages(length))]
        tail += [surplus.pop() for _ in range(geometry.tail_pages - len(tail))]
        holding.move(Residence.TIERED)
        holding.pages[PageUse.ROWS] = []
        holding.pages[PageUse.SLOTS] = rows[first : newest - 1]
        holding.pages[PageUse.MAPS] = maps
        holding.pages[PageUse.TAIL] = _rotated(tail, newest - 1)
        self.device.release(surplus)
        self._update_capacity(holding)
        return [
            Demote(
                holding.seat,
                length,
                first,
                slots=tuple(holding.pages[PageUse.SLOTS]),
                tail=tuple(holding.pages[PageUse.TAIL]),
                maps=tuple(holding.pages[PageUse.MAPS]),
            )
        ]

    def pages_to_promote(self, length: int) -> PageCounts:
        """Returns the free pages that a promotion requires; the pages of slots and maps are freed only after it."""
        return PageCounts(max(0, length // self.geometry.page_rows - 1), 0)

    def promote(self, holding: Holding, length: int) -> list[Command] | None:
        """Makes a tiered request resident and releases its slots and maps."""
        newest = length // self.geometry.page_rows
        pages = self.device.allocate(self.pages_to_promote(length).device)
        if pages is None:
            return None
        holding.move(Residence.RESIDENT)
        tail = holding.pages[PageUse.TAIL]
        in_order = [tail[number % len(tail)] for number in range(max(0, newest - 1), newest + 1)]
        unused = [page for page in tail if page not in in_order]
        holding.pages[PageUse.ROWS], holding.pages[PageUse.TAIL] = pages + in_order, []
        self.device.release(unused + self._take(holding, PageUse.SLOTS) + self._take(holding, PageUse.MAPS))
        self._update_capacity(holding)
        return [Promote(holding.seat, length, tuple(holding.pages[PageUse.ROWS]))]

    def park(self, holding: Holding, length: int) -> list[Command]:
        """Releases all device pages, and host pages beyond `length` rows.

        Rows [0, length) have host pages. The command flushes the last page before a later command can grant its device
        page to another request.
        """
        if self.host is None:
            raise InternalError("there is no host store to park in")
        holding.move(Residence.PARKED)
        self.device.release(self._take_device_pages(holding))
        spare = holding.pages[PageUse.HOST][self.geometry.row_pages(length) :]  # granted for the rest of the prompt
        if spare:
            self.host.release(spare)
            del holding.pages[PageUse.HOST][-len(spare) :]
        self._update_capacity(holding)
        return [Flush(holding.seat, length)]

    def resume(self, holding: Holding, seat: int, to: Residence, length: int, tokens: int) -> list[Command] | None:
        """Gives a parked context of `length` rows a seat again, and pages for `tokens` rows."""
        if not self.fits(self.pages_needed(holding, to, tokens)):
            return None
        self._use_shared_keys(holding)
        return [*self._start(holding, seat, to, tokens), Load(seat, length, to, keys=True)]

    def landing_policy(self, peer: str | None) -> LandingPolicy:
        """Returns where KV from this prefill worker arrives."""
        return self.landing_of_peer.get(peer or "", self.landing)

    def reserve(
        self,
        holding: Holding,
        on_device: bool,
        tokens: int,
        prefix: Sequence[CachedPage] = (),
        policy: LandingPolicy | None = None,
    ) -> bool:
        """Gives an absent request pages for `tokens` rows, on the host or the device, and the cached pages of `prefix`.
        `policy` is the policy for the prefill worker. Default: `landing`.

        Another process will write the rows after the prefix, and never writes to the cached pages. The request needs
        no seat for this. Returns False if too few pages are free.
        """
        keys_on_host = not on_device and (policy or self.landing).keys_on_host
        required = self._required_to_land(on_device, keys_on_host, tokens)
        shared = self.shared_keys.find(prefix) if required[PageUse.KEYS] else []
        on_host = required[PageUse.HOST]
        used = sum(cached.users > 0 for cached in prefix)  # cached pages that do not count as free
        if not self.fits(PageCounts(sum(required.values()) - on_host - len(shared), on_host - used)):
            return False
        holding.move(Residence.LANDING)
        holding.keys_land_on_host = keys_on_host
        self._use_cached(holding, prefix)
        self.shared_keys.use(shared)
        holding.pages[PageUse.KEYS] = [*shared]
        self._grant(holding, required)
        return True

    def land(self, holding: Holding, seat: int, to: Residence, length: int, tokens: int) -> list[Command] | None:
        """Gives a seat, and pages for `tokens` rows, to a context of `length` rows that has landed completely.

        Rows [0, first) did not land: they and their index keys are in the cached pages that `reserve` took.
        """
        if not self.fits(self.pages_needed(holding, to, tokens)):
            return None
        first = len(holding.cached) * self.geometry.page_rows
        in_place = bool(holding.pages[PageUse.ROWS])
        keys_on_host = holding.keys_land_on_host
        if keys_on_host:
            self._use_shared_keys(holding)
        commands = self._start(holding, seat, to, tokens)
        if first and not keys_on_host:
            # The prefix did not land. Its index keys are loaded, and its rows too if the others landed on the device.
            commands.append(Load(seat, first, Residence.RESIDENT if in_place else Residence.STREAMED, keys=True))
        if self.host is not None and not keys_on_host:
            commands.append(MirrorLanded(seat, length, rows=in_place, first=first))
        if not in_place:
            commands.append(Load(seat, length, to, keys=keys_on_host))
        return commands

    def quarantine(self, holding: Holding, landing: Hashable) -> None:
        """Ends a landing whose writer may still write. The pages stay unavailable, recorded under `landing`."""
        if holding.residence is not Residence.LANDING:
            raise InternalError(f"a request that is {holding.residence.value} has no writer")
        holding.move(Residence.ABSENT)
        host = self._take_own_host_pages(holding)
        self._quarantined[landing] = Quarantined(self._take_device_pages(holding), host)
        self._update_capacity(holding)

    def end_quarantine(self, landing: Hashable) -> None:
        """Releases the pages recorded under `landing`, whose writer has stopped. Ignores unknown landings."""
        pages = self._quarantined.pop(landing, None)
        if pages is not None:
            self.device.release(pages.device)
            if self.host is not None:
                self.host.release(pages.host)

    @property
    def quarantined(self) -> PageCounts:
        """The number of pages in quarantine."""
        quarantined = self._quarantined.values()
        return PageCounts(
            device=sum(len(pages.device) for pages in quarantined), host=sum(len(pages.host) for pages in quarantined)
        )

    def fits_beside_quarantine(self, tokens: int) -> bool:
        """Returns whether a context of `tokens` rows would fit if no request held pages."""
        quarantined, free_host = self.quarantined, 0 if self.host is None else self.host.capacity
        free_device, free_host = self.device.capacity - quarantined.device, free_host - quarantined.host
        residences = [Residence.RESIDENT, *([Residence.STREAMED] if self.tiers else [])]
        needs = [self.pages_needed(Holding(), residence, tokens) for residence in residences]
        return any(need.device <= free_device and need.host <= free_host for need in needs)

    def release(self, holding: Holding) -> None:
        """Releases all pages of a request, in any residence. Idempotent."""
        if holding.residence is Residence.ABSENT:
            return
        holding.move(Residence.ABSENT)
        self.device.release(self._take_device_pages(holding))
        if self.host is not None:
            self.host.release(self._take_own_host_pages(holding))
        self._update_capacity(holding)

    def audit(self, holdings: list[Holding]) -> None:
        """Proves that the pages of both pools and their owners agree. `holdings` has the holding of every request."""
        quarantined = self._quarantined.values()
        audit_device(self.device, holdings, self.shared_keys, [page for pages in quarantined for page in pages.device])
        if self.host is not None:
            audit_host(self.host, holdings, [page for pages in quarantined for page in pages.host])

    def _required(self, to: Residence, tokens: int) -> dict[PageUse, int]:
        return required_pages(self.geometry, to, tokens, on_host=self.host is not None)

    def _missing(
        self, holding: Holding, required: Mapping[PageUse, int], prefix: Sequence[CachedPage] = ()
    ) -> PageCounts:
        """Returns how many of the `required` pages a request lacks, as `pages_needed` counts them."""
        device = host = 0
        for use, count in required.items():
            lacks = count - len(holding.pages[use])
            if use is PageUse.KEYS and not holding.pages[use]:
                lacks -= len(self.shared_keys.find(prefix or holding.cached))
            if use is PageUse.HOST:
                host = max(0, lacks)
            elif lacks > 0:
                device += lacks
        if prefix:
            host += sum(cached.users == 0 for cached in prefix) - len(prefix)
        return PageCounts(device, host)

    def _required_to_land(self, on_device: bool, keys_on_host: bool, tokens: int) -> dict[PageUse, int]:
        """Returns the number of pages for each use in which `tokens` rows land."""
        rows = self.geometry.row_pages(tokens)
        if not on_device and self.host is None:
            raise InternalError("there is no host store to land in")
        return {
            PageUse.ROWS: rows if on_device else 0,
            PageUse.KEYS: 0 if keys_on_host else self.geometry.key_pages(tokens),
            PageUse.HOST: 0 if self.host is None else rows,
        }

    def _grant(self, holding: Holding, required: dict[PageUse, int]) -> list[Command]:
        """Allocates the missing pages. The caller has checked that they are free."""
        commands: list[Command] = []
        for use, count in required.items():
            held = holding.pages[use]
            missing = count - len(held)
            if missing <= 0:
                continue
            pool = self.host if use is PageUse.HOST else self.device
            assert pool is not None
            pages = pool.allocate(missing, after=held[-1] if held else None)
            if pages is None:
                raise InternalError(f"{missing} pages for {use.value} were free a moment ago")
            commands.append(Grant(holding.seat, use, len(held), tuple(pages)))
            held += pages
        self._update_capacity(holding)
        return commands

    def _update_capacity(self, holding: Holding) -> None:
        host_pages, page_rows = holding.pages[PageUse.HOST], self.geometry.page_rows
        holding.device_capacity = device_capacity(self.geometry, holding)
        holding.host_capacity = NO_LIMIT if self.host is None else len(host_pages) * page_rows
        holding.capacity = min(holding.device_capacity, holding.host_capacity)

    def _start(self, holding: Holding, seat: int, to: Residence, tokens: int) -> list[Command]:
        """Gives a request a seat. Grants the pages that it holds already, and those that `tokens` rows still need."""
        holding.move(to)
        holding.seat = seat
        commands: list[Command] = []
        for use, pages in holding.pages.items():
            num_shared = self.shared_keys.count(pages) if use is PageUse.KEYS else 0
            if num_shared:
                commands.append(Grant(seat, use, 0, tuple(pages[:num_shared]), shared=True))
            if len(pages) > num_shared:
                commands.append(Grant(seat, use, num_shared, tuple(pages[num_shared:])))
        commands += self._grant(holding, self._required(to, tokens))
        self.shared_keys.register(holding.cached, holding.pages[PageUse.KEYS])
        return commands

    def _use_shared_keys(self, holding: Holding) -> None:
        """Gives a request without index keys on the device the shared key pages of its cached pages."""
        holding.pages[PageUse.KEYS] = self.shared_keys.find(holding.cached)
        self.shared_keys.use(holding.pages[PageUse.KEYS])

    def _use_cached(self, holding: Holding, prefix: Sequence[CachedPage]) -> None:
        """Gives a request without host pages the cached pages of its prefix."""
        if self.host is not None:
            self.host.use(prefix)
            holding.cached = list(prefix)
            holding.pages[PageUse.HOST] = [cached.page for cached in prefix]

    def _take_device_pages(self, holding: Holding) -> list[int]:
        """Takes all device pages from a request. Returns those that no other request uses."""
        unused = self.shared_keys.stop_using(self._take(holding, PageUse.KEYS))
        return unused + [page for use in PageUse if use is not PageUse.HOST for page in self._take(holding, use)]

    def _take_own_host_pages(self, holding: Holding) -> list[int]:
        """Takes all host pages from a request. Returns its own pages, and stops using those in the cache."""
        own = holding.own_host_pages
        if self.host is not None:
            self.host.stop_using(holding.cached)
        holding.pages[PageUse.HOST], holding.cached = [], []
        return own

    @staticmethod
    def _take(holding: Holding, use: PageUse) -> list[int]:
        pages, holding.pages[use] = holding.pages[use], []
        return pages


def _rotated(tail: list[int], number: int) -> list[int]:
    """Returns the pages of a tail in the order of its table. The first of `tail` is page `number` of the context."""
    shift = -number % len(tail)
    return tail[shift:] + tail[:shift]
