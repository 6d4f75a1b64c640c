"""Prefill workers and a decode worker in one process, and the models that the handoff tests use.

Every context that lands is compared byte by byte with its source in the prefill worker.
"""

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from engine.test_invariance import MODELS
from harness import DSA_SIZES, RandomWeights, make_engine, run_all
from loopback import Hub, Loopback

from hotset.base.paged_span import PagedSpan
from hotset.base.request_options import LandingChoice, RequestOptions, TiersChoice
from hotset.base.sampling import SamplingParams
from hotset.engine.core import Engine
from hotset.engine.input_processor import InputProcessor
from hotset.engine.workers.processes import MultiprocessExecutor
from hotset.fleet.connections import FleetConnections
from hotset.fleet.handoff import prefill_agent
from hotset.fleet.handoff.endpoints import DecodeEndpoint, PrefillEndpoint
from hotset.fleet.handoff.layout import landing_pages
from hotset.fleet.handoff.messages import Fetch, HandoffRequest, Landed, ReleasePages, Route, Store
from hotset.fleet.handoff.stores import host_store_name
from hotset.fleet.transfer.api import MemoryKind
from hotset.fleet.transfer.engines import TransferSettings
from hotset.fleet.transfer.workers import process_and_address
from hotset.models.decoder import Decoder
from hotset.models.families import read_spec
from hotset.models.spec import KvStorage, MtpSpec
from hotset.schedule.handoffs import HandoffKey, RowsComputed

DEADLINE_S = 200.0
Speeds = dict[tuple[MemoryKind, MemoryKind], float]  # bytes per second between kinds of memory
DSA_CONFIG = DSA_SIZES | {
    "vocab_size": 96,
    "num_hidden_layers": 3,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "first_k_dense_replace": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"model_type": "deepseek_v32"},
    "fp8": {"model_type": "deepseek_v32"},  # with fp8 rows and index keys
    "glm_moe_dsa": {
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 4,
        "indexer_types": ["full", "full", "shared", "full"],
    },
}
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)


def simulated_routes(monkeypatch: pytest.MonkeyPatch, speeds: Speeds) -> Hub:
    """Returns a hub with these speeds. Prefill workers report exactly these speeds: measured speeds vary on a busy
    machine."""
    routes = tuple(Route(source.value, target.value, speed / 1e9, 1e-6) for (source, target), speed in speeds.items())
    monkeypatch.setattr(prefill_agent, "measure_routes", lambda *_: routes)
    hub = Hub(threaded=True)
    hub.speeds = speeds
    return hub


@lru_cache
def decoder_of(model: str) -> Decoder:
    """Returns the decoder of a model with random weights: one of test_invariance.py, "mtp", or one of CONFIGS.

    All decoders compute in float64, where rounding is too small to make tokens depend on how steps are batched.
    """
    if model in MODELS:
        return Decoder(replace(MODELS[model][0], context=256), RandomWeights(torch.float64, seed=5))
    if model == "mtp":
        spec = replace(MODELS["dsa"][0], context=256, mtp=MtpSpec(carries_normed=False, shares_selection=False))
        return Decoder(spec, RandomWeights(torch.float64, seed=5))
    spec = read_spec({**DSA_CONFIG, **CONFIGS[model]}, {}, "config.json")
    fp8 = model == "fp8"
    return Decoder(spec, RandomWeights(torch.float64, seed=7), KvStorage(fp8_rows=fp8, fp8_keys=fp8))


@dataclass(frozen=True)
class Prompts:
    """Random prompts of these lengths."""

    lengths: tuple[int, ...]

    def token_ids(self, decoder: Decoder) -> list[list[int]]:
        generator = torch.Generator().manual_seed(3)
        return [torch.randint(decoder.spec.vocab, (length,), generator=generator).tolist() for length in self.lengths]


def make(decoder: Decoder, hub: Hub | None = None, **settings: Any) -> Engine:
    opener = TransferSettings.open if hub is None else lambda _settings: Loopback(hub)
    return make_engine(
        decoder, decoder.spec, connections=lambda: FleetConnections(opener), **{"max_num_seqs": 4, **settings}
    )


@lru_cache
def answers_alone(model: str, prompts: Prompts, params: SamplingParams, **settings: Any) -> list[list[int]]:
    """Returns the answers of a single engine that has room for all requests."""
    decoder = decoder_of(model)
    engine = make(decoder, **settings)
    token_ids = prompts.token_ids(decoder)
    return [answer.token_ids for answer in run_all(engine, token_ids, [params] * len(token_ids))]


class ContextComparer:
    """Compares the rows of every landed context with their source in one prefill worker, byte by byte. Contexts that
    another prefill worker computed are skipped.

    The comparer intercepts commands to both agents, and their events. It withholds each `ReleasePages` event of the
    prefill worker until the context has been compared.
    """

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        assert isinstance(prefill._endpoint, PrefillEndpoint) and isinstance(decode._endpoint, DecodeEndpoint)
        self.source = prefill._endpoint._agent._hello.stores["host"]
        self.targets = decode._endpoint._agent._hello.stores
        executor = decode.executor
        self._in_other_processes = isinstance(executor, MultiprocessExecutor) and any(
            worker.process.pid != os.getpid() for worker in executor.workers
        )
        self.requests: dict[HandoffKey, HandoffRequest] = {}
        self.source_pages: dict[HandoffKey, tuple[int, ...]] = {}  # pages in the prefill worker's host store
        self.released: list[ReleasePages] = []
        self.withheld: list[ReleasePages] = []
        self._landed: set[HandoffKey] = set()
        self.compared: dict[HandoffKey, int] = {}  # landed contexts, with the number of rows that were sent
        sender, receiver = prefill._endpoint._agent, decode._endpoint._agent
        self._take_sender_events, self._take_receiver_events = sender.take_events, receiver.take_events
        self._put_of_sender, self._put_of_receiver = sender.put, receiver.put
        sender.take_events, sender.put = self.sender_events, self.put_to_sender  # type: ignore[method-assign]
        receiver.take_events, receiver.put = self.receiver_events, self.put_to_receiver  # type: ignore[method-assign]

    def put_to_sender(self, command: Any) -> None:
        if isinstance(command, RowsComputed):
            self.source_pages[command.key] = command.pages
        self._put_of_sender(command)

    def put_to_receiver(self, command: Any) -> None:
        if isinstance(command, Fetch):
            self.requests[command.request.key] = command.request
        self._put_of_receiver(command)

    def sender_events(self) -> list[Any]:
        events = list(self._take_sender_events())
        releases = [event for event in events if isinstance(event, ReleasePages)]
        self.released += releases
        self.withheld += releases
        passed_on = [event for event in self.withheld if event.key in self._landed]
        self.withheld = [event for event in self.withheld if event not in passed_on]
        return [event for event in events if not isinstance(event, ReleasePages)] + passed_on

    def receiver_events(self) -> list[Any]:
        events = list(self._take_receiver_events())
        for event in events:
            if isinstance(event, Landed):
                self.compare(event.key)
        return events

    def compare(self, key: HandoffKey) -> None:
        self._landed.add(key)
        request, pages = self.requests[key], self.source_pages.get(key)
        target = self.targets[request.landing]
        spans = [*(shard.span for shard in target.shards), *target.all_keys]
        if pages is None or (
            self._in_other_processes and any(process_and_address(span.bases[0][0])[0] for span in spans)
        ):
            return  # another prefill worker computed this context, or it landed in the memory of a worker process
        rows, landed = range(request.first, len(request.prompt)), landing_pages(request, target)
        assert rows_of(self.source, pages, rows) == rows_of(target, landed.rows, rows), "rows differ"
        for keys in target.all_keys:
            assert self.source.keys is not None
            assert bytes_of(self.source.keys, pages, rows) == bytes_of(keys, landed.keys, rows), "index keys differ"
        self.compared[key] = len(rows)

    @property
    def num_compared(self) -> int:
        return len(self.compared)


class CachedBytes:
    """The bytes of every page in the prefix cache of an engine. They must not change until the page is evicted."""

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine._endpoint, PrefillEndpoint | DecodeEndpoint)
        self._engine, self._stores = engine, engine._endpoint._agent._hello.stores
        self._seen: dict[tuple[int, bytes], tuple[int, bytes]] = {}  # replica and hash -> page and its bytes

    def check(self) -> None:
        """Asserts that no page has changed since the last call."""
        found = {}
        for number, scheduler in enumerate(self._engine.schedulers):
            cached = {} if scheduler.ledger.host is None else scheduler.ledger.host._cached
            for page_hash, entry in cached.items():
                store = self._stores[host_store_name(number)]
                spans = [*(shard.span for shard in store.shards), *store.all_keys]
                stored = [row for span in spans for row in bytes_of(span, (entry.page,), range(span.part_rows))]
                found[number, page_hash] = entry.page, b"".join(stored)
        for name in found.keys() & self._seen.keys():
            page, before = self._seen[name]
            assert found[name] == (page, before) or found[name][0] != page, (
                f"page {page} of the prefix cache has changed"
            )
        self._seen = found


def rows_of(store: Store, pages: tuple[int, ...], rows: range) -> bytes:
    """Assembles whole rows from the slices that the shards hold. Shards that hold the same slice must hold the same
    bytes."""
    size = max(first + nbytes for shard in store.shards for first, nbytes in shard.slices)
    whole = np.zeros((len(rows) * len(store.shards[0].span.bases), size), np.uint8)
    known = np.zeros(size, bool)
    for shard in store.shards:
        joined = b"".join(bytes_of(shard.span, pages, rows))
        stored = np.frombuffer(joined, np.uint8).reshape(-1, shard.span.row_bytes)
        offset = 0
        for first, nbytes in shard.slices:
            of_shard, target = stored[:, offset : offset + nbytes], slice(first, first + nbytes)
            same = np.array_equal(whole[:, target], of_shard)
            assert same or not known[target].any(), "two shards hold different bytes of a slice"
            whole[:, target], known[target] = of_shard, True
            offset += nbytes
    assert known.all(), "some bytes of a row are in no shard"
    return whole.tobytes()


def bytes_of(span: PagedSpan, pages: tuple[int, ...], rows: range) -> list[bytes]:
    """Returns these rows of a context, layer by layer, or its index keys, index group by index group."""
    stored = []
    for layer, bases in enumerate(span.bases):
        for position in rows:
            block, row = divmod(position, span.part_rows)
            page, part = divmod(block * span.step + span.first_part(layer), len(bases))
            address = process_and_address(bases[part])[1] + pages[page] * span.page_bytes + row * span.row_bytes
            stored.append(ctypes.string_at(address, span.row_bytes))
    return stored


def _run_steps(engine: Engine, stop: threading.Event, on_error: Callable[[BaseException], None]) -> None:
    try:
        while not stop.is_set():
            engine.step()
            engine.audit()
            if engine.waiting_for_peers:
                time.sleep(0.005)
    except BaseException as error:
        on_error(error)


class Pair:
    """A decode worker and one or more prefill workers. `answers` runs the decode worker; threads run the others."""

    def __init__(self, prefill: Engine, decode: Engine, *further_prefills: Engine) -> None:
        self.prefill, self.decode = prefill, decode
        self._serials = itertools.count()
        self.prefills = (prefill, *further_prefills)
        self.comparer, *self.further_comparers = (ContextComparer(worker, decode) for worker in self.prefills)
        self._stop, self._errors = threading.Event(), list[BaseException]()
        self._threads = [
            threading.Thread(target=_run_steps, args=(worker, self._stop, self._errors.append))
            for worker in self.prefills
        ]
        for thread in self._threads:
            thread.start()

    def answers(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        landing: LandingChoice,
        tiers: TiersChoice = "auto",
        salt: str = "",
        on_step: Callable[[], None] = lambda: None,
    ) -> list[list[int]]:
        """Returns the answer to each prompt. The prompts are assigned to the prefill workers round-robin. `on_step` is
        called after each step of the decode worker."""
        processor = InputProcessor(self.decode.card, seed=0)
        names = [str(next(self._serials)) for _ in prompts]
        answers: dict[str, list[int]] = {f"{name}/0": [] for name in names}
        for number, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            prefill_at = self.prefills[number % len(self.prefills)].card.control
            options = RequestOptions(tiers, landing, salt or None, prefill_at)
            for choice in processor.accept(name, prompt, params, options):
                self.decode.add(choice)
        cached = CachedBytes(self.decode)
        deadline = time.monotonic() + DEADLINE_S
        while not self.decode.idle:
            assert not self._errors, self._errors
            assert time.monotonic() < deadline, f"the requests did not end within {DEADLINE_S:g} s"
            outputs = self.decode.step()
            self.decode.audit()
            on_step()
            if outputs.request_ids or outputs.finished:
                cached.check()
            for name, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
                answers[name].append(token)
            if self.decode.waiting_for_peers:
                time.sleep(0.001)
        return list(answers.values())

    @property
    def transfer_name(self) -> str:
        assert isinstance(self.prefill._endpoint, PrefillEndpoint)
        return self.prefill._endpoint._resources.transfer.name

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self.decode.close()
        for prefill in self.prefills:
            prefill.close()


@contextmanager
def pair(
    model: str,
    /,
    transfer: str = "loopback",
    page_rows: tuple[int, int] = (16, 16),
    decode_settings: dict[str, Any] | None = None,
    hub: Hub | None = None,
    **settings: Any,
) -> Iterator[Pair]:
    """Yields a prefill worker and a decode worker of one model. `page_rows` are the rows per page of the prefill worker
    and of the decode worker. `settings` apply to both workers, and `decode_settings` only to the decode worker."""
    decoder = decoder_of(model)
    if transfer == "loopback":
        hub = hub or Hub(threaded=True)
    common = settings if hub else {**settings, "transfer": transfer}
    prefill_page_rows, decode_page_rows = page_rows
    prefill = make(decoder, hub, role="prefill", page_rows=prefill_page_rows, **common)
    try:
        decode = make(decoder, hub, role="decode", page_rows=decode_page_rows, **{**common, **(decode_settings or {})})
    except BaseException:
        prefill.close()
        raise
    workers = Pair(prefill, decode)
    try:
        yield workers
    finally:
        workers.close()
