"""Handoffs between engines with different parallelism: tokens equal those of one process, and no byte changes
on the way."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import pytest
from engine.handoff_pair import Pair, simulated_routes
from engine.threaded import split_engine
from harness import run_all, whole_engine
from loopback import Hub, Loopback
from models.split_workers import SPECS

from hotset.base.sampling import SamplingParams
from hotset.engine.core import Engine
from hotset.fleet.connections import FleetConnections
from hotset.fleet.handoff import staging
from hotset.fleet.transfer.api import MemoryKind, Transfer
from hotset.fleet.transfer.engines import TransferSettings
from hotset.models.attention.gqa_spec import GqaSpec

HOST, DEVICE = MemoryKind.HOST, MemoryKind.DEVICE
SEED = 5
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=8, ignore_eos=True)
LENGTHS = (1, 16, 17, 31, 48)  # prompt lengths at and near the boundaries of pages and chunks
COMMON = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "device_kv_tokens": 256, "host_kv_tokens": 768}
PARALLELISM = {
    "TP1": {},
    "TP2": {"tensor_parallel_size": 2},
    "TP4": {"tensor_parallel_size": 4},
    "PP2": {"pipeline_parallel_size": 2},
    "PP3": {"pipeline_parallel_size": 3},
    "DP4": {"data_parallel_size": 4},
}
# Parallelism of the prefill worker and of the decode worker, and how rows travel.
CROSSINGS = [
    ("llama with biases", "TP4", "TP2", "loopback"),
    ("llama", "TP1", "TP2", "nixl"),
    ("deepseek_v32", "TP4", "DP4", "loopback"),
    ("glm_moe_dsa", "TP2", "PP2", "loopback"),
    *(
        pytest.param(*crossing, marks=pytest.mark.slow)
        for crossing in (
            ("llama", "PP2", "TP1", "loopback"),
            ("llama with biases", "TP2", "TP4", "nixl"),
            ("deepseek_v32", "TP1", "PP2", "nixl"),
            ("deepseek_v32", "TP2", "TP1", "nixl"),
            ("glm_moe_dsa", "PP3", "PP2", "loopback"),
        )
    ),
]


def prompts() -> list[list[int]]:
    return [[(7 * position * position + 3 * length) % 61 for position in range(length)] for length in LENGTHS]


@lru_cache
def answers_of_one_process(model: str) -> list[list[int]]:
    spec = SPECS[model]
    engine = whole_engine(spec, SEED, page_rows=16, device_kv_tokens=2000)
    return [answer.token_ids for answer in run_all(engine, prompts(), [PARAMS] * len(LENGTHS))]


def engine_of(model: str, parallelism: str, role: str, opener: Callable[[], Transfer], **settings: Any) -> Engine:
    spec = SPECS[model]
    settings = {"page_rows": 16, **COMMON, **PARALLELISM[parallelism], "role": role, **settings}
    if isinstance(spec.attention, GqaSpec):
        settings["staging_mib"] = 1
    if parallelism != "TP1":
        return split_engine(spec, SEED, opener, **settings)
    connections = FleetConnections(lambda _settings: opener())
    return whole_engine(spec, SEED, connections=lambda: connections, weights=f"random {SEED}", **settings)


@contextmanager
def pair(
    model: str,
    sender: str,
    receiver: str,
    transfer_name: str,
    *further_senders: str,
    nodes: int = 0,
    hub: Hub | None = None,
    **settings: Any,
) -> Iterator[Pair]:
    """Yields prefill workers (parallelism `sender` and `further_senders`) and a decode worker (`receiver`). `settings`
    apply to the decode worker. `nodes` is the argument of `split_engine`."""
    hub = hub or Hub(threaded=True)

    def transfer() -> Transfer:
        return Loopback(hub) if transfer_name == "loopback" else TransferSettings("nixl").open()

    with ExitStack() as stack:
        prefill = engine_of(model, sender, "prefill", transfer, **({"nodes": nodes} if nodes else {}))
        stack.callback(prefill.close)
        settings |= {"nodes": nodes} if nodes else {}
        decode = engine_of(model, receiver, "decode", transfer, page_rows=8, **settings)
        stack.callback(decode.close)
        further_prefills = [engine_of(model, sender, "prefill", transfer) for sender in further_senders]
        workers = Pair(prefill, decode, *further_prefills)
        stack.callback(workers.close)
        yield workers


@pytest.mark.parametrize(("model", "sender", "receiver", "transfer_name"), CROSSINGS)
def test_answers_do_not_depend_on_parallelism(model: str, sender: str, receiver: str, transfer_name: str) -> None:
    with pair(model, sender, receiver, transfer_name) as workers:
        assert workers.answers(prompts(), PARAMS, "auto") == answers_of_one_process(model)
        assert workers.comparer.num_compared == len(LENGTHS)
        landings = {request.landing.split()[0] for request in workers.comparer.requests.values()}
        assert ("device" in landings) == ("PP" not in receiver), f"the contexts landed on {landings}"
        stats = workers.decode.stats()
    assert (stats.landed, stats.lost, stats.quarantined_pages) == (len(LENGTHS), 0, 0)


def test_rows_that_are_packed_in_the_order_of_pages_give_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SMALL_WRITE_BYTES", 512)  # pages of these tiny models then count as large writes
    monkeypatch.setattr(staging, "EXPENSIVE_WRITE_SECONDS", 1.0)  # also if this machine is busy while it is measured
    with pair("llama", "TP2", "TP4", "nixl") as workers:
        assert workers.answers(prompts(), PARAMS, "auto") == answers_of_one_process("llama")
        assert workers.comparer.num_compared == len(LENGTHS)
        sent, received = workers.prefill.stats().handoff, workers.decode.stats().handoff
        assert sent.num_pieces > 0 and received.num_pieces == 0, "no rows were packed, or some were unpacked"
        stats = workers.decode.stats()
    assert (stats.landed, stats.lost, stats.quarantined_pages) == (len(LENGTHS), 0, 0)


@pytest.mark.parametrize(
    ("model", "sender", "receiver"),
    [
        ("glm_moe_dsa", "TP4", "PP2"),
        ("deepseek_v32", "PP2", "TP4"),
        pytest.param("deepseek_v32", "TP2", "DP4", marks=pytest.mark.slow),
    ],
)
def test_contexts_land_in_every_copy_on_all_nodes(model: str, sender: str, receiver: str) -> None:
    """The comparer requires that all shards with the same rows have the same bytes."""
    with pair(model, sender, receiver, "loopback", nodes=2) as workers:
        copies = 2 if sender in ("TP2", "TP4") else 1
        assert len(workers.comparer.source.shards) == copies, "each node of a stage has a copy of the rows"
        assert workers.answers(prompts(), PARAMS, "host") == answers_of_one_process(model)
        assert workers.comparer.num_compared == len(LENGTHS)
        assert all(request.landing.startswith("host") for request in workers.comparer.requests.values())
        stats = workers.decode.stats()
    assert (stats.landed, stats.lost, stats.quarantined_pages) == (len(LENGTHS), 0, 0)


def test_a_decode_engine_receives_from_prefill_engines_with_different_tensor_parallel_sizes() -> None:
    with pair("llama", "TP1", "TP2", "loopback", "TP4") as workers:
        assert workers.answers(prompts(), PARAMS, "auto") == answers_of_one_process("llama")
        (further_comparer,) = workers.further_comparers
        assert (workers.comparer.num_compared, further_comparer.num_compared) == (3, 2)


@pytest.mark.parametrize(
    ("model", "sender", "receiver"),
    [("llama", "TP2", "TP4"), pytest.param("deepseek_v32", "TP4", "DP4", marks=pytest.mark.slow)],
)
def test_contexts_in_memory_of_gpus_are_packed_there_and_land_there(
    simulated_gpu: None, monkeypatch: pytest.MonkeyPatch, model: str, sender: str, receiver: str
) -> None:
    """Each rank packs its rows in its own memory, and each rank of the decode worker unpacks its own rows. The first
    contexts land on the host, because no route is measured yet."""
    speeds = {(HOST, HOST): 1e9, (HOST, DEVICE): 0.05e9, (DEVICE, HOST): 0.05e9, (DEVICE, DEVICE): 20e9}
    hub = simulated_routes(monkeypatch, speeds)
    with pair(model, sender, receiver, "loopback", hub=hub) as workers:
        assert workers.answers(prompts(), PARAMS, "auto", salt="host") == answers_of_one_process(model)
        hub.route_bytes.clear()
        num_pieces = workers.prefill.stats().handoff.num_pieces
        assert workers.answers(prompts(), PARAMS, "auto", salt="device") == answers_of_one_process(model)
        assert {*hub.route_bytes} == {(DEVICE, DEVICE)}
        assert workers.comparer.num_compared == 2 * len(LENGTHS)
        if model == "llama":
            assert workers.prefill.stats().handoff.num_pieces >= num_pieces + len(LENGTHS) - 2, "nothing was staged"
