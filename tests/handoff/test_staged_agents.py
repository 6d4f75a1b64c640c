"""Staged contexts between agents: over real sockets, and between processes over real transfer engines."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest
from handoff_engines import DecodeEngine, Memory, PrefillEngine, until
from handoff_world import prompt, worlds

from hotset.handoff.channel import Channel
from hotset.handoff.messages import Landed
from hotset.handoff.packing import StagingMemory
from hotset.handoff.timers import PeerTiming
from hotset.transfer.engines import open_transfer

RING = 1 << 13  # about 70 rows


@pytest.mark.parametrize(("here", "there"), [(2, 4), (4, 1)])
def test_rows_of_other_shardings_land_through_the_ring(here: int, there: int) -> None:
    with worlds() as world:
        target = world.decode(ranks=there, staging=StagingMemory(RING))
        source = world.prefill(ranks=here, staging=StagingMemory(RING), event_s=0.02)
        keys = [target.fetch(source.address, prompt(150, seed), f"r{seed}") for seed in range(3)]
        for key in keys:
            assert isinstance(target.ended(key), Landed)
        assert until(world.settled)
        world.audit()
        assert target.ring is not None and target.ring.ring.held == 0
        landed, written = target.agent.stats(), source.agent.stats()
        assert landed.num_pieces == written.num_pieces >= 6 and landed.ring_quarantined_bytes == 0


def test_prefill_workers_with_different_sharding_serve_one_decode_worker() -> None:
    with worlds() as world:
        target = world.decode(ranks=2, staging=StagingMemory(RING))
        sources = [world.prefill(ranks=ranks, staging=StagingMemory(RING)) for ranks in (1, 2, 4)]
        keys = [target.fetch(source.address, prompt(120, at), f"r{at}") for at, source in enumerate(sources)]
        for key in keys:
            assert isinstance(target.ended(key), Landed)
        assert until(world.settled)
        world.audit()


def serve(engine: str, ranks: int, pipe: Connection) -> None:
    """Runs a prefill worker in its own process until the test requests the number of written bytes."""
    memory, staging = Memory(64, 16, ranks=ranks), StagingMemory(RING)
    worker = PrefillEngine(
        memory, Channel("127.0.0.1:0"), open_transfer(engine), staging=staging, scale=1.0, timing=PeerTiming()
    )
    pipe.send(worker.address)
    pipe.recv()
    pipe.send(worker.transfer.throughput().nbytes)
    worker.close()


@contextmanager
def prefill_process(engine: str, ranks: int) -> Iterator[tuple[str, Connection]]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(engine, ranks, theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(60), "the other process did not begin"
        yield ours.recv(), ours
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("engine", ["nixl", pytest.param("mooncake", marks=pytest.mark.slow)])
def test_between_processes_over_real_engines(engine: str) -> None:
    target = DecodeEngine(
        Memory(64, 8, ranks=4),
        Channel("127.0.0.1:0"),
        open_transfer(engine),
        staging=StagingMemory(RING),
        scale=1.0,
        timing=PeerTiming(),
    )
    try:
        with prefill_process(engine, 2) as (address, pipe):
            keys = [target.fetch(address, prompt(160, seed), f"r{seed}") for seed in range(3)]
            for key in keys:
                assert isinstance(target.ended(key, 60.0), Landed)
            assert target.agent.stats().num_pieces >= 6
            target.audit()
            pipe.send(None)
            assert pipe.poll(10) and pipe.recv() == 3 * 160 * (2 * 48 + 16)
    finally:
        target.close()
    assert target.died is None
