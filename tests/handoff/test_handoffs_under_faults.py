"""Many handoffs in a world in which everything can fail: no wrong byte, no leak, no handoff without an end."""

from collections import Counter
from dataclasses import replace

import pytest
from faulty_world import Decode, Trouble, World

from hotset.handoff.outgoing import SENDER_TIMEOUTS
from hotset.handoff.receiver import RECEIVER_TIMEOUTS
from hotset.handoff.sender_staging import PIECE_TIMEOUTS
from hotset.transfer.loopback import Faults

STEP = 0.01
QUIET = Trouble(0, 0, 0, 0, 0, 0, 0, Faults(delay_s=(0.0, 0.03)))
WRITES = Faults(
    cut=0.01, lost=0.005, silent=0.004, late=0.01, reorder=0.3, duplicate=0.1, delay_s=(0.0, 0.03), late_s=(0.1, 3.0)
)
SLOW = replace(WRITES, delay_s=(0.0, 9.0))  # longer than a sender waits: the write ends after it counted as hung
HARD = Trouble(writes=WRITES)


def run(world: World, handoffs: int) -> None:
    """Sends requests in bursts up to a number of handoffs. Then the faults end, and every handoff must end too."""
    steps = 0
    while world.counts["handoffs"] < handoffs:
        steps += 1
        if steps % 40 == 1:
            for decode in world.decodes:
                for _ in range(world.random.randint(0, 12) if decode.alive and len(decode.waiting) < 20 else 0):
                    decode.request()
        if world.trouble.writes is WRITES:
            world.hub.faults = SLOW if steps % 500 > 470 else WRITES
        world.disturb()
        world.step(STEP)
        if steps % 100 == 0:
            world.audit()
            retire(world)
        assert steps < 100_000, "it does not get on"
    world.trouble, world.hub.faults = QUIET, QUIET.writes
    settle(world)


def retire(world: World) -> None:
    """Restarts workers with too many quarantined pages, which do not return otherwise."""
    for decode in world.decodes:
        held = [(decode.memory(request).rows, request.row_pages) for request in decode.quarantined.values()]
        shares: Counter[int] = Counter()
        for pool, pages in held:
            shares[id(pool)] += len(pages)
            if decode.alive and shares[id(pool)] > pool.allocator.capacity // 2:
                world.counts["retired"] += 1
                decode.die()


def settle(world: World) -> None:
    for _ in range(3000):
        world.step(STEP)
    for _ in range(3000):
        world.step(0.1)
    world.audit()


def check_the_end(world: World) -> None:
    for worker in world.workers:
        assert worker.alive and worker.machine.phases() == {} and worker.machine.next_deadline() is None
        worker.note_seconds()
    for decode in world.decodes:
        assert not decode.asked and not decode.waiting and not decode.kept, "stuck"
        check_books(decode)
    for prefill in world.prefills:
        assert not prefill.queue and not prefill.jobs and not prefill.tickets
        assert not prefill.machine._buffers.users, "buffers leaked"
        assert prefill.memory.rows.allocator.held == 0, "source pages leaked"


def check_books(decode: Decode) -> None:
    """Asserts that every page is free or quarantined, and that none has two owners."""
    ring = decode.ring.ring
    assert ring.held == ring.quarantined and not ring.waiting, "room in the ring leaked"
    for memory in decode.memories:
        quarantined = [request for request in decode.quarantined.values() if decode.memory(request) is memory]
        for pool, pages in (
            (memory.rows, [page for request in quarantined for page in request.row_pages]),
            (memory.keys, [page for request in quarantined for page in request.key_pages]),
        ):
            assert len(pages) == len(set(pages)) == pool.allocator.held, "pages leaked"


@pytest.mark.parametrize("handoffs", [700, pytest.param(2000, marks=pytest.mark.slow)])
def test_handoffs_under_faults_lose_nothing(handoffs: int) -> None:
    world = World(seed=6, trouble=HARD)
    run(world, handoffs)
    check_the_end(world)
    counts = world.counts
    assert counts["handoffs"] >= handoffs and counts["landed"] > handoffs / 2
    assert world.longest < 30, f"{world.longest:.0f} s from asking to the end"
    assert counts["staged"] > handoffs / 4 and counts["direct"] > handoffs / 10, counts
    for kind in ("lost", "lost, in doubt", "calm", "deaths", "false alarms", "waits for room", "lost messages"):
        assert counts[kind] >= 5, f"{kind}: {counts[kind]}; the world is too kind to be a test"
    for name, waits in (("Receiver", RECEIVER_TIMEOUTS), ("Sender", SENDER_TIMEOUTS), ("Piece", PIECE_TIMEOUTS)):
        for phase in waits:
            assert world.seconds[f"{name}.{phase.name}"] > 0, f"{name} never was in {phase}"


@pytest.mark.parametrize("seed", range(3))
def test_without_faults_every_handoff_lands(seed: int) -> None:
    world = World(seed, QUIET)
    run(world, 100)
    check_the_end(world)
    assert world.counts["landed"] == world.counts["handoffs"] >= 100


def test_lost_duplicated_and_delayed_messages_cost_no_handoff() -> None:
    """Defect 11: a lost message is retransmitted."""
    world = World(4, replace(QUIET, lose=0.15, duplicate=0.15, delay=0.03))
    run(world, 200)
    check_the_end(world)
    assert world.counts["lost messages"] > 200
    assert world.counts["landed"] == world.counts["handoffs"] >= 200


def test_one_seed_gives_one_run() -> None:
    counts = []
    for _ in range(2):
        world = World(1, HARD)
        run(world, 150)
        counts.append(world.counts)
    assert counts[0] == counts[1]
