"""Measures decode throughput and time between tokens of a 50B model on one GPU, tiers auto against off.

    python benchmarks/serving.py --json serving.json --png serving.png

The models dsa-50b and dsa-50b-dense (hotset/lab/plan/configs) have random weights. The dense feed-forward layers of
dsa-50b-dense have as many bytes as all experts of dsa-50b together. Like one GPU of a group that divides the experts,
this model reads all of its weights at every step. Rows and index keys are fp8. Prompts are not computed: random rows
and index keys are stored instead. With random weights, the selections of an indexer would have no locality. The indexer
therefore runs at full cost, but its selection is replaced by a synthetic one with the published miss rates (LRU: 30,
13.4 and 6.7 % of top-k with 1, 2 and 4 times top-k slots).

For each model, context length and number of requests, the table shows the step time, tokens/s, and
  bytes ms      the bytes that a step reads (weights once, of experts only the expected number that is used; index keys;
                selected rows), divided by the copy bandwidth measured in the same run
  step / bytes  the step time divided by bytes ms
  of predicted  the predicted step time (bytes ms, plus a bare gather of the missing rows) over the measured step time
  replay ms     time of the step's CUDA graph, replayed alone
  idle          share of a step in which the GPU waits: 1 - replay ms / step ms; only if no request is tiered
  miss          share of the rows selected by tiered requests, outside their tails, that no slot held

Then 16 contexts of the shortest length (or as many as fit) decode with a constant selection, once resident and once
tiered. This shows what tiers cost when no row is missing.

With --shared-prefix TOKENS, contexts are also measured with the prefix cache, in an engine with tiers auto: the first
TOKENS tokens of all prompts are the same, so their rows are on the host once and their index keys on the device once.
The last table compares requests at once and tokens/s with those of the same engine without the cache.

Bars (required results):
- With tiers off, a step takes at most 1.3 times its bytes ms, and the GPU idles for at most 5 % of a step.
- The best throughput with tiers auto is at least 80 % of its prediction, and at least the best throughput with tiers
  off. For dsa-50b-dense, it is at least 1.8 times the best with tiers off at 32k tokens, and 3 times at 128k.
- As long as all requests are resident, throughput with tiers auto is at least 0.98 of that with tiers off.
- A tiered step without misses takes at most 1.05 times as long as a resident step.

Requires a GPU with 141 GB (H200) and 80 GiB of host memory to pin.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decode_load import abort_all, max_requests_with_prefix, prefill, timed_steps
from gpu_timing import copy_bandwidth, replay_seconds, require_gpu, seconds_of
from report import make_parser, report
from serving_report import REUSE, Rows, bars, draw, reuse_rows
from synthetic_prefill import SyntheticPrefillModel, SyntheticSelection
from torch import Tensor

from hotset.base.config import EngineConfig, TiersMode
from hotset.base.sampling import SamplingParams
from hotset.engine.build import model_card
from hotset.engine.core import Engine, Replica
from hotset.engine.decode_graphs import StepGraph, batch_sizes
from hotset.engine.runner import Runner
from hotset.engine.sizing import KvBudget, kv_budget
from hotset.engine.workers.executor import InProcessExecutor
from hotset.kernels.swap_in import RowCopies, copy
from hotset.memory.device_pool import DevicePool
from hotset.memory.host_store import HostStore
from hotset.memory.pages import PageAllocator
from hotset.models.attention.dsa_spec import IndexSpec, MlaSpec
from hotset.models.checkpoint.dummy_source import DummySource
from hotset.models.checkpoint.source import WeightSource
from hotset.models.decoder import Decoder
from hotset.models.families import read_spec
from hotset.models.formats.weight_format import PLAIN_WEIGHTS
from hotset.models.spec import KvStorage, ModelSpec
from hotset.models.split import TensorSlice
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.kv_memory import KvMemory
from hotset.tiers.ledger import Ledger
from hotset.tiers.prefix_cache import PageHasher, PrefixCache

CONFIGS = Path(__file__).parents[1] / "hotset" / "lab" / "plan" / "configs"
CUDA = torch.device("cuda")  # tests replace it
DTYPE = torch.bfloat16
CHUNK = 16384  # prompt tokens per step
SEATS = 128
MODES: tuple[TiersMode, ...] = ("off", "auto", "off", "always")  # off runs before and after auto: a warm GPU is slower
PAGE_ROWS = 64
ANSWER = 512  # maximum number of generated tokens
ALL_HITS_REQUESTS = 16
WARM_UP_STEPS = 20  # enough for the LRU order to follow the selection


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """A model and the memory that serves it with one mode of tiers."""

    config: EngineConfig
    decoder: Decoder
    budget: KvBudget
    pool: DevicePool
    host: HostStore | None
    weight_bytes: int  # bytes of all weights that a step can read

    @property
    def spec(self) -> ModelSpec:
        return self.decoder.spec

    @property
    def index(self) -> IndexSpec:
        assert isinstance(self.spec.attention, MlaSpec)
        return self.spec.attention.index


class CountedWeights(WeightSource):
    """Random weights whose bytes are counted. The embedding is not counted: a step reads only a few of its rows."""

    bytes = 0

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(DummySource(device, 0, PLAIN_WEIGHTS), dtype, device)

    def load(
        self, name: str, shape: tuple[int, ...], *, out: Tensor | None = None, tensor_slice: TensorSlice | None = None
    ) -> Tensor:
        weight = super().load(name, shape, out=out, tensor_slice=tensor_slice)
        if "embed_tokens" not in name:
            self.bytes += weight.nbytes
        return weight


def load_spec(name: str, share: int) -> ModelSpec:
    """Reads the configuration of a model. One indexer is used for every `share` layers."""
    path = CONFIGS / f"{name}.json"
    spec = read_spec(json.loads(path.read_text()), {}, str(path))
    assert isinstance(spec.attention, MlaSpec)
    index = dataclasses.replace(spec.attention.index, full_layers=tuple(range(0, spec.layers, share)))
    return dataclasses.replace(spec, attention=dataclasses.replace(spec.attention, index=index))


def make_config(tiers: TiersMode, options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        tiers=tiers,
        max_num_seqs=SEATS,
        max_num_batched_tokens=CHUNK,
        device_kv_gib=options.device_gib,
        host_kv_gib=None if tiers == "off" else options.host_gib,
        max_model_len=max(options.contexts) + ANSWER,
        kv_dtype="fp8",
        index_dtype="fp8",
    )


@dataclass(frozen=True, slots=True)
class ServingMemory:
    """The host store and budgets for all models. The host store is allocated once, since pinning it takes long."""

    configs: dict[TiersMode, EngineConfig]
    budgets: dict[TiersMode, KvBudget]  # computed before the host memory was pinned
    host: HostStore

    @staticmethod
    def make(decoder: Decoder, options: argparse.Namespace) -> "ServingMemory":
        configs = {tiers: make_config(tiers, options) for tiers in set(MODES)}
        budgets = {
            tiers: kv_budget(config, decoder.kv_shape, decoder.spec.context, CUDA) for tiers, config in configs.items()
        }
        print(f"pinning {options.host_gib} GiB", flush=True)
        return ServingMemory(configs, budgets, HostStore(decoder.kv_shape, budgets["auto"].host_pages, PAGE_ROWS, CUDA))

    def setup(self, decoder: Decoder, weight_bytes: int, tiers: TiersMode) -> ModelSetup:
        config, budget = self.configs[tiers], self.budgets[tiers]
        pool = DevicePool(decoder.kv_shape, budget.geometry, budget.device_pages, CUDA)
        return ModelSetup(config, decoder, budget, pool, None if tiers == "off" else self.host, weight_bytes)


def make_engine(
    setup: ModelSetup, selection: SyntheticSelection, *, prefix_cache: bool = False
) -> tuple[Engine, Runner]:
    """Returns an engine that uses the memory of `setup`, and its runner."""
    config, budget = setup.config, setup.budget
    model = SyntheticPrefillModel(setup.decoder, selection, CHUNK + SEATS)
    memory = KvMemory(setup.pool, setup.host, SEATS, budget.max_model_len)
    memory.warm_up()
    host_allocator = PrefixCache(budget.host_pages) if setup.host else None
    ledger = Ledger(budget.geometry, PageAllocator(budget.device_pages), host_allocator)
    hasher = PageHasher("benchmark", PAGE_ROWS) if prefix_cache else None
    scheduler = Scheduler(ledger, SEATS, CHUNK, config.tiers, hasher=hasher)
    card = model_card(config, setup.spec, budget, CUDA, DTYPE)
    runner = Runner(model, memory, SEATS, budget.max_model_len, setup.spec.vocab, graphs=CUDA.type == "cuda")
    return Engine(card, [Replica(scheduler, ledger)], InProcessExecutor(runner), plans_in_flight=2), runner


def graph_seconds(runner: Runner, requests: int, has_tiered: bool) -> float:
    """Replays the CUDA graph of a step with `requests` requests, without pauses. Returns the seconds per replay."""
    assert runner._graphs is not None
    sizes = batch_sizes(runner.seats)
    graph = StepGraph(next(size for size in sizes if size >= requests), has_tiered)
    return replay_seconds(runner._graphs.get_or_capture(graph), 10)


def run(
    engine: Engine, runner: Runner, requests: int, context: int, steps: int, shared_prefix: int | None = None
) -> dict[str, Any]:
    """Adds `requests` requests with prompts of `context` tokens and times `steps` decode steps of all of them."""
    start = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    request_ids = prefill(engine, requests, context, params, shared_prefix)
    prefill_s = time.perf_counter() - start
    timed_steps(engine, WARM_UP_STEPS)
    before = engine.stats()
    times = timed_steps(engine, steps)[1:]  # the first step was complete before the timing began
    after = engine.stats()
    lookups = sum(after.slot_lookups.values()) - sum(before.slot_lookups.values())
    misses = sum(after.slot_misses.values()) - sum(before.slot_misses.values())
    graph_s = graph_seconds(runner, requests, after.tiered > 0)
    abort_all(engine, request_ids)
    mean = statistics.mean(times)
    return {
        "context": context,
        "requests": requests,
        "tiered": after.tiered,
        "prefill s": prefill_s,
        "step ms": mean * 1e3,
        "p50 ms": statistics.median(times) * 1e3,
        "p99 ms": sorted(times)[int(len(times) * 0.99)] * 1e3,
        "tokens/s": requests / mean,
        "replay ms": graph_s * 1e3,
        "idle": max(0.0, 1 - graph_s / mean) if not after.tiered else None,
        "miss": misses / lookups if lookups else 0.0,
        "missed rows": misses / steps / max(1, len(after.slot_misses)),  # in one layer of one step
    }


def bytes_read(setup: ModelSetup, requests: int, context: int) -> float:
    """Returns the bytes that one step reads: weights (with the expected number of used experts), index keys, selected
    rows."""
    spec, shape = setup.spec, setup.decoder.kv_shape
    assert shape.key is not None
    keys = requests * context * shape.key.row_bytes * shape.groups
    rows = requests * shape.topk * shape.row.row_bytes * shape.layers
    total = float(setup.weight_bytes)
    moe = spec.moe
    if moe is not None:
        expert_bytes = 3 * moe.width * spec.hidden * 2
        used_experts = moe.experts * (1 - (1 - moe.experts_per_token / moe.experts) ** requests)
        total -= len(moe.layers) * (moe.experts - used_experts) * expert_bytes
    return total + keys + rows


def gather_seconds(setup: ModelSetup, requests: int, missed_rows: float) -> float:
    """Times a bare gather: it copies `missed_rows` random rows of one layer from the host store, without a plan."""
    if setup.host is None or missed_rows < 1:
        return 0.0
    per_request = max(1, round(missed_rows / requests))
    num_host_rows, num_device_rows = setup.host.rows.shape[1], setup.pool.rows.shape[1]
    calls = []
    for _ in range(4):
        host = torch.randint(num_host_rows, (requests, per_request), device=CUDA).sort(dim=1).values
        device = torch.randperm(num_device_rows, device=CUDA)[: requests * per_request].view(requests, per_request)
        count = torch.full((requests,), per_request, dtype=torch.int32, device=CUDA)
        copies = RowCopies(host, device, count)
        calls.append(partial(copy, copies, setup.host.rows[0], setup.pool.rows[0]))
    return seconds_of(calls)


def measure(setup: ModelSetup, context: int, counts: list[int], steps: int, shared_prefix: int | None = None) -> Rows:
    """Returns one table row per number of requests."""
    selection = SyntheticSelection.with_published_misses(setup.index.topk, context, CUDA)
    engine, runner = make_engine(setup, selection, prefix_cache=shared_prefix is not None)
    rows = []
    for requests in counts:
        row = run(engine, runner, requests, context, steps, shared_prefix)
        bytes_s = bytes_read(setup, requests, context) / copy_bandwidth()
        gather_s = gather_seconds(setup, requests, row["missed rows"]) * setup.spec.layers
        row |= {
            "bytes ms": bytes_s * 1e3,
            "step / bytes": row["step ms"] / 1e3 / bytes_s,
            "of predicted": (bytes_s + gather_s) / (row["step ms"] / 1e3),
        }
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
        rows.append(row)
    return rows


def all_hits(setup: ModelSetup, requests: int, context: int, steps: int) -> dict[str, Any]:
    """Measures steps with a constant selection, in which no row is missing."""
    engine, runner = make_engine(setup, SyntheticSelection.constant(setup.index.topk, CUDA))
    row = run(engine, runner, requests, context, steps)
    print(f"no misses, {row['tiered']} tiered: {row['step ms']:.3f} ms, graph {row['replay ms']:.3f} ms", flush=True)
    return row


def max_requests(setup: ModelSetup, context: int, shared_prefix: int | None = None) -> int:
    length = context + ANSWER
    if shared_prefix is not None:
        return min(max_requests_with_prefix(setup.budget, length, shared_prefix), SEATS)
    fit = setup.budget.requests(length)
    if setup.host is not None:
        fit = min(fit, setup.budget.host_pages // setup.budget.geometry.row_pages(length))
    return min(fit, SEATS)


def serve_model(
    name: str, options: argparse.Namespace, memory: ServingMemory | None
) -> tuple[Rows, Rows, ServingMemory]:
    """Returns one model's table rows, its table rows of steps without misses, and the memory for the next model."""
    weights = CountedWeights(DTYPE, CUDA)
    decoder = Decoder(load_spec(name, options.share), weights, KvStorage(fp8_rows=True, fp8_keys=True))
    print(f"{name}: {weights.bytes * 1e-9:.1f} GB of weights", flush=True)
    memory = memory or ServingMemory.make(decoder, options)
    rows: Rows = []
    without_misses: Rows = []
    shortest, all_hits_requests = min(options.contexts), ALL_HITS_REQUESTS
    for number, tiers in enumerate(MODES):
        setup = memory.setup(decoder, weights.bytes, tiers)
        if tiers != "always":
            for length in options.contexts:
                fit = max_requests(setup, length)
                counts = [count for count in options.requests if count < fit] + [fit]
                rows += [{"model": name, "tiers": tiers} | row for row in measure(setup, length, counts, options.steps)]
                if tiers == "auto" and options.shared_prefix is not None and options.shared_prefix < length:
                    most = max_requests(setup, length, options.shared_prefix)
                    counts = list(dict.fromkeys([*counts, most]))
                    reused = measure(setup, length, counts, options.steps, options.shared_prefix)
                    rows += [{"model": name, "tiers": REUSE} | row for row in reused]
        # Steps without misses: the second `off` measures resident requests, `always` measures tiered requests.
        if number >= MODES.index("auto") and tiers != "auto":
            all_hits_requests = min(all_hits_requests, max_requests(setup, shortest))
            row = all_hits(setup, all_hits_requests, shortest, options.steps)
            without_misses.append({"model": name, "tiers": tiers} | row)
        del setup
        torch.cuda.empty_cache()
    return rows, without_misses, memory


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--png", type=Path, help="also draw the results to this file")
    parser.add_argument(
        "--models", nargs="+", default=["dsa-50b", "dsa-50b-dense"], help="configurations in hotset/lab/plan/configs"
    )
    parser.add_argument("--contexts", nargs="+", type=int, default=[32768, 131072], help="context lengths in tokens")
    parser.add_argument(
        "--requests",
        nargs="+",
        type=int,
        default=[1, 4, 16, 32],
        help="numbers of concurrent requests; the largest number that fits is always measured",
    )
    parser.add_argument("--shared-prefix", type=int, help="also measure prompts whose first tokens are the same")
    parser.add_argument("--share", type=int, default=1, help="number of layers that use the selection of one indexer")
    parser.add_argument("--device-gib", type=float, default=16, help="GiB of device memory for KV")
    parser.add_argument("--host-gib", type=float, default=80, help="GiB of the host store")
    parser.add_argument("--steps", type=int, default=64, help="timed steps per row of the table")
    parser.add_argument(
        "--quick", action="store_true", help="only dsa-50b-dense at 32k tokens, with a small host store"
    )
    options = parser.parse_args()
    require_gpu()
    if options.quick:
        options.models, options.contexts, options.host_gib, options.requests = ["dsa-50b-dense"], [32768], 34, [1, 16]
    rows: Rows = []
    without_misses: Rows = []
    memory = None
    for name in options.models:
        model_rows, model_without_misses, memory = serve_model(name, options, memory)
        rows += model_rows
        without_misses += model_without_misses
        gc.collect()  # frees these weights before the next model is loaded
        torch.cuda.empty_cache()
    note = "prompts are not computed; selections are synthetic, with the published miss rates"
    report("Serving", rows, options.json, note)
    if options.shared_prefix is not None:
        report(f"Contexts that share their first {options.shared_prefix} tokens", reuse_rows(rows), None)
    bars_json = options.json.with_name(f"{options.json.stem}-bars.json") if options.json else None
    report("Bars", [bar.row() for bar in bars(rows, without_misses)], bars_json)
    if options.png is not None:
        draw(rows, options.png)
    if memory is not None:
        memory.host.close()


if __name__ == "__main__":
    main()
