"""Engines with several workers give the same tokens as one process, for every split and every value of
`tiers` that the model supports."""

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from engine.threaded import split_engine
from harness import Answer, run_all, whole_engine
from models.split_workers import SPECS
from torch import Tensor

from hotset.base.errors import EngineStopped
from hotset.base.sampling import SamplingParams
from hotset.engine import build_runner
from hotset.engine import progress as progress_module
from hotset.engine import runner as runner_module
from hotset.engine.decode_graphs import SampledLogits, StepGraph, columns_of_tokens, graph_sizes
from hotset.engine.drafts.segments import SeatDrafts
from hotset.engine.input_processor import InputProcessor
from hotset.engine.runner import Runner, SubmittedStep
from hotset.engine.workers.distributed import Stage
from hotset.engine.workers.worker import Worker
from hotset.memory.view import View
from hotset.models.decoder import Decoder
from hotset.models.split import Split
from hotset.schedule.plan import Plan, StepResult
from hotset.tiers.commands import Load
from hotset.tiers.kv_memory import KvMemory
from hotset.tiers.shared_keys import SharedKeys

SEED = 5
DEADLINE_S = 30.0
SPLITS: dict[str, dict[str, Any]] = {
    "TP 2": {"tensor_parallel_size": 2},
    "TP 4": {"tensor_parallel_size": 4},
    "TP 2 x PP 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "PP 3, uneven": {"pipeline_parallel_size": 3},
    "DP 2": {"data_parallel_size": 2},
    "DP 4": {"data_parallel_size": 4},
}
# With these settings, a device pool of 96 tokens cannot hold all requests at once.
SMALL = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "page_rows": 4, "max_model_len": 64}
NUM_REQUESTS = 5


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(11)
    prompts = [[rng.randrange(61) for _ in range(rng.choice([1, 7, 16, 25, 30]))] for _ in range(NUM_REQUESTS)]
    params = [
        SamplingParams(temperature=0.8 if n % 2 else 0.0, seed=n, max_tokens=20, ignore_eos=True, top_p=0.9)
        for n in range(NUM_REQUESTS)
    ]
    return prompts, params


@lru_cache
def answers_of_one_process(model: str) -> list[Answer]:
    """Returns the answers of one process that has room for all requests."""
    return run_all(whole_engine(SPECS[model], SEED, **SMALL, device_kv_tokens=2000), *requests())


class ResidualChecksums:
    """Records a checksum of the residual stream after every layer of every step, on every rank."""

    def __init__(self) -> None:
        self._of_rank: defaultdict[int, dict[int, list[int]]] = defaultdict(dict)  # rank -> layer -> steps

    def record(self, decoder: Decoder, split: Split) -> None:
        layers = self._of_rank[split.tp_rank]

        def add(layer: int, x: Tensor) -> None:
            layers.setdefault(layer, []).append(int(x.view(torch.int64).sum()))

        decoder.on_residual = add

    def check(self, ranks: int, layers: int) -> None:
        """Asserts that all ranks have recorded the same checksums, and have recorded some of every layer."""
        first, *others = (self._of_rank[rank] for rank in range(ranks))
        assert set(first) == set(range(layers)) and all(first.values())
        assert all(other == first for other in others), "the ranks have different activations"


@pytest.mark.parametrize(
    ("model", "split", "tiers"),
    [
        ("llama with biases", "TP 2 x PP 2", "auto"),
        ("deepseek_v32", "TP 2", "always"),
        ("glm_moe_dsa", "PP 3, uneven", "auto"),
        ("deepseek_v32", "DP 2", "off"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("llama", "TP 4", "auto"),
                ("qwen3", "TP 2", "off"),
                ("deepseek_v32", "TP 4", "always"),
                ("glm_moe_dsa", "TP 2 x PP 2", "always"),
                ("glm_moe_dsa", "DP 4", "always"),
            )
        ),
    ],
)
def test_tokens_equal_those_of_one_process(model: str, split: str, tiers: str) -> None:
    checksums, ranks = ResidualChecksums(), SPLITS[split].get("tensor_parallel_size", 1)
    settings = SPLITS[split] | SMALL | {"device_kv_tokens": 80, "tiers": tiers}
    if tiers != "off":
        settings["host_kv_tokens"] = 600
    with closing(split_engine(SPECS[model], SEED, on_load=checksums.record, **settings)) as engine:
        assert run_all(engine, *requests()) == answers_of_one_process(model)
        stats = engine.stats()
    pressure = {"off": stats.recomputes, "auto": stats.parks, "always": stats.bytes_swapped}
    assert pressure[tiers] > 0, f"the pools were large enough, so this test checks nothing: {stats}"
    assert stats.device_pages_held == stats.host_pages_held == 0
    if ranks > 1:
        checksums.check(ranks, SPECS[model].layers)


def test_a_common_prefix_is_shared_on_all_workers_without_changing_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages have different numbers of index groups per layer, so a key page holds different tokens on each. Rank 0
    also reads host pages that other ranks wrote in earlier plans."""
    use, shared = SharedKeys.use, []
    monkeypatch.setattr(SharedKeys, "use", lambda keys, pages: (shared.extend(pages), use(keys, pages))[1])
    rng = random.Random(12)
    prefix = [rng.randrange(61) for _ in range(42)]
    prompts = [prefix, *([*prefix, *(rng.randrange(61) for _ in range(count))] for count in (1, 3, 9))]
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * len(prompts)
    spec, answers = SPECS["glm_moe_dsa"], []
    sizes: dict[str, int] = {"device_kv_tokens": 700, "host_kv_tokens": 900}
    one = whole_engine(spec, SEED, **SMALL, **sizes, prefix_cache=False)
    with closing(split_engine(spec, SEED, **SPLITS["PP 3, uneven"], **SMALL, **sizes)) as engine:
        for some in (slice(0, 1), slice(1, 4)):  # the others come when the first request has ended
            answers += run_all(engine, prompts[some], params[some])
        stats = engine.stats()
    assert answers == run_all(one, prompts, params)
    assert stats.tokens_reused == 3 * 40 and stats.tokens_prefilled == sum(map(len, prompts)) - stats.tokens_reused
    assert len(shared) == 2 * engine.schedulers[0].ledger.geometry.whole_key_pages(40) > 0


class FakeCopyEvent:
    """Stands for the event of copies from a GPU to the host. It occurs when the test sets `done`."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def synchronize(self) -> None:
        assert self.done.wait(30)


def test_a_step_that_reads_a_shared_store_waits_for_the_copies_of_all_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = FakeCopyEvent()

    def mirrored_event(memory: KvMemory) -> FakeCopyEvent | None:
        return copies if memory.host is not None and memory.host.writer == 1 else None

    monkeypatch.setattr(KvMemory, "mirrored_event", mirrored_event)
    engine = split_engine(SPECS["deepseek_v32"], SEED, **SMALL, host_kv_tokens=600, tensor_parallel_size=2)
    with closing(engine):
        workers = engine.executor
        first, second, reads_host = (Plan(n, (), (), (), (), (), reads_host=n == 2) for n in range(3))
        futures = [workers.submit([first]), workers.submit([second])]
        event = workers.mirrored_event()
        submitting = threading.Thread(target=lambda: futures.append(workers.submit([reads_host])), daemon=True)
        submitting.start()
        submitting.join(0.3)
        assert submitting.is_alive() and event is not None and not event.query()
        copies.done.set()
        submitting.join(30)
        assert event.query() and len(futures) == 3
        assert [future.results() for future in futures] == [[StepResult(n, ())] for n in range(3)]


def test_the_event_of_a_steps_copies_is_recorded_when_the_step_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that is recorded later, when the step is reported, would wait for the copies of later steps too."""
    recorded = [FakeCopyEvent(), FakeCopyEvent()]
    num_recorded = threading.Semaphore(0)
    events = iter(recorded)

    def mirrored_event(memory: KvMemory) -> FakeCopyEvent | None:
        if memory.host is None or memory.host.writer == 0:
            return None
        num_recorded.release()
        return next(events)

    monkeypatch.setattr(KvMemory, "mirrored_event", mirrored_event)
    engine = split_engine(SPECS["deepseek_v32"], SEED, **SMALL, host_kv_tokens=600, tensor_parallel_size=2)
    with closing(engine):
        first, second = (engine.executor.submit([Plan(n, (), (), (), (), ())]) for n in range(2))
        try:
            assert all(num_recorded.acquire(timeout=30) for _ in recorded), "an event waits for a report"
            recorded[0].done.set()
            assert first.results() == [StepResult(0, ())]
        finally:
            for event in recorded:
                event.done.set()
        assert second.results() == [StepResult(1, ())]


def test_a_rank_that_would_sample_other_tokens_follows_rank_0() -> None:
    def negate_logits(decoder: Decoder, split: Split) -> None:
        logits = decoder.logits
        if split.tp_rank == 1:
            decoder.logits = lambda x, indices: -logits(x, indices)  # type: ignore[method-assign]

    split = {"tensor_parallel_size": 2, "device_kv_tokens": 400, "tiers": "off"}
    with closing(split_engine(SPECS["qwen3"], SEED, on_load=negate_logits, **SMALL, **split)) as engine:
        assert run_all(engine, *requests()) == answers_of_one_process("qwen3")


@dataclass(frozen=True)
class Replay:
    graph: StepGraph
    tokens: int  # without padding
    tokens_per_rank: tuple[int, ...]


class FakeGraphs:
    """Replaces `DecodeGraphs` on a CPU: computes the steps without padding, and records what would be replayed."""

    def __init__(
        self,
        model: Any,
        memory: KvMemory,
        tokens: Tensor,
        max_decoded: int,
        before_capture: Callable[[int], None],
        log: "ReplayLog",
        seat_drafts: SeatDrafts | None,
    ) -> None:
        assert seat_drafts is None, "these models have no layer that drafts"
        self._model, self._memory, self._tokens, self._log = model, memory, tokens, log

    def capture_all(self, progress: Callable[[int, int], None]) -> None:
        progress(1, 1)

    def run(self, graph: StepGraph, plan: Plan | None) -> SampledLogits | None:
        seats, starts, counts = ((), (), ()) if plan is None else (plan.seats, plan.starts, plan.counts)
        collectives = self._model._world.collectives
        self._log[threading.get_ident()].append(Replay(graph, sum(counts), tuple(collectives.tokens_per_rank)))
        if collectives.tokens_per_rank:  # without padding, the experts compute fewer tokens
            tokens = collectives._exchange(torch.tensor([sum(counts)]))
            collectives.tokens_per_rank = torch.cat(tokens).tolist()
        if not seats:
            self._model.idle_moe_step()
            return None
        view = self._memory.view(*columns_of_tokens(seats, starts, counts), [1] * sum(counts))
        positions, seat_of = view.segments.positions, view.seat_of
        hidden = self._model.forward(self._tokens[seat_of, positions], view)
        return None if hidden is None else SampledLogits(self._model.logits(hidden, None), positions, seat_of)


ReplayLog = defaultdict[int, list[Replay]]  # thread of a worker -> its replays, in order


class FailingGraphs(FakeGraphs):
    """The last worker fails while it captures. The others wait for it, as kernels do."""

    def capture_all(self, progress: Callable[[int, int], None]) -> None:
        world, deadline = self._model._world, time.monotonic() + DEADLINE_S
        if world._number == 1:
            raise torch.OutOfMemoryError("no room for graphs")
        while not world.abort.is_set:
            assert time.monotonic() < deadline, "the wait was not ended"
            time.sleep(0.001)


def test_a_worker_that_fails_during_capture_is_named_and_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_runner, "captures_graphs", lambda config, model: isinstance(model, Stage))
    monkeypatch.setattr(runner_module, "DecodeGraphs", partial(FailingGraphs, log=defaultdict(list)))
    settings = SPLITS["TP 2"] | SMALL | {"device_kv_tokens": 96, "tiers": "off"}
    with closing(split_engine(SPECS["qwen3"], SEED, **settings)) as engine:
        workers = list(engine.executor.workers)  # type: ignore[attr-defined]
        named = r"^worker 1 \(.*rank 1 of 2\) failed: .* \(no room for graphs\); lower --gpu-memory-utilization, "
        with pytest.raises(EngineStopped, match=named):
            engine.executor.warm_up(lambda done, total: None)
        for worker in workers:
            worker.process.join(DEADLINE_S)
            assert not worker.process.is_alive(), "nobody has closed the engine yet"


@pytest.mark.parametrize(("model", "split"), [("deepseek_v32", "DP 2"), ("glm_moe_dsa", "PP 3, uneven")])
def test_all_workers_replay_the_same_graphs(model: str, split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log: ReplayLog = defaultdict(list)
    monkeypatch.setattr(build_runner, "captures_graphs", lambda config, model: isinstance(model, Stage))
    monkeypatch.setattr(runner_module, "DecodeGraphs", partial(FakeGraphs, log=log))
    captured: list[tuple[int, int]] = []
    prompts = [[5, 6, 7, 8] * 6, [9], [3, 1, 4] * 8]
    params = [SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True) for tokens in (14, 9, 5)]
    settings = SPLITS[split] | SMALL | {"device_kv_tokens": 96, "host_kv_tokens": 600, "tiers": "always"}
    with closing(split_engine(SPECS[model], SEED, **settings)) as engine:
        engine.executor.warm_up(lambda done, total: captured.append((done, total)))
        answers = run_all(engine, prompts, params)
        workers, replicas = len(engine.executor.workers), len(engine.schedulers)  # type: ignore[attr-defined]
    assert answers == run_all(whole_engine(SPECS[model], SEED, **SMALL), prompts, params)
    assert captured == [(1, 1)]
    replays = list(zip(*log.values(), strict=True))
    assert len(log) == workers and len(replays) > 10
    for of_workers in replays:
        assert len({replay.graph for replay in of_workers}) == 1, f"the workers replayed different graphs: {of_workers}"
        graph = of_workers[0].graph
        most = max(replay.tokens for replay in of_workers)
        assert graph.size == min(size for size in graph_sizes(SMALL["max_num_seqs"]) if size >= most)
        if replicas > 1:
            assert {replay.tokens_per_rank for replay in of_workers} == {(graph.size,) * replicas}
    assert any(of_workers[0].graph.has_tiered for of_workers in replays)
    if replicas > 1:
        assert any(replay.tokens == 0 for of_workers in replays for replay in of_workers), "no replica was ever idle"


@pytest.mark.parametrize("split", ["TP 2", "DP 2"])
def test_a_prompt_that_is_mostly_cached_replays_graphs(split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan loads the cached pages, and a graph computes all other tokens of the prompt."""
    log: ReplayLog = defaultdict(list)
    submit, loading = Runner.submit, []

    def recording_submit(runner: Runner, plan: Plan, graph: StepGraph | None = None) -> SubmittedStep:
        if any(isinstance(command, Load) for command in plan.commands):
            loading.append(graph)
        return submit(runner, plan, graph)

    monkeypatch.setattr(Runner, "submit", recording_submit)
    monkeypatch.setattr(build_runner, "captures_graphs", lambda config, model: isinstance(model, Stage))
    monkeypatch.setattr(runner_module, "DecodeGraphs", partial(FakeGraphs, log=log))
    spec, prefix, answers = SPECS["deepseek_v32"], [7, 5, 3, 1] * 10, []
    prompts = [[*prefix, *rest] for rest in ([8], [9], [5, 2, 6], [3, 2, 6, 5, 4, 3, 2])]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    sizes: dict[str, int] = {"device_kv_tokens": 400, "host_kv_tokens": 600}
    one = whole_engine(spec, SEED, **SMALL, **sizes, prefix_cache=False)
    with closing(split_engine(spec, SEED, **SPLITS[split], **SMALL, **sizes)) as engine:
        engine.executor.warm_up(lambda done, total: None)
        for prompt in prompts:
            answers += run_all(engine, [prompt], [params])
        stats, workers = engine.stats(), len(engine.executor.workers)  # type: ignore[attr-defined]
    assert answers == run_all(one, prompts, [params] * len(prompts))
    assert stats.tokens_reused == 3 * len(prefix)
    assert list(dict.fromkeys(loading)) == [StepGraph(size, has_tiered=False) for size in (1, 4, 16)]
    assert len(log) == workers and len({tuple(replay.graph for replay in replays) for replays in log.values()}) == 1


def test_a_step_that_hangs_ends_the_engine_and_is_named_with_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "STALL_MARGIN_SECONDS", 0.0)
    hang, release, execute = threading.Event(), threading.Event(), Worker._execute

    def execute_or_hang(worker: Worker, step: Any) -> None:
        if hang.is_set() and worker._rank.number == 1:
            assert release.wait(30)
        execute(worker, step)

    monkeypatch.setattr(Worker, "_execute", execute_or_hang)
    advanced = threading.Event()
    engine = split_engine(SPECS["deepseek_v32"], SEED, **SMALL, tensor_parallel_size=2, step_timeout=2.0)
    with closing(engine):
        workers = engine.executor
        workers._group._advance = advanced.set  # type: ignore[attr-defined]
        assert workers.submit([Plan(0, (), (), (), (), ())]).results() == [StepResult(0, ())]
        hang.set()
        with pytest.raises(EngineStopped, match=r"^worker 1 \(.*rank 1 of 2\) made no progress in step 2 for \d+ s$"):
            workers.submit([Plan(1, (), (), (), (), ())]).results()
        assert advanced.is_set(), "the controller showed no progress while it waited for its workers"
        release.set()


def test_stages_compute_different_chunks_of_one_prompt_at_the_same_time() -> None:
    """The second stage ends a chunk only when the first has begun the next one."""
    begun, overlaps = [threading.Event() for _ in range(4)], []

    def watch(decoder: Decoder, split: Split) -> None:
        run_layers, chunks = decoder.run_layers, iter(range(4))

        def run(x: Tensor, view: View, *, once: bool = False) -> Tensor:
            chunk = next(chunks, None)
            if chunk is not None and split.first_layer == 0:
                begun[chunk].set()
            elif chunk is not None and chunk < 3:
                overlaps.append(begun[chunk + 1].wait(DEADLINE_S))
            return run_layers(x, view, once=once)

        decoder.run_layers = run  # type: ignore[method-assign]

    prompt, params = list(range(40)), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    settings: dict[str, Any] = SMALL | {"max_num_batched_tokens": 10, "device_kv_tokens": 400}
    tokens: list[int] = []
    with closing(split_engine(SPECS["qwen3"], SEED, on_load=watch, pipeline_parallel_size=2, **settings)) as engine:
        engine.add(*InputProcessor(engine.card, seed=0).accept("0", prompt, params))
        while not engine.idle:  # not `run_all`, whose audits wait for all steps in flight
            tokens += engine.step().token_ids
    assert overlaps == [True] * 3
    (answer,) = run_all(whole_engine(SPECS["qwen3"], SEED, **settings), [prompt], [params])
    assert tokens == answer.token_ids


def test_statistics_do_not_wait_for_a_step_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    release, execute = threading.Event(), Worker._execute

    def execute_or_hang(worker: Worker, step: Any) -> None:
        if step.number == 2:
            assert release.wait(DEADLINE_S), "statistics wait for the step"
        execute(worker, step)

    monkeypatch.setattr(Worker, "_execute", execute_or_hang)
    settings = SMALL | {"device_kv_tokens": 96, "host_kv_tokens": 600, "tiers": "always"}
    with closing(split_engine(SPECS["glm_moe_dsa"], SEED, pipeline_parallel_size=2, **settings)) as engine:
        for number, (prompt, params) in enumerate(zip(*requests(), strict=True)):
            engine.add(*InputProcessor(engine.card, seed=0).accept(str(number), prompt, params))
        engine.step()  # commits step 1; step 2 is in flight
        stats = engine.stats()
        assert stats.steps == 1 and stats.running and not release.is_set()
        release.set()
        while not engine.idle:
            engine.step()
        assert sum(engine.stats().slot_lookups.values()) > 0


def test_a_request_goes_to_the_replica_with_the_fewest_tokens() -> None:
    spec, (prompts, params) = SPECS["deepseek_v32"], requests()
    with closing(split_engine(spec, SEED, **SMALL, device_kv_tokens=400, tiers="off", data_parallel_size=2)) as engine:
        answers = run_all(engine, prompts, params)
        prefilled = [scheduler.counters.tokens_prefilled for scheduler in engine.schedulers]
    assert answers == answers_of_one_process("deepseek_v32")
    assert sum(prefilled) == sum(map(len, prompts))
    assert max(prefilled) - min(prefilled) <= max(map(len, prompts)), f"the replicas prefilled {prefilled} tokens"
