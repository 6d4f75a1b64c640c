"""Tests of a whole engine for defects seen in other engines.

The name of a test contains the number of its defect in scripts/sabotage.d. One test of defect 16 uses only the KV
memory, on a GPU.

`Bench` also computes every request with plain lists. It compares the host store with the lists after each step that
leaves no command pending, and compares the answers at the end. `scripts/sabotage --list` prints the tests of all
defects. `scripts/sabotage` reintroduces each defect and checks that a test fails.
"""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from matrix import matrix
from tiers.whole_numbers import LAYERS, SHAPE, Bench, alone, prompt_of

from hotset.memory.device_pool import DevicePool
from hotset.memory.host_store import HostStore
from hotset.schedule.request import Phase, Request
from hotset.tiers.commands import Grant
from hotset.tiers.kv_memory import KvMemory
from hotset.tiers.residence import PageUse, Residence

TIERS_AND_DEPTHS = pytest.mark.parametrize(("tiers", "depth"), [("auto", 1), ("always", 2)])  # plans in flight


@TIERS_AND_DEPTHS
def test_defect_01_parking_keeps_host_rows_and_resuming_sets_the_hot_buffer_up_again(tiers: str, depth: int) -> None:
    bench = Bench(18, 80, tiers=tiers, depth=depth)
    old, young = bench.add("old", 22, 50), bench.add("young", 20, 50)
    bench.run(until=lambda: young.phase is Phase.PARKED and bench.settled)
    bench.step()
    assert young.num_scheduled % bench.geometry.page_rows, "the last page is full, so nothing was tested"
    assert len(young.holding.pages[PageUse.HOST]) == bench.geometry.row_pages(young.num_scheduled)
    assert young.holding.device_pages == 0
    assert bench.compared[Residence.PARKED] >= young.num_scheduled, "the rows of the parked request were not compared"
    bench.run(until=lambda: young.seat is not None)
    assert old.phase is Phase.FINISHED or young.holding.residence is Residence.TIERED
    bench.run(until=lambda: bench.settled)
    if young.holding.residence is Residence.TIERED:
        assert young.seat is not None and young.seat in bench.memory.tables.tiered_seats
        assert len(young.holding.pages[PageUse.SLOTS]) == bench.geometry.slot_pages
    bench.finish()
    counters = bench.scheduler.counters
    assert counters.parks == counters.resumes > 0 and counters.recomputes == 0
    assert counters.tokens_prefilled == 42, "a prompt was computed twice"


def test_defect_01_a_prompt_parked_between_chunks_continues_where_it_stopped() -> None:
    bench = Bench(40, 80, step_tokens=6, tiers="always")
    request = bench.add("streamed", 40, 8)
    bench.run(until=lambda: request.num_scheduled == 18)
    assert request.holding.residence is Residence.STREAMED
    bench.scheduler._preemptor.change_residence(request, Residence.PARKED)
    bench.finish()
    assert bench.scheduler.counters.resumes == 1 and bench.scheduler.counters.tokens_prefilled == 40


# For each state, a function that returns True if the request has reached it.
REACHED: dict[str, Callable[[Bench, Request], bool]] = {
    "waiting": lambda bench, request: request.phase is Phase.WAITING,
    "prefilling": lambda bench, request: (
        request.phase is Phase.PREFILL and 0 < request.num_scheduled < len(request.prompt)
    ),
    "resident": lambda bench, request: (
        request.phase is Phase.DECODE and request.holding.residence is Residence.RESIDENT
    ),
    "streamed": lambda bench, request: request.holding.residence is Residence.STREAMED and request.num_scheduled > 0,
    "just made tiered": lambda bench, request: request.holding.residence is Residence.TIERED and not bench.settled,
    "tiered": lambda bench, request: request.holding.residence is Residence.TIERED and request.num_scheduled > 30,
    "parked": lambda bench, request: request.phase is Phase.PARKED,
    "about to be preempted": lambda bench, request: request in bench.scheduler._preemptor.pending,
}


# Every state is tested with two plans in flight, and two states also with one. With one, no preemption stays pending.
@pytest.mark.parametrize(("state", "depth"), [*((state, 2) for state in REACHED), ("waiting", 1), ("parked", 1)])
def test_defect_03_an_abort_releases_every_page_and_disturbs_no_other_request(state: str, depth: int) -> None:
    resident = state in ("prefilling", "resident")
    bench = Bench(60 if resident else 18, 80, tiers="auto" if resident else "always", depth=depth, step_tokens=12)
    bench.add("old", 20, 50)
    victim = bench.add("victim", 20, 50)
    bench.add("next", 24, 12)
    bench.run(until=lambda: REACHED[state](bench, victim))
    assert REACHED[state](bench, victim), f"no request was ever {state}"
    held, in_flight = bench.ledger.device.held, victim.in_flight
    held_by_victim = victim.holding.device_pages
    bench.engine.abort("victim")
    bench.engine.abort("victim")
    bench.scheduler.audit()
    if in_flight:
        assert bench.ledger.device.held == held, "pages were released while a plan in flight writes to them"
    else:
        assert bench.ledger.device.held == held - held_by_victim, "pages were not released at once"
        assert victim.holding.device_pages == 0 and not victim.holding.pages[PageUse.HOST]
    bench.finish()
    assert bench.reasons == {"old": "length", "victim": "abort", "next": "length"}


def test_defect_03_pages_used_by_a_plan_in_flight_are_not_granted() -> None:
    bench = Bench(20, 40, depth=1)
    scheduler = bench.scheduler
    victim = bench.add("victim", 60, 4)
    plan = scheduler.plan()
    assert plan is not None
    ticket = bench.engine.executor.runner.submit(plan)
    device_pages = {page for use, pages in victim.holding.pages.items() if use is not PageUse.HOST for page in pages}
    host_pages = set(victim.holding.pages[PageUse.HOST])
    bench.engine.abort("victim")
    bench.add("next", 60, 4)
    next_plan = scheduler.plan()
    commands = [] if next_plan is None else next_plan.commands
    for grant in [command for command in commands if isinstance(command, Grant)]:
        in_use = host_pages if grant.use is PageUse.HOST else device_pages
        assert not in_use.intersection(grant.pages), "a page was granted that a plan in flight still writes to"
    scheduler.commit(ticket.result())
    scheduler.take_outputs()
    bench.reasons["victim"] = "abort"
    bench.finish()


@pytest.mark.parametrize("tiers", ["auto", "always"])
@pytest.mark.parametrize(
    ("host_pages", "prompt", "answer"),
    [(24, 40, 3), (6, 8, 5)],
    ids=["prompts fill the store", "answers fill the store"],
)
def test_defect_04_requests_wait_while_the_host_is_full(host_pages: int, prompt: int, answer: int, tiers: str) -> None:
    """Two requests fit, each with one page to grow. If no page were kept free, three short prompts would fit."""
    bench = Bench(90, host_pages, tiers=tiers, depth=2)
    for name in "abcd":
        bench.add(name, prompt, answer)
    while not bench.engine.idle:
        bench.step()
        assert bench.engine.stats().running <= 2, "more requests were admitted than the host store can hold"
    bench.finish()
    assert bench.scheduler.counters.recomputes == 0, "an admitted request had too few pages to reach its end"


@TIERS_AND_DEPTHS
def test_defect_04_the_youngest_request_is_recomputed_if_the_host_cannot_hold_all(tiers: str, depth: int) -> None:
    bench = Bench(90, 24, tiers=tiers, depth=depth)
    for name in "abc":
        bench.add(name, 8, 60)
    bench.finish()
    counters = bench.scheduler.counters
    assert counters.recomputes > 0, "the host store was never full, so nothing was tested"
    assert list(bench.reasons) == ["a", "b", "c"], "a younger request finished first"


def test_defect_04_a_parked_request_releases_its_host_pages_when_the_host_store_is_full() -> None:
    bench = Bench(18, 22, tiers="always")
    bench.add("old", 20, 60)
    bench.add("young", 20, 50)
    old, scheduled = bench.requests["old"], 0
    while not bench.engine.idle:
        bench.step()
        assert old.num_scheduled >= scheduled, "the running request was recomputed, not the parked one"
        scheduled = old.num_scheduled
    bench.finish()
    counters = bench.scheduler.counters
    assert counters.parks > 0 and counters.recomputes > 0, f"{counters}: no request was parked, or none recomputed"


@pytest.mark.parametrize(("device_pages", "host_pages", "tiers"), [(24, 151, "always"), (70, 30, "auto")])
def test_defect_07_page_ids_of_the_two_pools_are_never_mixed_up(device_pages: int, host_pages: int, tiers: str) -> None:
    bench = Bench(device_pages, host_pages, tiers=tiers, depth=2, seats=3, step_tokens=9)
    for number, (prompt, answer) in enumerate([(30, 40), (7, 50), (44, 12), (21, 33), (3, 20)]):
        bench.add(f"r{number}", prompt, answer)
    requests_with_different_ids = 0  # counted in every step
    while not bench.engine.idle:
        bench.step()
        for request in bench.requests.values():
            pages = dict(request.holding.pages)
            requests_with_different_ids += bool(
                set(pages.pop(PageUse.HOST)) - {page for held in pages.values() for page in held}
            )
    assert requests_with_different_ids > 50, "host and device page ids are the same, so nothing was tested"
    bench.finish()
    counters = bench.scheduler.counters
    moved = counters.demotions + counters.parks + counters.recomputes
    assert moved > 0 or bench.compared[Residence.TIERED] > 0, f"{counters}: no rows were moved between the pools"


@pytest.mark.parametrize(("tiers", "length"), [("auto", 26), *(("always", length) for length in range(23, 28))])
def test_defect_08_contexts_that_end_within_a_page_are_parked_and_resumed_exactly(tiers: str, length: int) -> None:
    bench = Bench(60, 40, tiers=tiers)
    request = bench.add("r", 21, 24)
    bench.run(until=lambda: request.num_scheduled == length and bench.settled)
    mirrored = bench.memory.copy_traffic().rows_mirrored
    assert mirrored == length // 4 * 4, "a full page was copied twice or not at all"
    bench.scheduler._preemptor.change_residence(request, Residence.PARKED)
    bench.step()
    assert bench.scheduler.counters.resumes == 1
    filled = (length + 1) // 4 * 4 - length // 4 * 4  # a partly flushed page is copied again as a whole when it is full
    expected = mirrored + length % 4 + filled
    assert bench.memory.copy_traffic().rows_mirrored == expected, "parking did not copy only the rows of the last page"
    bench.finish()


@pytest.mark.parametrize(("chunk", "prompt", "tiers"), matrix([4, 5, 9], [4, 19, 20, 21], ["auto", "always"]))
def test_defect_08_chunks_that_begin_within_a_page_are_mirrored(chunk: int, prompt: int, tiers: str) -> None:
    bench = Bench(60, 40, tiers=tiers, step_tokens=chunk)
    # The first request decodes in the same steps, so that chunks of the second request begin anywhere in a page.
    bench.add("first", 3, 9)
    bench.add("second", prompt, 9)
    bench.finish()


@pytest.mark.parametrize(("chunk", "tiers"), [(1, "auto"), (7, "always"), (64, "auto")])
def test_defect_15_ties_select_the_same_positions_for_every_chunk_size_and_residence(chunk: int, tiers: str) -> None:
    bench = Bench(60, 40, tiers=tiers, step_tokens=chunk)
    bench.add("r", 30, 30)
    bench.finish()
    assert alone(prompt_of("r", 30), 30).ties > 50, "there are too few ties, so nothing was tested"


@pytest.mark.parametrize("tiers", ["auto", "always"])
def test_defect_16_a_page_is_mirrored_after_the_pass_that_writes_it(tiers: str) -> None:
    bench = Bench(60, 40, tiers=tiers, step_tokens=10)
    request = bench.add("r", 24, 12)
    order: list[str] = []
    forward, mirror = bench.model.forward, bench.memory.mirror_filled_pages

    def recorded_forward(*args: torch.Tensor) -> torch.Tensor:
        logits = forward(*args)
        order.append("computed")
        return logits

    def recorded_mirror(*args: list[int]) -> None:
        order.append("mirrored")
        mirror(*args)

    bench.model.forward = recorded_forward  # type: ignore[method-assign]
    bench.memory.mirror_filled_pages = recorded_mirror  # type: ignore[method-assign]
    bench.finish()
    assert order and order == ["computed", "mirrored"] * (len(order) // 2)
    assert request.phase is Phase.FINISHED


@pytest.mark.gpu
def test_defect_16_the_side_stream_waits_for_the_pass_that_writes_a_page() -> None:
    device, geometry = torch.device("cuda"), SHAPE.geometry(64, 6)
    pool, host = DevicePool(SHAPE, geometry, 40, device), HostStore(SHAPE, 32, 64, device)
    memory = KvMemory(pool, host, 1, 2048)
    memory.clear_seat(0)
    memory.execute(Grant(0, PageUse.ROWS, 0, tuple(range(32))))
    memory.execute(Grant(0, PageUse.KEYS, 0, tuple(range(32, 40))))
    memory.execute(Grant(0, PageUse.HOST, 0, tuple(range(32))))
    host.rows.fill_(-1)
    values = torch.arange(2048 * 5, device=device).reshape(2048, 5).short()
    torch.cuda.synchronize()
    view = memory.view([0], [0], [2048])
    torch.cuda._sleep(200_000_000)  # delays the writes below by about 0.1 s; mirroring must wait for them
    for layer in range(LAYERS):
        view.new_rows(layer).store(values + layer)
    for group in range(SHAPE.groups):
        view.keys(group).store(view.segments.positions, values[:, :3])
    memory.mirror_filled_pages([0], [0], [2048])
    torch.cuda.synchronize()
    for layer in range(LAYERS):
        assert torch.equal(host.rows[layer, :, :5], (values + layer).cpu()), "a page was copied before it was written"
    host.close()


def test_defect_17_rows_and_keys_on_the_host_equal_those_of_plain_lists_in_every_residence() -> None:
    compared: Counter[Residence] = Counter()
    for tiers in ("auto", "always"):
        bench = Bench(18, 80, tiers=tiers, step_tokens=6)
        for name in ("old", "young"):
            bench.add(name, 20, 50)
        bench.finish()
        compared += bench.compared
    residences = (Residence.RESIDENT, Residence.STREAMED, Residence.TIERED, Residence.PARKED)
    assert all(compared[residence] > 40 for residence in residences), f"{compared}: too few rows were compared"


@pytest.mark.parametrize("side", ["rows", "keys"])
def test_defect_17_the_comparison_fails_if_one_bit_on_the_host_is_wrong(side: str) -> None:
    bench = Bench(60, 40)
    request = bench.add("r", 33, 8)
    bench.run(until=lambda: request.num_scheduled == 34)
    bench.compare_host()
    stored = bench.host.rows if side == "rows" else bench.host.keys
    assert stored is not None
    stored[-1, request.holding.pages[PageUse.HOST][7] * 4 + 3, 2] ^= 1
    with pytest.raises(AssertionError, match=side):
        bench.compare_host()
