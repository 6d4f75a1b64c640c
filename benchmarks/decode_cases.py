"""The measurements of `decode.py`: decode steps of one rank or of a whole model, and the prefill of one prompt."""

import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from decode_limits import Rates, link_bytes, link_seconds, step_bytes
from decode_load import abort_all, prefill, timed_steps
from decode_server import (
    FP8_KV,
    CollectiveCall,
    RankServer,
    SimulatedRanks,
    WeightBytes,
    random_weights,
)
from gpu_timing import replay_seconds
from report import Row
from speculation import imposed_acceptance
from step_profile import grouped_ms, layer_rows, profiled
from synthetic_prefill import SyntheticPrefillModel, SyntheticSelection
from torch import Tensor

from hotset.base.config import EngineConfig, TiersMode
from hotset.base.sampling import SamplingParams
from hotset.engine.core import Engine
from hotset.engine.decode_graphs import StepGraph, batch_sizes
from hotset.engine.input_processor import InputProcessor
from hotset.engine.runner import Runner
from hotset.engine.sizing import kv_budget
from hotset.lab.plan.products import product_rates, prompt_work
from hotset.models import layers
from hotset.models.attention.dsa_spec import MlaSpec
from hotset.models.decoder import Decoder
from hotset.models.sampler import Sampler
from hotset.models.spec import ModelSpec
from hotset.models.split import Split

CHUNK = 16384  # tokens per step of prompts that are not computed
MAX_ANSWER = 1024  # tokens; the first requests generate while the prompts of the others are stored
WARM_UP_STEPS = 20  # enough for the LRU order to follow the selection
PROFILED_STEPS = 4
CHECKED_STEPS = 16


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a model with random weights, or the whole model."""

    name: str
    split_name: str
    split: Split
    spec: ModelSpec
    ranks: SimulatedRanks | None  # None if the model is not divided
    decoder: Decoder
    weights: WeightBytes
    selection: SyntheticSelection  # read by captured steps: `select_in` changes its values in place
    model: SyntheticPrefillModel

    @staticmethod
    def load(
        *,
        name: str,
        split_name: str,
        spec: ModelSpec,
        split: Split,
        device: torch.device,
        dtype: torch.dtype,
        max_step_tokens: int,
    ) -> "Rank":
        assert isinstance(spec.attention, MlaSpec)
        weights, ranks = random_weights(spec, dtype, device), None
        if split.size > 1:
            assert spec.moe is not None
            ranks = SimulatedRanks(split.size, spec.hidden, spec.moe.experts, dtype, device)
            decoder = Decoder(spec, weights, FP8_KV, split, ranks)
        else:
            decoder = Decoder(spec, weights, FP8_KV)
        selection = SyntheticSelection.constant(spec.attention.index.topk, device)
        return Rank(
            name=name,
            split_name=split_name,
            split=split,
            spec=spec,
            ranks=ranks,
            decoder=decoder,
            weights=WeightBytes.of(decoder),
            selection=selection,
            model=SyntheticPrefillModel(decoder, selection, max_step_tokens),
        )

    @property
    def gpus_per_token(self) -> int:
        """The number of GPUs that compute every token."""
        return self.split.tp_size

    def select_in(self, context: int, *, misses: bool = True) -> None:
        """Makes the selections of decode steps have the published miss rates in contexts of `context` tokens, or no
        misses."""
        topk, device = self.selection.first.shape[0], self.decoder.device
        constant = SyntheticSelection.constant(topk, device)
        chosen = SyntheticSelection.with_published_misses(topk, context, device) if misses else constant
        self.selection.first.copy_(chosen.first)
        self.selection.period.copy_(chosen.period)


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """What one decode step without a graph did."""

    used_experts: float  # share of the rank's routed experts, mean over the layers
    calls: list[CollectiveCall]
    finite: bool  # whether all logits are


def observe_step(rank: Rank, engine: Engine, runner: Runner) -> ObservedStep:
    """Runs one step without a graph and observes its experts, collectives and logits."""
    used: list[int] = []  # experts, in each layer
    finite: list[bool] = []
    compute_experts, compute_logits = layers.experts, rank.model.logits
    moe = rank.spec.moe
    local = set(rank.split.experts(moe.experts)) if moe is not None else set()

    def observed_experts(x: Tensor, expert_ids: Tensor, *others: Any, **named: Any) -> Tensor:
        used.append(len(local.intersection(expert_ids.flatten().tolist())))
        return compute_experts(x, expert_ids, *others, **named)

    def observed_logits(hidden: Tensor, indices: Tensor | None) -> Tensor:
        logits = compute_logits(hidden, indices)
        finite.append(bool(logits.isfinite().all()))
        return logits

    calls = [] if rank.ranks is None else rank.ranks.calls
    calls.clear()
    with (
        patch.object(layers, "experts", observed_experts),
        patch.object(rank.model, "logits", observed_logits),
        patch.object(runner, "_graphs", None),
    ):
        engine.step()
    share = statistics.mean(used) / len(local) if local else 1.0
    return ObservedStep(share, list(calls), all(finite))


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    tiers: TiersMode
    context: int
    requests: int
    shared_pages: bool = False
    shared_prefix: int | None = None  # tokens that all prompts begin with, in an engine with a prefix cache
    drafts: int = 0  # of each request in every step; some of them are accepted at random
    misses: bool = True  # False: every step selects the same rows

    def __str__(self) -> str:
        pages = ", shared host pages" if self.shared_pages else ""
        pages += f", {self.drafts} drafts" if self.drafts else ""
        pages += "" if self.misses else ", no misses"
        prefix = "" if self.shared_prefix is None else f", {self.shared_prefix} of them shared"
        return f"{self.requests} requests of {self.context} tokens{prefix}, tiers {self.tiers}{pages}"

    @property
    def host_pages(self) -> str:
        """The column "host pages"."""
        if self.shared_prefix is not None:
            return "shared prefix"
        return "" if self.tiers == "off" else "shared" if self.shared_pages else "distinct"


def sampling(temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_p=0.95, max_tokens=MAX_ANSWER, ignore_eos=True)


def replayed_seconds(runner: Runner, requests: int, has_tiered: bool) -> float | None:
    """Replays the CUDA graph of a step with `requests` requests, without pauses. Returns the seconds per replay."""
    if runner._graphs is None:
        return None
    graph = StepGraph(next(size for size in batch_sizes(runner.seats) if size >= requests), has_tiered)
    return replay_seconds(runner._graphs.get_or_capture(graph), 10)


def sampling_seconds(requests: int, vocab: int, device: torch.device) -> float:
    """Times the sampling of one token for each request. In a step, sampling follows the graph; here it runs alone."""
    sampler = Sampler(requests, vocab, device)
    for seat in range(requests):
        sampler.admit(seat, sampling().with_seed(seat), token_ids=(0,), prompt_length=1, stop_ids=frozenset())
    logits = torch.randn(requests, vocab, device=device)
    positions = torch.ones(requests, dtype=torch.int64, device=device)

    def sample(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            sampler.sample(logits, range(requests), positions)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / times

    sample(2)  # compiles kernels
    return sample(10)


def measure(
    rank: Rank,
    server: RankServer,
    case: Case,
    rates: Rates,
    steps: int,
    *,
    temperature: float = 1.0,
    profiles: bool = True,
) -> Row:
    """Times `steps` decode steps of one case."""
    rank.select_in(case.context, misses=case.misses)
    engine = server.engine(case.shared_pages, case.tiers, prefix_cache=case.shared_prefix is not None)
    with imposed_acceptance() if case.drafts else nullcontext():  # the first steps capture it in their graphs
        request_ids = prefill(engine, case.requests, case.context, sampling(temperature), case.shared_prefix)
        timed_steps(engine, WARM_UP_STEPS)
        before = engine.stats()
        swapped = engine.executor.traffic().bytes_swapped
        times = timed_steps(engine, steps)[1:]  # the first step was complete before the timing began
        after = engine.stats()
        swapped = engine.executor.traffic().bytes_swapped - swapped
        observed = observe_step(rank, engine, server.runner) if not case.drafts else None
        profiles = profiles and rank.decoder.device.type == "cuda"
        runs = profiled(lambda: timed_steps(engine, PROFILED_STEPS)) if profiles else []
        replay_s = replayed_seconds(server.runner, case.requests, after.tiered > 0) if not case.drafts else None
        abort_all(engine, request_ids)
    lookups = sum(after.slot_lookups.values()) - sum(before.slot_lookups.values())
    misses = sum(after.slot_misses.values()) - sum(before.slot_misses.values())
    generated = after.tokens_generated - before.tokens_generated
    step_s, per_step = statistics.mean(times), generated / steps / case.requests
    tokens_per_s = case.requests * per_step / rank.gpus_per_token
    return {
        "model": rank.name,
        "split": rank.split_name,
        "context": case.context,
        "tiers": case.tiers,
        "drafts": case.drafts,
        "host pages": case.host_pages,
        "requests": case.requests,
        "tiered": after.tiered,
        "step ms": step_s * 1e3,
        "p50 ms": statistics.median(times) * 1e3,
        "p99 ms": sorted(times)[int(len(times) * 0.99)] * 1e3,
        "tokens/s": tokens_per_s / step_s,
        "per step": per_step,
        "rows/token": misses / generated,
        **_limits(rank, case, rates, step_s, tokens_per_s, observed),
        "replay ms": replay_s and replay_s * 1e3,
        "idle": max(0.0, 1 - replay_s / step_s) if replay_s and not after.tiered else None,
        "miss": misses / lookups if lookups else 0.0,
        "misses": case.misses,
        "host GB/s": swapped / len(times) / step_s * 1e-9,
        "sampling ms": sampling_seconds(case.requests, rank.spec.vocab, rank.decoder.device) * 1e3,
        "profile ms": grouped_ms(runs, PROFILED_STEPS),
        "layer": layer_rows(runs) if case.requests == 1 else [],
    }


def _limits(
    rank: Rank, case: Case, rates: Rates, step_s: float, tokens_per_s: float, observed: ObservedStep | None
) -> Row:
    """Returns the columns about the bytes of a step. They are empty if no step was observed."""
    names = ("bytes ms", "step / bytes", "experts", "NVLink ms", "collectives", "tokens/s with NVLink", "finite")
    if observed is None:
        return dict.fromkeys(names) | {"bytes": {}, "link bytes": {}}
    read = step_bytes(
        rank.decoder.kv_shape,
        rank.weights,
        requests=case.requests,
        context=case.context,
        used_experts=observed.used_experts,
    )
    bytes_s, link_s = sum(read.values()) / rates.copy, link_seconds(observed.calls)
    values = (
        bytes_s * 1e3,
        step_s / bytes_s,
        observed.used_experts,
        link_s * 1e3,
        len(observed.calls),
        tokens_per_s / (step_s + link_s),
        observed.finite,
    )
    return dict(zip(names, values, strict=True)) | {"bytes": read, "link bytes": link_bytes(observed.calls)}


def tokens_of_one_request(rank: Rank, server: RankServer, context: int, tiers: TiersMode) -> list[int]:
    """Returns the first tokens of a request that is resident (tiers auto) or tiered (always)."""
    rank.select_in(context)
    engine = server.engine(tiers=tiers)
    request_ids = prefill(engine, 1, context, sampling())
    tokens = [token for _ in range(CHECKED_STEPS) for token in engine.step().token_ids]
    tiered = engine.stats().tiered
    assert tiered == (tiers == "always"), f"{tiered} requests are tiered with tiers {tiers}"
    abort_all(engine, request_ids)
    return tokens


def measure_prefill(rank: Rank, tokens: int, chunk: int, rates: Rates, *, profiles: bool = True) -> Row:
    """Computes a prompt of `tokens` tokens in chunks, alone, and compares its time with that of its products."""
    decoder, spec = rank.decoder, rank.spec
    on_gpu = decoder.device.type == "cuda"
    config = EngineConfig(
        tiers="off",
        max_num_seqs=1,
        max_num_batched_tokens=chunk,
        device_kv_tokens=tokens + 64,
        max_model_len=tokens + 64,
        kv_dtype="fp8",
        index_dtype="fp8",
    )
    budget = kv_budget(config, decoder.kv_shape, spec.context, decoder.device)
    server = RankServer(decoder, spec, config, budget, None)
    engine = server.engine()
    input_processor = InputProcessor(engine.card, seed=0)
    known_ids = rank.split.vocabulary(spec.vocab)  # token ids whose embeddings this rank holds
    prompt = torch.randint(known_ids.start, known_ids.stop, (tokens,)).tolist()

    def compute(count: int) -> float:
        params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=1, ignore_eos=True)
        (choice,) = input_processor.accept(str(time.monotonic_ns()), prompt[:count], params)
        engine.add(choice)
        start = time.perf_counter()
        while not engine.idle:
            engine.step()
        return time.perf_counter() - start

    compute(min(tokens, 2 * chunk))  # compiles kernels
    held = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = compute(tokens)
    workspace = torch.cuda.max_memory_allocated() - held if on_gpu else 0
    runs = profiled(lambda: compute(tokens)) if on_gpu and profiles else []
    work = prompt_work(spec, 0, tokens)
    ideal = {rate.name: rate.flops(work) / rates.of(rate.kind) for rate in product_rates(spec, rank.split)}
    return {
        "model": rank.name,
        "split": rank.split_name,
        "prompt": tokens,
        "chunk": chunk,
        "seconds": seconds,
        "tokens/s": tokens / seconds,
        "products s": sum(ideal.values()),
        "seconds / products": seconds / sum(ideal.values()),
        "workspace GB": workspace * 1e-9,
        "products ms": {name: value * 1e3 for name, value in ideal.items()},
        "profile ms": grouped_ms(runs, 1),
    }
