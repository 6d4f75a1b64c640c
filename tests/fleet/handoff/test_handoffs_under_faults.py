"""Many handoffs under random faults: no landed byte is wrong, no page leaks, and every handoff ends.

Each file in scripts/sabotage.d describes the defect whose number begins the file's name.
"""

from dataclasses import replace

import pytest
from faulty_world import GROUPS, DecodeWorker, FaultRates, World
from loopback import Faults

from hotset.fleet.handoff import staging
from hotset.fleet.handoff.outgoing import SENDER_TIMEOUTS
from hotset.fleet.handoff.receiver import RECEIVER_TIMEOUTS
from hotset.fleet.handoff.staged_delivery import PIECE_TIMEOUTS

STEP_S = 0.01
NO_FAULTS = FaultRates(
    lose=0,
    duplicate=0,
    delay=0,
    abort=0,
    not_computed=0,
    death=0,
    false_alarm=0,
    writes=Faults(delay_s=(0.0, 0.03)),
)
FAULTY_WRITES = Faults(
    cut=0.01, lost=0.005, silent=0.004, late=0.01, reorder=0.3, duplicate=0.1, delay_s=(0.0, 0.03), late_s=(0.1, 3.0)
)
SLOW_WRITES = replace(FAULTY_WRITES, delay_s=(0.0, 9.0))  # some end after the sender has reported them as hung
ALL_FAULTS = FaultRates(writes=FAULTY_WRITES)


def run(world: World, handoffs: int) -> None:
    """Adds requests in bursts, with faults, until `handoffs` handoffs have begun. Then runs without faults for long
    enough that all handoffs end."""
    steps = 0
    while world.counts["handoffs"] < handoffs:
        steps += 1
        if steps % 40 == 1:
            for decode in world.decodes:
                for _ in range(world.random.randint(0, 12) if decode.alive and len(decode.waiting) < 20 else 0):
                    decode.request()
        if world.rates.writes is FAULTY_WRITES:
            world.hub.faults = SLOW_WRITES if steps % 500 > 470 else FAULTY_WRITES
        world.inject_worker_faults()
        world.step(STEP_S)
        if steps % 100 == 0:
            world.audit()
        assert steps < 100_000, f"only {world.counts['handoffs']} of {handoffs} handoffs began in {steps} steps"
    world.rates, world.hub.faults = NO_FAULTS, NO_FAULTS.writes
    run_until_idle(world)


def run_until_idle(world: World) -> None:
    """Runs until every handoff is closed, at most for 330 seconds of virtual time. This is longer than the scaled
    timeouts of all phases of a sender, or of a receiver, together."""
    for seconds in [2 * STEP_S] * 1500 + [0.3] * 1000:
        if not world.is_idle:
            world.step(seconds)
    world.audit()


def check_idle(world: World) -> None:
    """Asserts that all workers run, that all handoffs are closed, and that nothing has leaked. Records the seconds that
    were spent in each phase."""
    for worker in world.workers:
        assert worker.alive and worker.machine.phases() == {} and worker.machine.next_deadline() == float("inf")
        worker.record_phase_seconds()
    for decode in world.decodes:
        assert not decode.open and not decode.waiting and not decode.landed, "some handoffs have not ended"
        check_pages(decode)
    for prefill in world.prefills:
        assert not prefill.queue and not prefill.jobs and not prefill.lists
        assert not prefill.machine._buffers.users, "buffers leaked"
        assert not prefill.memory.num_held, "source pages leaked"


def check_pages(decode: DecodeWorker) -> None:
    """Asserts that every page is free, that nothing is in quarantine, and that the ring has no lease."""
    ring = decode.ring.ring
    assert ring.held == 0 and not ring.waiting, "space of the ring leaked"
    assert not decode.quarantined and not decode.retired, "quarantine did not end"
    for memory in decode.memories:
        assert not memory.num_held, "pages leaked"


@pytest.fixture(params=[GROUPS, 0], ids=["with index keys", "packed"])
def groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns the index groups of the model. Rows of a model without index keys are packed for direct writes if the
    slices of a rank are small writes, but its pages are not."""
    if not request.param:
        monkeypatch.setattr(staging, "SMALL_WRITE_BYTES", 32)
    number: int = request.param
    return number


@pytest.mark.parametrize("handoffs", [600, pytest.param(2000, marks=pytest.mark.slow)])
def test_handoffs_under_faults_land_correctly_or_fail_and_nothing_leaks(handoffs: int, groups: int) -> None:
    world = World(seed=2, rates=ALL_FAULTS, groups=groups)
    run(world, handoffs)
    check_idle(world)
    counts = world.counts
    assert counts["handoffs"] >= handoffs and counts["landed"] > handoffs / 2
    assert world.longest_s < 30, f"a handoff took {world.longest_s:.0f} s"
    assert counts["staged"] > handoffs / 10 and counts["not staged"] > handoffs / 10, counts
    assert counts["landed after a prefix"] > handoffs / 20, counts
    assert groups or counts["packed"] > counts["pieces"] + handoffs / 10, counts
    for fault in (
        "failed",
        "failed, not quiesced",
        "quiesced later",
        "cut off",
        "deaths",
        "false alarms",
        "waits for pages",
        "lost messages",
    ):
        assert counts[fault] >= 3, f"{fault}: only {counts[fault]}; the run does not test this case"
    for name, timeouts in (("Receiver", RECEIVER_TIMEOUTS), ("Sender", SENDER_TIMEOUTS), ("Piece", PIECE_TIMEOUTS)):
        for phase in timeouts:
            assert world.phase_seconds[f"{name}.{phase.name}"] > 0, f"no {name} was ever in {phase}"


def test_every_handoff_lands_although_messages_are_lost_duplicated_and_delayed(groups: int) -> None:
    """Defect 11: a lost message is retransmitted."""
    world = World(4, replace(NO_FAULTS, lose=0.15, duplicate=0.15, delay=0.03), groups=groups)
    run(world, 120)
    check_idle(world)
    assert world.counts["lost messages"] > 120
    assert world.counts["landed"] == world.counts["handoffs"] >= 120


def test_the_same_seed_gives_the_same_run() -> None:
    counts = []
    for _ in range(2):
        world = World(1, ALL_FAULTS)
        run(world, 50)
        counts.append(world.counts)
    assert counts[0] == counts[1]
