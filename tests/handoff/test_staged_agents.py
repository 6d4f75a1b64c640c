"""Tests of staged contexts between agents: in one process over loopback, between processes over NIXL and Mooncake."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest
from handoff_engines import DecodeEngine, Memory, PrefillEngine, wait_until
from handoff_world import open_world, prompt

from hotset.handoff.channel import Channel
from hotset.handoff.messages import Landed
from hotset.handoff.packing import StagingMemory
from hotset.handoff.timers import PeerTiming
from hotset.transfer.engines import open_transfer

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


def test_prefill_workers_with_different_shardings_serve_one_decode_worker() -> None:
    with open_world() as world:
        decode = world.decode(ranks=2, staging=StagingMemory(RING_BYTES))
        prefills = [world.prefill(ranks=ranks, staging=StagingMemory(RING_BYTES)) for ranks in (1, 2, 4)]
        keys = [decode.fetch(prefill.address, prompt(120, seed), f"r{seed}") for seed, prefill in enumerate(prefills)]
        for key in keys:
            assert isinstance(decode.wait_for_outcome(key), Landed)
        assert wait_until(world.is_idle)
        world.audit()


def serve(engine: str, ranks: int, pipe: Connection) -> None:
    """Runs a prefill worker in its own process until the test requests the number of written bytes."""
    memory, staging = Memory(64, 16, ranks=ranks), StagingMemory(RING_BYTES)
    worker = PrefillEngine(
        memory, Channel("127.0.0.1:0"), lambda: open_transfer(engine), staging=staging, scale=1.0, timing=PeerTiming()
    )
    pipe.send(worker.address)
    pipe.recv()
    pipe.send(worker.transfer.throughput().nbytes)
    worker.close()


@contextmanager
def prefill_process(engine: str, ranks: int) -> Iterator[tuple[str, Connection]]:
    """Runs a prefill worker in its own process. Yields the worker's control address and the test's end of the pipe."""
    pipe, worker_pipe = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(engine, ranks, worker_pipe), daemon=True)
    process.start()
    try:
        assert pipe.poll(60), "the prefill process did not start within 60 s"
        yield pipe.recv(), pipe
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("engine", ["nixl", pytest.param("mooncake", marks=pytest.mark.slow)])
def test_staged_contexts_land_between_processes_over_nixl_and_mooncake(engine: str) -> None:
    decode = DecodeEngine(
        Memory(64, 8, ranks=4),
        Channel("127.0.0.1:0"),
        lambda: open_transfer(engine),
        staging=StagingMemory(RING_BYTES),
        scale=1.0,
        timing=PeerTiming(),
    )
    try:
        with prefill_process(engine, 2) as (address, pipe):
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
