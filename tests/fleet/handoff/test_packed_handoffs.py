"""Tests of contexts that are packed in the order of the receiver's pages: both state machines, with real bytes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from staged_world import DECODE, Event, World

from hotset.fleet.handoff import staging
from hotset.fleet.handoff.deliveries import MAX_LISTS_IN_FLIGHT
from hotset.fleet.handoff.messages import FetchFailed, LeaseRequest, PieceWritten
from hotset.fleet.handoff.outgoing import SenderPhase
from hotset.fleet.transfer.api import WriteState
from hotset.schedule.handoffs import HandoffKey

PREFILL = "prefill:1"
SPLITS = [(1, 2), (1, 4), (2, 4), (1, 8), (2, 8)]  # each decode rank gets whole rows from one prefill rank


@pytest.fixture(autouse=True)
def _small_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of a row has 7 bytes here, and a page of a rank at least 112."""
    monkeypatch.setattr(staging, "SMALL_WRITE_BYTES", 32)


def start(world: World, rows: int = 50, name: str = "r", first: int = 0) -> HandoffKey:
    key = world.fetch(rows, name, first=first)
    world.deliver_messages()
    assert world.prefills[PREFILL].sender.phases()[DECODE, key] is SenderPhase.WRITING
    return key


def was_staged(world: World) -> bool:
    return any(isinstance(message, LeaseRequest | PieceWritten) for _, _, message in world.sent)


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), SPLITS)
def test_packed_rows_are_written_to_the_pages_without_leases(prefill_ranks: int, decode_ranks: int) -> None:
    world = World(ranks=decode_ranks, prefills=(prefill_ranks,), groups=0)
    key, buffers = start(world), world.prefills[PREFILL].staging.memory_range
    for last in (13, 14, 40, None):
        world.compute(key, last)
    while world.writes:
        assert len(world.writes) <= MAX_LISTS_IN_FLIGHT
        for local, remote, nbytes in world.writes[0].action.writes.tolist():
            assert buffers.address <= local and local + nbytes <= buffers.address + buffers.nbytes
            assert world.memory.contains(remote, nbytes)
        world.end_write()
    world.finish()
    world.check_landed(key)
    world.check_idle()
    assert not was_staged(world)
    pages = 7  # of 8 rows each
    assert world.num_written <= (pages + 8) * 3 * decode_ranks, "at most one write per page, layer and rank, and list"


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(4, 2), (8, 2), (4, 1)])
def test_ranks_that_get_parts_of_rows_from_several_others_are_staged(prefill_ranks: int, decode_ranks: int) -> None:
    world = World(ranks=decode_ranks, prefills=(prefill_ranks,), groups=0)
    key = start(world)
    world.compute(key)
    world.finish()
    world.check_landed(key)
    assert was_staged(world)


def test_contexts_with_index_keys_are_staged() -> None:
    world = World()
    key = start(world)
    world.compute(key)
    world.finish()
    world.check_landed(key)
    assert was_staged(world)


@pytest.mark.parametrize("first", [8, 24, 48])
def test_only_rows_that_the_receiver_lacks_are_written(first: int) -> None:
    world = World(groups=0)
    key = world.fetch(60, first=first)
    world.deliver_messages()
    before = world.memory.memory.copy()
    for last in (5, 13, 29, None):
        world.compute(key, last)
    world.finish()
    world.check_landed(key)
    world.check_idle()
    world.check_unlisted_pages(key, before)


def test_rows_are_packed_when_they_are_computed_and_do_not_wait_for_later_ones() -> None:
    world = World(groups=0)
    key, events = start(world, 36), [Event(happened=False) for _ in range(3)]
    for number, event in enumerate(events, 1):
        world.compute(key, 12 * number, event)
    sender = world.prefills[PREFILL].sender
    assert not world.writes and sender.has_pending_events
    for number, event in enumerate(events, 1):
        event.happened = True
        world.poll_events()
        assert [(write.action.pack.first, write.action.pack.last) for write in world.writes if write.action.pack] == [
            (12 * number - 12, 12 * number)
        ]
        world.end_write()
    assert not sender.has_pending_events
    world.finish()
    world.check_landed(key)
    world.check_idle()


@pytest.mark.parametrize("state", [WriteState.FAILED_UNKNOWN, WriteState.FAILED_QUIESCED])
def test_after_a_failed_write_the_pages_are_quarantined_if_it_may_still_write(state: WriteState) -> None:
    world = World(groups=0)
    key = start(world)
    world.compute(key)
    while world.writes:
        world.end_write(state)
    world.pass_time(6.0)  # the receiver first tries to stop the sender
    (failed,) = world.events[key]
    assert isinstance(failed, FetchFailed) and failed.retry
    assert failed.quiesced == (state is WriteState.FAILED_QUIESCED)
    assert not world.prefills[PREFILL].sender._buffers.users


@settings(max_examples=60, deadline=None)
@given(data=st.data(), split=st.sampled_from(SPLITS))
def test_contexts_land_in_any_order_of_events(data: st.DataObject, split: tuple[int, int]) -> None:
    """Several contexts share four buffers. Rows are computed, writes end and contexts are cancelled in random order."""
    world = World(ranks=split[1], prefills=(split[0],), groups=0)
    keys = [
        world.fetch(data.draw(st.integers(20, 90)), name, first=data.draw(st.sampled_from([0, 8]))) for name in "abc"
    ]
    world.deliver_messages()
    events: list[Event] = []
    cancelled = set[HandoffKey]()
    for _ in range(data.draw(st.integers(1, 40))):
        key = data.draw(st.sampled_from(keys))
        match data.draw(st.sampled_from(["compute", "happen", "write", "messages", "cancel"])):
            case "compute" if key not in cancelled:
                announced, total = world.prefills[PREFILL].contexts[key].num_announced, len(world.requests[key].prompt)
                events.append(Event(happened=data.draw(st.booleans())))
                world.compute(key, min(total, announced + data.draw(st.integers(1, 30))), events[-1])
            case "happen" if events:
                events.pop(0).happened = True
                world.poll_events()
            case "write" if world.writes:
                world.end_write(number=data.draw(st.integers(0, len(world.writes) - 1)))
            case "cancel" if data.draw(st.integers(0, 5)) == 0:
                cancelled.add(key)
                world.receiver.cancel(key, world.now)
                world.run_actions()
            case _:
                world.deliver_messages()
    for event in events:
        event.happened = True
    world.poll_events()
    for key in keys:
        if key not in cancelled:
            world.compute(key)
    world.finish()
    for key in keys:
        if key not in cancelled:
            world.check_landed(key)
    world.pass_time(100.0)
    world.check_idle()
    assert not was_staged(world)
