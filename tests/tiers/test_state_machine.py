"""Ledger and KV memory under random changes of residence: attention reads the bytes that were written.

Most requests begin with the tokens of earlier ones and reuse their pages. A row's bytes depend on the salt and on all
tokens up to its own, so a request that reuses a page expects the bytes that the first owner of the page wrote.

Steps of decoding requests compute drafts, too: tokens of which some or all are rejected afterwards, so that their rows
are computed again with other bytes.

All memory that must not be read is poisoned, except pages in the prefix cache. Commands are executed before the next
step, as in the engine. By then, a page may have had several owners.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random

import pytest
import torch
from random_rules import RandomMachine, rule, run_example
from tiers.byte_model import SHAPES, Attention, Contents, Landing, Poisoner, PrefillWorker, SlotModel, Written, as_bytes

from hotset.memory.device_pool import DevicePool
from hotset.memory.host_store import HostStore
from hotset.memory.pages import PageAllocator
from hotset.tiers.commands import Command, Grant
from hotset.tiers.kv_memory import KvMemory
from hotset.tiers.ledger import LAND_ANYWHERE, LandingPolicy, Ledger, PageCounts
from hotset.tiers.prefix_cache import CachedPage, PageHasher, PrefixCache
from hotset.tiers.residence import Holding, PageUse, Residence

CPU = torch.device("cpu")
SALTS = ("", "salt")
POLICIES = [
    LAND_ANYWHERE,
    LAND_ANYWHERE,
    LandingPolicy(keys_on_host=True),
    LandingPolicy(on_device=False, keys_on_host=True),
]
WEIGHTS = {"shared": 3, "uneven": 1, "fp8": 1, "bytes": 6, "gqa": 1}  # of the shapes: few examples of the slowest


@dataclass(slots=True, eq=False)
class Request:
    salt: str
    tokens: list[int]  # of the prompt and of the whole answer; the request ends when all are computed
    prompt: int  # length of the prompt, which is computed in chunks
    written: Written
    hashes: list[bytes]  # of all full pages of `tokens`
    reused: int = 0  # pages that it found in the prefix cache
    landing: Landing | None = None  # where a prefill worker writes its prompt
    shared_prefix: bool = False  # whether others used its cached pages when its landing was reserved
    shared_keys: bool = False  # whether others used its key pages at that time
    holding: Holding = field(default_factory=Holding)

    @property
    def limit(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        return self.written.length

    @property
    def decoding(self) -> bool:
        return self.length >= self.prompt

    @property
    def rows(self) -> int:
        """The number of rows that need pages: the whole prompt or, when decoding, one more than are written."""
        return max(self.prompt, self.length + 1)

    @property
    def shares(self) -> bool:
        """True if another request uses some of the same cached pages."""
        return any(cached.users > 1 for cached in self.holding.cached)


@dataclass(frozen=True, slots=True)
class TakeSeat:
    """A request has been given this seat, which must be cleared before the request uses it."""

    seat: int


@dataclass(frozen=True, slots=True)
class PoisonPages:
    """Pages that a change has released or evicted. When its commands are executed, they must not be read any more."""

    device: list[int]
    host: list[int]


# Residence, seat, pages of each use, cached pages, capacity.
HoldingState = tuple[Residence, int, list[list[int]], list[CachedPage], int]


class TiersMachine(RandomMachine):
    """Random steps and random changes of residence, with small pools."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        kv = SHAPES[random.choices([*WEIGHTS], [*WEIGHTS.values()])[0]]
        page_rows, context, seats = random.randint(1, 5), random.randint(24, 64), random.randint(2, 4)
        max_drafts = random.choice([0, 0, 1, 2, 3, 5])
        slots = kv.topk * (1 + max_drafts) + random.randint(0, 7) if kv.groups else 0
        geometry = replace(kv.geometry(page_rows, slots), max_drafts=max_drafts)
        device_pages = int(random.uniform(0.7, 2.5) * geometry.resident_pages(context)) + 1
        host_pages = int(random.uniform(1, 3.5) * geometry.row_pages(context)) + 1
        policy, seed = random.choice(POLICIES), random.getrandbits(32)
        self.ledger = Ledger(geometry, PageAllocator(device_pages), PrefixCache(host_pages), policy)
        self.capacity = self.free_pages()
        self.pool = DevicePool(kv, geometry, device_pages, CPU)
        self.host = HostStore(kv, host_pages, page_rows, CPU)
        self.poisoner = Poisoner(self.pool, self.host)
        self.kv_memory = KvMemory(self.pool, self.host, seats, context)
        self.contents = Contents(kv, seed)
        self.attention = Attention(kv, self.contents, seed)
        self.prefill_worker = PrefillWorker(self.pool, self.host, self.contents)
        self.hasher = PageHasher("model", page_rows)
        self.numbers_of: dict[bytes, list[int]] = {}  # of the rows of every page that was hashed, see `Contents`
        self.texts: list[Request] = []  # all requests so far
        self.slots = SlotModel(kv, geometry, seats)
        self.context = context
        self.free_seats = list(range(seats))
        self.requests: list[Request] = []
        self.landed: set[int] = set()  # device pages that a peer has written, until they are granted to a seat
        self.quarantined: dict[str, Landing] = {}  # failed landings to which the prefill worker may still write
        self.pending: list[Command | TakeSeat | PoisonPages] = []  # executed before the next step

    @rule(lambda self: self.free_seats and len(self.in_residence(Residence.PARKED)) < 2)
    def admit(self) -> None:
        request, tiered = self.make_request(), self.random.random() < 0.7
        page_rows = self.pool.geometry.page_rows
        prefix = self.ledger.find_prefix(request.hashes[: (request.prompt - 1) // page_rows])
        reused = len(prefix) * page_rows
        to = Residence.RESIDENT
        if tiered and self.ledger.tiers:
            to = Residence.TIERED if reused and reused == request.prompt - 1 else Residence.STREAMED
        seen = [f"admitted {to.value}", *self.kinds_of_hits(request, prefix, to)]
        self.requests.append(request)
        seat = self.take_seat()

        if self.change(lambda: self.ledger.admit(request.holding, seat, to, request.prompt, prefix), TakeSeat(seat)):
            request.reused, request.written.length = len(prefix), reused
            self.note_shared_keys(request, "admitted")
            self.texts.append(request)
            SEEN.update(seen)
            if to is Residence.STREAMED and self.free_seats and self.flip():
                self.admit()
        else:
            self.free_seats.append(seat)
            self.requests.remove(request)

    def make_request(self) -> Request:
        """Makes a request with random tokens. Most begin with those of an earlier one, of which some add one token to
        its full pages, and a few differ from it in their first token. Some continue the longest seated context."""
        prompt = self.random.randint(1, self.random.choice([self.context // 2, self.context - 2]))
        salt, tokens, page_rows = self.random.choice(SALTS), [], self.pool.geometry.page_rows
        longest = max(self.seated(), key=lambda request: len(request.holding.cached), default=None)
        if longest is not None and self.flip():
            salt, tokens = longest.salt, longest.tokens[: longest.length]
            prompt = min(longest.length, self.context - 3) // page_rows * page_rows + 1
        elif self.texts and self.random.random() < 0.8:
            earlier = self.random.choice(self.random.choice([self.texts[-5:], self.requests or self.texts]))
            salt = earlier.salt if self.random.random() < 0.7 else salt
            known = self.random.choice([earlier.length, earlier.length, self.random.randint(1, earlier.limit)])
            if self.random.random() < 0.4:
                prompt = min(known, self.context - 3) // page_rows * page_rows + 1
            tokens = earlier.tokens[:known]
            if tokens and self.random.random() < 0.1:
                tokens[0] += 1  # all pages after the first have the same tokens, but other rows
        limit = self.random.choice([self.random.randint(prompt + 1, self.context - 1), self.context - 1])
        tokens = (tokens + [self.random.randrange(1 << 30) for _ in range(limit)])[:limit]
        hashes: list[bytes] = []
        self.hasher.extend(hashes, tokens, salt)
        numbers = self.contents.numbers(salt, tokens)
        for page, page_hash in enumerate(hashes):
            self.numbers_of[page_hash] = numbers[page * page_rows : (page + 1) * page_rows]
        return Request(salt, tokens, prompt, Written(numbers, self.pool.shape.groups), hashes)

    def note_shared_keys(self, request: Request, event: str) -> None:
        """Notes whether a request that has just started or resumed shares key pages, and whether it could."""
        if self.key_sharers(request):
            SEEN[f"{event} with shared keys"] += 1
        elif request.holding.cached:
            SEEN["no shared keys"] += 1

    def kinds_of_hits(self, request: Request, prefix: list[CachedPage], to: Residence) -> Iterator[str]:
        """Names what a request would show that starts from the cached pages of `prefix`."""
        page_rows = self.pool.geometry.page_rows
        other: list[bytes] = []
        self.hasher.extend(other, request.tokens, SALTS[request.salt == SALTS[0]])
        if len(self.ledger.find_prefix(other)) > len(prefix):
            yield "other salt"
        if prefix:
            yield f"hit {to.value}"
            yield "hit of unused pages" if any(cached.users == 0 for cached in prefix) else "hit of used pages"
            if len(prefix) < (request.prompt - 1) // page_rows:
                yield "partial hit"

    @rule(lambda self: len(self.in_residence(Residence.LANDING)) < 3)
    def reserve(self) -> None:
        """Reserves pages for a prompt of which a prefill worker will send the rows after the cached prefix."""
        request, page_rows, policy = self.make_request(), self.pool.geometry.page_rows, self.ledger.landing
        holding, prompt = request.holding, request.prompt
        on_device = policy.on_device and self.flip()
        prefix = self.ledger.find_prefix(request.hashes[: (prompt - 1) // page_rows])
        self.requests.append(request)
        reserve = self.ledger.reserve
        if not self.change(lambda: [] if reserve(holding, on_device, prompt, prefix) else None):
            self.requests.remove(request)
            return
        self.texts.append(request)
        request.reused, request.written.length = len(prefix), len(prefix) * page_rows
        rows, keys = holding.pages[PageUse.ROWS if on_device else PageUse.HOST], holding.pages[PageUse.KEYS]
        request.landing = Landing(
            request.written.numbers, request.length, prompt, on_device, row_pages=tuple(rows), key_pages=tuple(keys)
        )
        assert bool(keys) == bool(self.pool.shape.groups and (on_device or not policy.keys_on_host))
        request.shared_prefix, request.shared_keys = request.shares, bool(self.key_sharers(request))

    @rule(lambda self: self.in_residence(Residence.LANDING))
    def land(self) -> None:
        """Lets a prompt arrive, and admits its request. Without a free seat or enough pages, it waits.

        In some examples, the requests that use the same cached pages end before.
        """
        request = self.random.choice(self.in_residence(Residence.LANDING))
        assert request.landing is not None
        holding, prompt, on_device = request.holding, request.prompt, request.landing.on_device
        for other in self.prefix_sharers(request) if self.flip() else ():
            self.release(other)
        if not request.decoding:
            self.receive(request, prompt)
            request.written.length = prompt
        if not self.free_seats:
            return
        to = Residence.TIERED if not on_device and self.ledger.tiers and self.flip() else Residence.RESIDENT
        seat, length = self.take_seat(), request.length
        if self.change(lambda: self.ledger.land(holding, seat, to, length, request.rows), TakeSeat(seat)):
            SEEN[f"landed {to.value}"] += 1
            SEEN["landed on the device"] += on_device
            SEEN["landed after a prefix"] += request.reused > 0
            SEEN["landed as only user of its prefix"] += request.shared_prefix and not request.shares
            SEEN["landed as only user of its keys"] += request.shared_keys and not self.key_sharers(request)
            if self.pool.shape.groups and not on_device:
                SEEN[f"landed with keys on the {'host' if self.ledger.landing.keys_on_host else 'device'}"] += 1
            self.note_shared_keys(request, "landed")
        else:
            self.free_seats.append(seat)

    @rule(lambda self: self.incomplete_landings())
    def fail_landing(self) -> None:
        """Ends a landing of which only some rows were written, one with shared keys if there is one. In some examples,
        the prefill worker may still write, so the pages go into quarantine."""
        request = max(self.incomplete_landings(), key=lambda request: len(self.key_sharers(request)))
        self.receive(request, self.random.randint(request.length, request.prompt))
        if not self.quarantined and (self.key_sharers(request) or self.flip()):
            self.quarantine(request)
        else:
            SEEN["failed landings"] += 1
            self.release(request)

    def quarantine(self, request: Request) -> None:
        SEEN["quarantined"] += 1
        SEEN["quarantined after a prefix"] += request.reused > 0
        SEEN["quarantined with shared keys"] += bool(self.key_sharers(request))
        name = f"landing {len(self.texts)}"
        assert request.landing is not None
        self.quarantined[name] = request.landing

        def move_to_quarantine() -> list[Command]:
            self.ledger.quarantine(request.holding, name)
            return []

        assert self.change(move_to_quarantine)
        self.requests.remove(request)

    @rule(lambda self: self.quarantined)
    def write_late(self) -> None:
        """Lets the prefill worker of a failed landing write to its pages. In some examples, it then stops."""
        for name, landing in tuple(self.quarantined.items()):
            self.prefill_worker.write(landing, landing.last, poison=True)
            SEEN["late writes"] += 1
            if self.flip():
                self.end_quarantine(name)

    def end_quarantine(self, name: str) -> None:
        def end() -> list[Command]:
            self.ledger.end_quarantine(name)
            return []

        assert self.change(end)
        del self.quarantined[name]

    def receive(self, request: Request, last: int) -> None:
        """Lets the prefill worker write rows up to `last`. It begins only after all earlier users of the pages."""
        self.execute_pending()
        assert request.landing is not None
        self.prefill_worker.write(request.landing, last)
        pages = request.holding.pages
        self.landed.update(page for use in (PageUse.ROWS, PageUse.KEYS) for page in pages[use])

    def key_sharers(self, request: Request) -> list[Request]:
        """Returns the other requests with which a request shares key pages."""
        pages = {*request.holding.pages[PageUse.KEYS]}
        others = [other for other in self.requests if other is not request]
        return [other for other in others if not pages.isdisjoint(other.holding.pages[PageUse.KEYS])]

    def prefix_sharers(self, request: Request) -> list[Request]:
        """Returns the other requests that use some of the same cached pages."""
        cached = {*request.holding.cached}
        others = [other for other in self.requests if other is not request]
        return [other for other in others if not cached.isdisjoint(other.holding.cached)]

    def incomplete_landings(self) -> list[Request]:
        return [request for request in self.in_residence(Residence.LANDING) if not request.decoding]

    @rule(lambda self: self.seated())
    def run(self) -> None:
        """Runs several steps. If a step computes nothing, one request is demoted or parked instead."""
        for _ in range(self.random.randint(4, 16)):
            if self.step():
                continue
            if demotable := self.demotable():
                self.demote(self.random.choice(demotable))
            elif seated := self.seated():
                self.park(self.random.choice(seated))

    @rule(lambda self: self.demotable())
    def demote_one(self) -> None:
        self.demote(self.random.choice(self.demotable()))

    @rule(lambda self: self.in_residence(Residence.TIERED))
    def promote(self) -> None:
        request = self.random.choice(self.in_residence(Residence.TIERED))
        if self.change(lambda: self.ledger.promote(request.holding, request.length)):
            SEEN["promotions"] += 1
            SEEN["promotions of a sharer"] += request.shares

    @rule(lambda self: self.seated())
    def park_one(self) -> None:
        """Parks a request. Those that are streamed or share key pages are preferred, because they are few."""
        if self.flip():
            seated = self.seated()
            rare = [r for r in seated if r.holding.residence is Residence.STREAMED or self.key_sharers(r)]
            self.park(self.random.choice(rare or seated))

    @rule(lambda self: self.free_seats and self.in_residence(Residence.PARKED))
    def resume(self) -> None:
        request = self.random.choice(self.in_residence(Residence.PARKED))
        to = Residence.TIERED if request.decoding else Residence.STREAMED
        if not self.ledger.tiers or self.flip():
            to = Residence.RESIDENT
        seat = self.take_seat()
        resume = self.ledger.resume
        if self.change(lambda: resume(request.holding, seat, to, request.length, request.rows), TakeSeat(seat)):
            SEEN[f"resumed {to.value}"] += 1
            self.note_shared_keys(request, "resumed")
        else:
            self.free_seats.append(seat)

    @rule(lambda self: self.growing())
    def grow(self) -> None:
        """Grants pages for the next row. Other changes may happen before the row is computed."""
        self.ensure_pages(self.random.choice(self.growing()))

    @rule(lambda self: self.requests)
    def abort(self) -> None:
        if self.random.random() < 0.8:
            return
        request = self.random.choice(self.requests)
        SEEN["aborts"] += 1
        SEEN["aborts of a landing"] += request.holding.residence is Residence.LANDING
        SEEN["aborts of a first owner"] += any(cached.users > 1 for cached in request.holding.cached[request.reused :])
        self.release(request)

    @torch.inference_mode()
    def step(self) -> bool:
        """Computes a batch of randomly selected requests: a chunk of each prompt, and one token of each that decodes,
        with drafts of the tokens after it.

        Returns False if no request was selected, or if none of those selected got pages for its next row.
        """
        batch = [request for request in self.seated() if self.random.random() < 0.85 and self.ensure_pages(request)]
        if not batch:
            return False
        self.random.shuffle(batch)
        seats, starts = [request.holding.seat for request in batch], [request.length for request in batch]
        counts = [self.random_count(request) for request in batch]
        accepted = [self.draft(*drafted) for drafted in zip(batch, counts, strict=True)]
        self.execute_pending()
        for seat, start in zip(seats, starts, strict=True):
            self.slots.move_tail_to_slots(seat, start)
        view = self.kv_memory.view(seats, starts, counts)
        self.attention.forward(view, [request.written for request in batch])
        self.kv_memory.mirror_filled_pages(seats, starts, counts)
        for request, start, length in zip(batch, starts, accepted, strict=True):
            self.slots.choose(request.holding.seat, start, request.written.chosen)
            self.reject(request, start, length)
        residences = Counter(request.holding.residence for request in batch)
        SEEN["steps"] += 1
        SEEN["mixed steps"] += len(residences) > 1
        SEEN["several streamed"] += residences[Residence.STREAMED] > 1
        SEEN["several streamed and others"] += 1 < residences[Residence.STREAMED] < len(batch)
        self.compare_host()
        self.audit_maps()
        for request in batch:
            self.publish(request)
            self.end_or_make_tiered(request)
        self.audit()
        return True

    def publish(self, request: Request) -> None:
        """Publishes the full pages of a request, as the scheduler does at the commit of a plan. In some steps it does
        not, as if the plan were not committed before the next one is made."""
        first, page_rows = len(request.holding.cached), self.pool.geometry.page_rows
        pages = request.length // page_rows
        if pages > first and self.random.random() < 0.8:
            tokens = request.tokens[first * page_rows : pages * page_rows]
            self.ledger.publish(request.holding, request.hashes[first:pages], tokens, request.salt)
            own = request.holding.pages[PageUse.HOST]
            SEEN["own copy"] += any(cached.page not in own for cached in request.holding.cached)

    def draft(self, request: Request, count: int) -> int:
        """Lets the last of the `count` tokens that a step computes be drafts that will be rejected, if they are drafts.
        Returns how many rows are final after the step."""
        if not request.decoding:
            return request.length + count
        final = request.length + self.random.randint(1, count)
        wrong = [self.random.randrange(1 << 30) for _ in range(request.length + count - final)]
        request.written.numbers = self.contents.numbers(request.salt, request.tokens[:final] + wrong)
        return final

    def reject(self, request: Request, start: int, final: int) -> None:
        """Takes back the drafts that a step has computed after the first `final` rows."""
        page_rows, residence, last = self.pool.geometry.page_rows, request.holding.residence, request.length
        SEEN[f"rejected {residence.value}"] += final < last
        SEEN[f"rejected in the next page, {residence.value}"] += final // page_rows < (last - 1) // page_rows
        SEEN[f"accepted {residence.value}"] += request.decoding and start + 1 < final
        SEEN["accepted two pages"] += request.decoding and start // page_rows + 1 < final // page_rows
        request.written.length = final
        request.written.numbers = self.contents.numbers(request.salt, request.tokens)

    def random_count(self, request: Request) -> int:
        """Returns how many tokens of the request the step computes. Those that decode compute drafts if there are pages
        for them."""
        if request.decoding:
            most = min(1 + self.pool.geometry.max_drafts, request.limit - request.length)
            count = self.random.randint(1, most)
            fits = self.change(lambda: self.ledger.grow(request.holding, request.length + count))
            return count if fits else 1
        remaining = request.prompt - request.length
        return remaining if self.random.random() < 0.1 else self.random.randint(1, min(remaining, 8))

    def end_or_make_tiered(self, request: Request) -> None:
        """Ends a request that has reached its limit, and makes a streamed request tiered after its prompt."""
        if request.length == request.limit:
            self.release(request)
            SEEN["finished"] += 1
        elif request.decoding and request.holding.residence is Residence.STREAMED:
            assert self.change(lambda: self.ledger.end_streaming(request.holding, request.length))

    def demote(self, request: Request) -> None:
        predicted, free = self.ledger.pages_freed_by_demotion(request.holding, request.length), self.ledger.device.free
        assert self.change(lambda: self.ledger.demote(request.holding, request.length))
        assert self.ledger.device.free == free + predicted, "a demotion did not free the predicted number of pages"
        SEEN["demotions"] += 1
        SEEN["demotions of a sharer"] += request.shares

    def park(self, request: Request) -> None:
        SEEN[f"parked {request.holding.residence.value}"] += 1
        SEEN["parked sharer"] += request.shares
        self.free_seats.append(request.holding.seat)
        assert self.change(lambda: self.ledger.park(request.holding, request.length))

    def ensure_pages(self, request: Request) -> bool:
        """Grants pages for the next row if necessary. Returns False if too few pages are free."""
        if request.length < request.holding.capacity:
            return True
        return self.change(lambda: self.ledger.grow(request.holding, request.rows))

    def change(self, change_ledger: Callable[[], list[Command] | None], *before: TakeSeat) -> bool:
        """Changes the ledger. Queues the poisoning of the evicted pages, `before`, the resulting commands, and the
        poisoning of the released pages.

        Returns False if the ledger refused the change because too few pages are free. In this case, checks that the
        ledger changed nothing.
        """
        holdings, free, held, cached = self.holdings(), self.free_pages(), self.held_pages(), self.cached_pages()
        commands = change_ledger()
        if commands is None:
            unchanged = self.holdings() == holdings and self.free_pages() == free
            assert unchanged, "the ledger refused a change, but changed something"
            SEEN["refused"] += 1
            return False
        evicted = sorted(cached - self.cached_pages())
        SEEN["changes"] += 1
        SEEN["evictions"] += bool(evicted)
        released = [sorted(old - new) for old, new in zip(held, self.held_pages(), strict=True)]
        self.pending += [PoisonPages([], evicted), *before, *commands, PoisonPages(*released)]
        return True

    def release(self, request: Request) -> None:
        if request.holding.residence not in (Residence.PARKED, Residence.LANDING):
            self.free_seats.append(request.holding.seat)

        def release_twice() -> list[Command]:
            self.ledger.release(request.holding)
            self.ledger.release(request.holding)
            return []

        assert self.change(release_twice)
        self.requests.remove(request)

    @torch.inference_mode()
    def execute_pending(self) -> None:
        """Executes all pending commands. Poisons device pages that are granted, unless they are shared or hold what has
        landed, and all pages that were released."""
        for command in self.pending:
            match command:
                case TakeSeat(seat):
                    self.kv_memory.clear_seat(seat)
                    self.slots.remove(seat)
                case PoisonPages(device, host):
                    self.poisoner.poison(device, host)
                    self.landed.difference_update(device)
                case _:
                    if isinstance(command, Grant) and command.use is not PageUse.HOST and not command.shared:
                        self.poisoner.poison([page for page in command.pages if page not in self.landed], [])
                        self.landed.difference_update(command.pages)
                    self.kv_memory.execute(command)
                    self.slots.execute(command)
        self.pending = []

    def compare_host(self) -> None:
        """Checks that the host has all full pages, all rows of streamed prompts, all data of parked requests, and all
        pages of the prefix cache."""
        page_rows = self.pool.geometry.page_rows
        in_cache = [(page, self.numbers_of[page_hash]) for page_hash, page in self.cached_by_hash().items()]
        numbers = [number for _page, of_page in in_cache for number in of_page]
        host_rows = [page * page_rows + row for page, _numbers in in_cache for row in range(page_rows)]
        numbers_of_keys, host_keys = [*numbers], [*host_rows]
        for request in self.requests:
            residence, length = request.holding.residence, request.length
            rows = keys = length // page_rows * page_rows
            if residence in (Residence.STREAMED, Residence.PARKED):
                rows = length
            if residence is Residence.PARKED:
                keys = length
            if residence is Residence.LANDING:
                assert request.landing is not None
                in_cache = request.reused * page_rows
                rows = in_cache if request.landing.on_device else length
                keys = length if not request.landing.on_device and self.ledger.landing.keys_on_host else in_cache
            pages = request.holding.pages[PageUse.HOST]
            at = [pages[position // page_rows] * page_rows + position % page_rows for position in range(length)]
            host_rows += at[:rows]
            host_keys += at[:keys]
            numbers += request.written.numbers[:rows]
            numbers_of_keys += request.written.numbers[:keys]
        same = torch.equal(as_bytes(self.host.rows[:, host_rows]), self.contents.rows[:, numbers])
        assert same, "rows differ on the host"
        if self.host.keys is not None:
            same = torch.equal(as_bytes(self.host.keys[:, host_keys]), self.contents.keys[:, numbers_of_keys])
            assert same, "index keys differ on the host"

    def check(self) -> None:
        """Runs a few steps between two changes, or none, so that the commands of several changes can be pending."""
        self.audit()
        for _ in range(self.random.choice([0, 0, 0, 1, 1, 4])):
            self.step()

    def audit(self) -> None:
        self.ledger.audit([request.holding for request in self.requests])
        for request in self.requests:
            in_cache = len(request.holding.cached) * self.pool.geometry.page_rows
            assert in_cache <= request.length, "a page is in the cache before all its rows are computed"

    def audit_maps(self) -> None:
        """Checks the maps of tiered seats, which change only in steps and when commands are executed."""
        not_executed = {command.seat for command in self.pending if not isinstance(command, PoisonPages)}
        tiered = {request.holding.seat: request.length for request in self.in_residence(Residence.TIERED)}
        tiered = {seat: length for seat, length in tiered.items() if seat not in not_executed}
        self.kv_memory.audit(tiered)
        for seat in tiered:
            for group, slots in enumerate(self.slots.slots[seat]):
                position_of, last_used, _ = self.kv_memory.hot_buffers.maps(seat, group)
                assert (position_of, last_used) == (slots.position_of, slots.last_used), (
                    "the maps differ from the model"
                )

    def finish(self) -> None:
        for request in tuple(self.requests):
            self.release(request)
        for name in tuple(self.quarantined):
            self.end_quarantine(name)
        self.execute_pending()
        self.compare_host()
        assert self.free_pages() == self.capacity, "not all pages were released"
        self.change(self.evict_all)
        assert not any(self.held_pages()), "pages stay in the cache for ever"
        self.audit()
        self.audit_maps()
        traffic, slots = self.kv_memory.copy_traffic().result(), self.slots
        if self.ledger.tiers:
            assert [[*traffic.lookups.values()], [*traffic.misses.values()]] == [slots.lookups, slots.misses]
        SEEN["misses"] += sum(slots.misses)
        SEEN["hits"] += sum(slots.lookups) - sum(slots.misses)

    def take_seat(self) -> int:
        return self.free_seats.pop(self.random.randrange(len(self.free_seats)))

    def in_residence(self, *residences: Residence) -> list[Request]:
        return [request for request in self.requests if request.holding.residence in residences]

    def seated(self) -> list[Request]:
        return self.in_residence(Residence.RESIDENT, Residence.STREAMED, Residence.TIERED)

    def growing(self) -> list[Request]:
        """Returns the decoding requests that need more pages for their next row."""
        return [request for request in self.seated() if request.decoding and request.length >= request.holding.capacity]

    def demotable(self) -> list[Request]:
        seated = [request for request in self.seated() if request.decoding]
        return [
            request for request in seated if self.ledger.pages_freed_by_demotion(request.holding, request.length) > 0
        ]

    def holdings(self) -> list[HoldingState]:
        """Returns a copy of every holding, with which `change` checks that a refused change has changed nothing."""
        holdings = [request.holding for request in self.requests]
        return [
            (h.residence, h.seat, [[*pages] for pages in h.pages.values()], [*h.cached], h.capacity) for h in holdings
        ]

    def free_pages(self) -> PageCounts:
        assert self.ledger.host is not None
        return PageCounts(self.ledger.device.free, self.ledger.host.free)

    def held_pages(self) -> tuple[set[int], set[int]]:
        """Returns the device pages and the host pages that requests hold, and those in the cache."""
        held = [item for request in self.requests for item in request.holding.pages.items()]
        device = {page for use, pages in held if use is not PageUse.HOST for page in pages}
        return device, self.cached_pages() | {page for use, pages in held if use is PageUse.HOST for page in pages}

    def cached_by_hash(self) -> dict[bytes, int]:
        assert self.ledger.host is not None
        return {page_hash: cached.page for page_hash, cached in self.ledger.host._cached.items()}

    def cached_pages(self) -> set[int]:
        return {*self.cached_by_hash().values()}

    def evict_all(self) -> list[Command]:
        assert self.ledger.host is not None
        self.ledger.host.evict(self.ledger.host.capacity)
        return []


SEEN: Counter[str] = Counter()  # how often each event has happened since the test began
EVENTS = ["demotions", "promotions", "misses", "hits", "mixed steps", "refused", "finished", "aborts"]
EVENTS += ["admitted resident", "admitted streamed", "parked resident", "parked tiered", "parked streamed"]
EVENTS += ["resumed resident", "resumed tiered", "resumed streamed", "several streamed", "several streamed and others"]
EVENTS += ["rejected resident", "rejected tiered", "accepted resident", "accepted tiered", "accepted two pages"]
EVENTS += ["rejected in the next page, resident", "rejected in the next page, tiered"]
EVENTS += ["hit resident", "hit streamed", "hit tiered", "partial hit", "hit of unused pages", "hit of used pages"]
EVENTS += ["evictions", "other salt", "own copy", "aborts of a first owner"]
EVENTS += ["demotions of a sharer", "promotions of a sharer", "parked sharer"]
EVENTS += ["landed resident", "landed tiered", "landed after a prefix", "landed on the device"]
EVENTS += ["landed with keys on the host", "landed with keys on the device", "failed landings", "aborts of a landing"]
EVENTS += ["quarantined", "quarantined after a prefix", "quarantined with shared keys", "late writes"]
EVENTS += ["landed as only user of its prefix", "landed as only user of its keys"]
EVENTS += ["admitted with shared keys", "resumed with shared keys", "landed with shared keys", "no shared keys"]


@pytest.mark.parametrize("steps", [2000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_attention_reads_the_bytes_that_were_written_after_any_change_of_residence(steps: int) -> None:
    """Runs examples of 50 rules until `steps` steps have run and every event has happened.

    Steps that compute tokens and changes of the ledger are counted together. All bytes that attention reads and all
    rows on the host are compared in every step that computes tokens. Pages are audited after it, and after every rule.
    The examples depend on nothing but this code and their seeds, so they are the same in every run.
    """
    SEEN.clear()
    for seed in range(max(500, steps // 10)):
        run_example(TiersMachine, seed, rules=50)
        if SEEN["steps"] + SEEN["changes"] >= steps and all(SEEN[event] for event in EVENTS):
            return
    missing = [event for event in EVENTS if not SEEN[event]]
    raise AssertionError(f"{SEEN['steps']} steps, {SEEN['changes']} changes; events that never happened: {missing}")
