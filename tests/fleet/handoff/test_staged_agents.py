"""Tests of staged contexts between agents: in one process over loopback, between processes over NIXL and Mooncake."""

import threading
import time
from multiprocessing.connection import Connection

import pytest
from handoff_engines import DecodeEngine, PrefillEngine, make_memory
from handoff_world import open_world, prefill_process, prompt
from waiting import wait_until

from hotset.fleet.handoff import packing
from hotset.fleet.handoff.channel import Channel
from hotset.fleet.handoff.messages import FetchFailed, Landed, PackedPiece
from hotset.fleet.handoff.packing import StagingMemory
from hotset.fleet.handoff.timers import PeerTiming
from hotset.fleet.transfer.engines import TransferSettings

RING_BYTES = 1 << 13  # about 70 rows


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(2, 4), (4, 1)])
def test_rows_with_another_sharding_land_through_the_ring(prefill_ranks: int, decode_ranks: int) -> None:
    with open_world() as world:
        decode = world.decode(ranks=decode_ranks, staging=StagingMemory(RING_BYTES))
        prefill = world.prefill(ranks=prefill_ranks, staging=StagingMemory(RING_BYTES), event_s=0.02)
        keys = [decode.fetch(prefill.address, prompt(150, seed), f"r{seed}") for seed in range(3)]
        for key in keys:
            assert isinstance(decode.wait_for_outcome(key), Landed)
        assert wait_until(world.is_idle)
        world.audit()
        assert decode.ring is not None and decode.ring.ring.held == 0
        landed, written = decode.agent.stats(), prefill.agent.stats()
        assert landed.num_pieces == written.num_pieces >= 6 and landed.ring_quarantined_bytes == 0


class PausedCopies:
    """Makes every copy in one direction, 'pack' or 'unpack', wait for the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
        self.began, self.may_end, self.ended = threading.Event(), threading.Event(), threading.Event()
        self._copy = getattr(packing, direction)
        monkeypatch.setattr(packing, direction, self._paused)

    def _paused(self, piece: PackedPiece) -> None:
        self.began.set()
        assert self.may_end.wait(60)
        self._copy(piece)
        self.ended.set()


@pytest.mark.parametrize("direction", ["pack", "unpack"])
def test_a_worker_that_closes_waits_for_a_copy_in_progress(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    """The memory may be released as soon as the agent is closed."""
    copies = PausedCopies(monkeypatch, direction)
    with open_world() as world:
        decode = world.decode(ranks=4, staging=StagingMemory(RING_BYTES))
        prefill = world.prefill(ranks=2, staging=StagingMemory(RING_BYTES))
        decode.fetch(prefill.address, prompt(60), "r")
        assert copies.began.wait(60)
        engine = prefill if direction == "pack" else decode
        engine._closing, agent = True, engine.agent  # its thread may still put commands when the agent is closed
        closing = threading.Thread(target=agent.close, args=(0.0,))
        closing.start()
        assert wait_until(lambda: agent._ended)
        closing.join(0.2)
        assert closing.is_alive(), "the agent is closed, but a piece is still being copied"
        copies.may_end.set()
        closing.join(60)
        assert copies.ended.is_set() and not closing.is_alive()


def test_a_piece_that_is_packed_when_its_peer_is_lost_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer may have a new endpoint by then, and other requests may use its pages."""
    copies = PausedCopies(monkeypatch, "pack")
    with open_world() as world:
        decode = world.decode(ranks=4, staging=StagingMemory(RING_BYTES))
        prefill = world.prefill(ranks=2, staging=StagingMemory(RING_BYTES))
        key = decode.fetch(prefill.address, prompt(60), "r")
        assert copies.began.wait(60)
        submitted: list[str] = []
        with prefill.agent._lock:
            prefill.agent._on_peer_lost(decode.address, "lost", time.monotonic())
            monkeypatch.setattr(prefill.transfer, "submit", lambda peer, *_: submitted.append(peer))
        copies.may_end.set()
        assert isinstance(decode.wait_for_outcome(key), FetchFailed)
        assert wait_until(lambda: world.is_idle() and not prefill.agent._copies)
        world.audit()
        assert submitted == []


def test_a_cancelled_handoff_fails_only_after_the_copy_of_its_piece_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may use the pages again when it receives FetchFailed. Other handoffs do not wait for the copy."""
    copies = PausedCopies(monkeypatch, "unpack")
    with open_world() as world:
        decode = world.decode(ranks=4, staging=StagingMemory(RING_BYTES))
        prefill, equal = world.prefill(ranks=2, staging=StagingMemory(RING_BYTES)), world.prefill(ranks=4)
        key = decode.fetch(prefill.address, prompt(60, 1), "cancelled")
        assert copies.began.wait(60)
        decode.cancel(key)
        direct = decode.fetch(equal.address, prompt(60, 2), "direct")
        assert isinstance(decode.wait_for_outcome(direct), Landed)
        assert wait_until(lambda: decode.in_phases()), "the handoff itself has ended"
        assert decode.events[key] == [], "the pages were given back while a piece was copied to them"
        copies.may_end.set()
        assert isinstance(decode.wait_for_outcome(key), FetchFailed)
        assert wait_until(world.is_idle)
        world.audit()


def serve(pipe: Connection, engine: str) -> None:
    """Runs a prefill worker in its own process until the test requests the number of written bytes."""
    memory, staging = make_memory(64, 16, ranks=2), StagingMemory(RING_BYTES)
    worker = PrefillEngine(
        memory, Channel("127.0.0.1:0"), TransferSettings(engine).open, staging=staging, scale=1.0, timing=PeerTiming()
    )
    pipe.send(worker.address)
    pipe.recv()
    pipe.send(worker.transfer.throughput().nbytes)
    worker.close()


@pytest.mark.parametrize("engine", ["nixl", pytest.param("mooncake", marks=pytest.mark.slow)])
def test_staged_contexts_land_between_processes_over_nixl_and_mooncake(engine: str) -> None:
    decode = DecodeEngine(
        make_memory(64, 8, ranks=4),
        Channel("127.0.0.1:0"),
        TransferSettings(engine).open,
        staging=StagingMemory(RING_BYTES),
        scale=1.0,
        timing=PeerTiming(),
    )
    try:
        with prefill_process(serve, engine) as (address, pipe, _):
            keys = [decode.fetch(address, prompt(160, seed), f"r{seed}") for seed in range(3)]
            for key in keys:
                assert isinstance(decode.wait_for_outcome(key, 60.0), Landed)
            assert decode.agent.stats().num_pieces >= 6
            decode.audit()
            pipe.send(None)
            assert pipe.poll(10) and pipe.recv() == 3 * 160 * (2 * 48 + 16)
    finally:
        decode.close()
    assert decode.failure is None
