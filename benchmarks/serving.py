"""Throughput and time between tokens against concurrency, tiers off and auto, of a model that fills one GPU.

    python benchmarks/serving.py --json serving.json --png serving.png

The model has made-up weights (benchmarks/configs: dsa-50b, and its twin with a dense feed-forward part of the same
bytes, which stands for wide expert parallelism: every expert is read at every step). Rows and index keys are fp8.
Prompts are not computed: made-up rows and keys land in the host store or on the device, as a handoff would bring them.
Made-up weights choose without locality, so the indexer runs at full cost and its choice is then overridden by a seeded
one that misses as published (least recently used: 30, 13.4 and 6.7 % of top-k with 1, 2 and 4 times top-k slots).

Predicted: bytes touched (weights once, of experts those touched; index keys; chosen rows) over the copy bandwidth, plus
missing rows at the rate of a bare gather, all measured in the same run.

Then 16 contexts of the shortest length with a selection that never changes, resident and tiered: what tiers cost where
nothing is missing.

Bars: steps with tiers off within 1.3 times their bytes; with tiers at least 80 % of predicted, at least 0.98 of off at
every concurrency that fits resident; best against best, dense twin: 1.8 times at 32k, 3 times at 128k; tiered with all
hits within 1.05 times resident.
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

import matplotlib
import torch
from gpu_timing import copy_bandwidth, replayed, require_gpu, seconds_of
from report import make_parser, report
from synthetic_prefill import LandedModel, Selection
from torch import Tensor

from hotset.base.config import EngineConfig, TiersMode
from hotset.base.sampling import SamplingParams
from hotset.engine.build import model_card
from hotset.engine.core import Engine, Replica
from hotset.engine.input_processor import InputProcessor
from hotset.engine.runner import Runner
from hotset.engine.sizing import KvBudget, kv_budget
from hotset.engine.workers.executor import InProcessExecutor
from hotset.kernels.swap_in import Copies, copy
from hotset.memory.device_pool import DevicePool
from hotset.memory.host_store import HostStore
from hotset.memory.pages import PageAllocator
from hotset.models.checkpoint import TensorSlice
from hotset.models.checkpoint.source import DummySource
from hotset.models.config_reader import read_spec
from hotset.models.decoder import Decoder
from hotset.models.spec import IndexSpec, KvStorage, MlaSpec, ModelSpec
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.kv_memory import KvMemory
from hotset.tiers.ledger import Ledger

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Rows = list[dict[str, Any]]

CONFIGS = Path(__file__).parent / "configs"
CUDA = torch.device("cuda")
CHUNK = 16384  # prompt rows that land in one step
SEATS = 128
MODES: tuple[TiersMode, ...] = ("off", "auto", "off", "always")  # off before and after: a GPU grows warm and slow
PAGE_ROWS = 64
ANSWER = 512  # tokens that any request may generate
LANDING_S = 200.0
IDLE_STEPS = 1000  # that an engine may take until all have left
ALL_HITS = 16  # requests
WARM_STEPS = 20  # until the least recently used rows are those that the selection gives up


@dataclass(frozen=True, slots=True)
class Setting:
    """One model within one memory budget."""

    config: EngineConfig
    decoder: Decoder
    budget: KvBudget
    pool: DevicePool
    host: HostStore | None
    weight_bytes: int  # of all that one step may read

    @property
    def spec(self) -> ModelSpec:
        return self.decoder.spec

    @property
    def index(self) -> IndexSpec:
        assert isinstance(self.spec.attention, MlaSpec)
        return self.spec.attention.index


class Weights(DummySource):
    """Made-up weights, counted; of the embedding a step reads next to nothing."""

    bytes = 0

    def load(
        self, name: str, shape: tuple[int, ...], *, out: Tensor | None = None, tensor_slice: TensorSlice | None = None
    ) -> Tensor:
        weight = super().load(name, shape, out=out, tensor_slice=tensor_slice)
        if "embed_tokens" not in name:
            self.bytes += weight.nbytes
        return weight


def load_spec(name: str, share: int) -> ModelSpec:
    """`share`: layers that one indexer serves."""
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
class Memory:
    """What all models are served in, for their rows and keys are alike: pinning takes longer than a run."""

    configs: dict[TiersMode, EngineConfig]
    budgets: dict[TiersMode, KvBudget]  # counted while the host's memory was free
    host: HostStore

    @staticmethod
    def make(decoder: Decoder, options: argparse.Namespace) -> "Memory":
        configs = {tiers: make_config(tiers, options) for tiers in set(MODES)}
        budgets = {
            tiers: kv_budget(config, decoder.kv_shape, decoder.spec.context, CUDA) for tiers, config in configs.items()
        }
        print(f"pinning {options.host_gib} GiB", flush=True)
        return Memory(configs, budgets, HostStore(decoder.kv_shape, budgets["auto"].host_pages, PAGE_ROWS, CUDA))

    def setting(self, decoder: Decoder, weight_bytes: int, tiers: TiersMode) -> Setting:
        config, budget = self.configs[tiers], self.budgets[tiers]
        pool = DevicePool(decoder.kv_shape, budget.geometry, budget.device_pages, CUDA)
        return Setting(config, decoder, budget, pool, None if tiers == "off" else self.host, weight_bytes)


def make_engine(setting: Setting, selection: Selection) -> tuple[Engine, Runner]:
    """An engine in memory that is there already: pinning it takes longer than the run."""
    config, budget = setting.config, setting.budget
    model = LandedModel(setting.decoder, selection, CHUNK + SEATS)
    memory = KvMemory(setting.pool, setting.host, SEATS, budget.max_model_len)
    memory.warm_up()
    on_host = PageAllocator(budget.host_pages) if setting.host else None
    ledger = Ledger(budget.geometry, PageAllocator(budget.device_pages), on_host)
    scheduler = Scheduler(ledger, SEATS, CHUNK, config.tiers)
    card = model_card(config, setting.spec, budget, CUDA, torch.bfloat16)
    runner = Runner(model, memory, SEATS, budget.max_model_len, setting.spec.vocab, graphs=True)
    return Engine(card, [Replica(scheduler, ledger)], InProcessExecutor(runner, memory), plans_in_flight=2), runner


def land(engine: Engine, requests: int, context: int) -> list[str]:
    """Adds `requests` contexts and steps until all of them decode. Their ids."""
    intake = InputProcessor(engine.card, seed=0)
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    choices = [choice for n in range(requests) for choice in intake.accept(str(n), [0] * context, params)]
    for choice in choices:
        engine.add(choice)
    start = time.perf_counter()
    while len(engine.step().token_ids) < requests:
        assert time.perf_counter() - start < LANDING_S, f"{requests} requests did not come to decode"
    return [choice.request_id for choice in choices]


def leave(engine: Engine, request_ids: list[str]) -> None:
    for request_id in request_ids:
        engine.abort(request_id)
    for _ in range(IDLE_STEPS):
        if engine.idle:
            return
        engine.step()
    raise AssertionError(f"{len(request_ids)} requests did not leave")


def timed_steps(engine: Engine, steps: int) -> list[float]:
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return times


def replay_seconds(runner: Runner, requests: int, has_tiered: bool) -> float:
    """A step's graph replayed with nothing between: what the GPU alone takes."""
    assert runner._graphs is not None
    graph = runner._graphs._find(runner._graphs.size_for(requests), has_tiered).graph
    return replayed(graph, 10)


def run(engine: Engine, runner: Runner, requests: int, context: int, steps: int) -> dict[str, Any]:
    """Lands `requests` contexts, lets all of them decode, and times `steps` steps."""
    start = time.perf_counter()
    request_ids = land(engine, requests, context)
    landing = time.perf_counter() - start
    timed_steps(engine, WARM_STEPS)
    before = engine.stats()
    times = timed_steps(engine, steps)[1:]  # the first one had been submitted, and its end waited for
    after = engine.stats()
    looked_up = sum(after.slot_lookups.values()) - sum(before.slot_lookups.values())
    missed = sum(after.slot_misses.values()) - sum(before.slot_misses.values())
    alone = replay_seconds(runner, requests, after.tiered > 0)
    leave(engine, request_ids)
    mean = statistics.mean(times)
    return {
        "context": context,
        "requests": requests,
        "tiered": after.tiered,
        "landing s": landing,
        "step ms": mean * 1e3,
        "p50 ms": statistics.median(times) * 1e3,
        "p99 ms": sorted(times)[int(len(times) * 0.99)] * 1e3,
        "tokens/s": requests / mean,
        "replay ms": alone * 1e3,
        "idle": max(0.0, 1 - alone / mean) if not after.tiered else None,
        "miss": missed / looked_up if looked_up else 0.0,
        "missed rows": missed / steps / max(1, len(after.slot_misses)),  # in one layer of one step
    }


def bytes_touched(setting: Setting, requests: int, context: int) -> float:
    """By one step: weights once, of experts those touched; all index keys; the chosen rows."""
    spec, shape = setting.spec, setting.decoder.kv_shape
    assert shape.key is not None
    keys = requests * context * shape.key.row_bytes * shape.groups
    rows = requests * shape.topk * shape.row.row_bytes * shape.layers
    total = float(setting.weight_bytes)
    moe = spec.moe
    if moe is not None:
        each = 3 * moe.width * spec.hidden * 2
        touched = moe.experts * (1 - (1 - moe.experts_per_token / moe.experts) ** requests)
        total -= len(moe.layers) * (moe.experts - touched) * each
    return total + keys + rows


def gather_seconds(setting: Setting, requests: int, missed_rows: float) -> float:
    """A bare gather of so many rows of one layer, spread over the host store."""
    if setting.host is None or missed_rows < 1:
        return 0.0
    each = max(1, round(missed_rows / requests))
    on_host, on_device = setting.host.rows.shape[1], setting.pool.rows.shape[1]
    calls = []
    for _ in range(4):
        host = torch.randint(on_host, (requests, each), device=CUDA).sort(dim=1).values
        device = torch.randperm(on_device, device=CUDA)[: requests * each].view(requests, each)
        count = torch.full((requests,), each, dtype=torch.int32, device=CUDA)
        copies = Copies(host, device, count)
        calls.append(partial(copy, copies, setting.host.rows[0], setting.pool.rows[0]))
    return seconds_of(calls)


def measure(setting: Setting, context: int, counts: list[int], steps: int) -> Rows:
    """One row for each number of requests."""
    selection = Selection.make(setting.index.topk, context, CUDA)
    engine, runner = make_engine(setting, selection)
    rows = []
    for requests in counts:
        row = run(engine, runner, requests, context, steps)
        touched_s = bytes_touched(setting, requests, context) / copy_bandwidth()
        swapped_s = gather_seconds(setting, requests, row["missed rows"]) * setting.spec.layers
        row |= {
            "bytes ms": touched_s * 1e3,
            "step / bytes": row["step ms"] / 1e3 / touched_s,
            "of predicted": (touched_s + swapped_s) / (row["step ms"] / 1e3),
        }
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
        rows.append(row)
    return rows


def all_hits(setting: Setting, requests: int, context: int, steps: int) -> dict[str, Any]:
    """Steps that miss nothing."""
    engine, runner = make_engine(setting, Selection.still(setting.index.topk, CUDA))
    row = run(engine, runner, requests, context, steps)
    print(
        f"all hits, {row['tiered']} tiered: {row['step ms']:.3f} ms, {row['replay ms']:.3f} ms of the GPU", flush=True
    )
    return row


def most_requests(setting: Setting, context: int) -> int:
    whole = context + ANSWER
    fit = setting.budget.requests(whole)
    if setting.host is not None:
        fit = min(fit, setting.budget.host_pages // setting.budget.geometry.row_pages(whole))
    return min(fit, SEATS)


def serve_model(name: str, options: argparse.Namespace, memory: Memory | None) -> tuple[Rows, Rows, Memory]:
    """All rows of one model, those of steps without misses, and the memory, which the next one may use."""
    weights = Weights(torch.bfloat16, CUDA)
    decoder = Decoder(load_spec(name, options.share), weights, KvStorage(fp8_rows=True, fp8_keys=True))
    print(f"{name}: {weights.bytes * 1e-9:.1f} GB of weights", flush=True)
    memory = memory or Memory.make(decoder, options)
    rows: Rows = []
    without_misses: Rows = []
    context, alike = min(options.contexts), ALL_HITS
    for turn, tiers in enumerate(MODES):
        setting = memory.setting(decoder, weights.bytes, tiers)
        if tiers != "always":
            for length in options.contexts:
                most = most_requests(setting, length)
                counts = [count for count in options.requests if count < most] + [most]
                rows += [
                    {"model": name, "tiers": tiers} | row for row in measure(setting, length, counts, options.steps)
                ]
        if turn >= MODES.index("auto") and tiers != "auto":
            alike = min(alike, most_requests(setting, context))
            without_misses.append({"model": name, "tiers": tiers} | all_hits(setting, alike, context, options.steps))
        del setting
        torch.cuda.empty_cache()
    return rows, without_misses, memory


def rows_of(rows: Rows, model: str, context: int, tiers: str) -> Rows:
    return [row for row in rows if (row["model"], row["context"], row["tiers"]) == (model, context, tiers)]


def best_of(rows: Rows, model: str, context: int, tiers: str) -> dict[str, Any]:
    """The row of most tokens/s."""
    return max(rows_of(rows, model, context, tiers), key=lambda row: float(row["tokens/s"]))


def verdicts(rows: Rows, without_misses: Rows) -> Rows:
    """The bars, and what was measured against them."""
    found = []

    def bar(what: str, measured: float, wanted: float, at_least: bool) -> None:
        met = measured >= wanted if at_least else measured <= wanted
        sign = ">=" if at_least else "<="
        found.append({"bar": what, "measured": measured, "wanted": f"{sign} {wanted}", "met": met})

    off = [row for row in rows if row["tiers"] == "off"]
    bar("tiers off: worst step / bytes", max(row["step / bytes"] for row in off), 1.3, False)
    bar("tiers off: largest share of a step that the GPU idles", max(row["idle"] for row in off), 0.05, False)
    for model, context in sorted({(row["model"], row["context"]) for row in rows}):
        here = [row for row in rows if (row["model"], row["context"]) == (model, context)]
        best = {tiers: best_of(rows, model, context, tiers)["tokens/s"] for tiers in ("off", "auto")}
        wanted = {32768: 1.8, 131072: 3.0}.get(context, 1.0) if model.endswith("dense") else 1.0
        bar(f"{model} {context}: best auto / best off", best["auto"] / best["off"], wanted, True)
        fitting = []
        for row in here:
            if row["tiers"] == "auto" and not row["tiered"]:
                off_here = [of["tokens/s"] for of in here if of["tiers"] == "off" and of["requests"] == row["requests"]]
                fitting += [row["tokens/s"] / statistics.mean(off_here)] if off_here else []
        if fitting:
            bar(f"{model} {context}: least auto / off where all is resident", min(fitting), 0.98, True)
        top = best_of(rows, model, context, "auto")
        bar(f"{model} {context}: best with tiers, of predicted", top["of predicted"], 0.8, True)
    for resident, tiered in zip(without_misses[::2], without_misses[1::2], strict=True):
        what = f"{resident['model']}: step of {resident['requests']}, tiered with all hits / resident"
        bar(what, tiered["step ms"] / resident["step ms"], 1.05, False)
    return found


def by_requests(rows: Rows, model: str, context: int, tiers: str) -> dict[str, list[float]]:
    """Columns to draw; the two turns of `off` are one line."""
    here = rows_of(rows, model, context, tiers)
    counts = sorted({row["requests"] for row in here})
    turns = [[row for row in here if row["requests"] == count] for count in counts]
    drawn = {key: [statistics.mean(row[key] for row in turn) for turn in turns] for key in ("p50 ms", "p99 ms")}
    drawn["tokens/s"] = [statistics.mean(row["tokens/s"] for row in turn) for turn in turns]
    drawn["predicted"] = [statistics.mean(row["tokens/s"] / row["of predicted"] for row in turn) for turn in turns]
    return drawn | {"requests": counts}


def plot(rows: Rows, path: Path) -> None:
    """Speed above, time between tokens below; beside the best point with tiers, how many times the best without."""
    keys = list(dict.fromkeys((row["model"], row["context"]) for row in rows))
    size = (3.4 * len(keys), 5.6)
    figure, axes = plt.subplots(2, len(keys), figsize=size, layout="constrained", squeeze=False, sharex="col")
    for (speed, between), (model, context) in zip(axes.T, keys, strict=True):
        best = {}
        for tiers, colour in (("auto", "#1f77b4"), ("off", "#888888")):
            drawn = by_requests(rows, model, context, tiers)
            at = drawn["requests"]
            speed.plot(at, drawn["predicted"], ":", color=colour, label=f"{tiers}, predicted")
            speed.plot(at, drawn["tokens/s"], "o-", color=colour, label=f"tiers {tiers}")
            between.plot(at, drawn["p50 ms"], "o-", color=colour, label=f"tiers {tiers}, p50")
            between.plot(at, drawn["p99 ms"], ":", color=colour, label=f"{tiers}, p99")
            best[tiers] = best_of(rows, model, context, tiers)
        times = f"{best['auto']['tokens/s'] / best['off']['tokens/s']:.1f}x"
        place = {"textcoords": "offset points", "ha": "right", "va": "top", "weight": "bold", "color": "#1f77b4"}
        speed.annotate(times, (best["auto"]["requests"], best["auto"]["tokens/s"]), (6, -24), **place)
        speed.set(title=f"{model}, {context // 1024}k", xlim=(0, None), ylim=(0, None))
        between.set(xlabel="requests", ylim=(0, None))
    axes[0, 0].set_ylabel("tokens/s")
    axes[1, 0].set_ylabel("ms between tokens")
    for axis in axes[:, 0]:
        axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--png", type=Path, help="a picture of the results")
    parser.add_argument("--models", nargs="+", default=["dsa-50b", "dsa-50b-dense"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[32768, 131072])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 4, 16, 32], help="and the most that fit")
    parser.add_argument("--share", type=int, default=1, help="layers that one indexer serves")
    parser.add_argument("--device-gib", type=float, default=16)
    parser.add_argument("--host-gib", type=float, default=80)
    parser.add_argument("--steps", type=int, default=64, help="timed, of the answers' 256 tokens")
    parser.add_argument("--quick", action="store_true", help="the dense twin at 32k alone, with a small host store")
    options = parser.parse_args()
    require_gpu()
    if options.quick:
        options.models, options.contexts, options.host_gib, options.requests = ["dsa-50b-dense"], [32768], 34, [1, 16]
    rows: Rows = []
    without_misses: Rows = []
    memory = None
    for name in options.models:
        found, found_without, memory = serve_model(name, options, memory)
        rows += found
        without_misses += found_without
        gc.collect()  # the weights of this one before those of the next
        torch.cuda.empty_cache()
    note = "prompts land uncomputed; the indexer's choice is overridden by one that misses as published"
    report("Serving", rows, options.json, note)
    bars = options.json.with_name(f"{options.json.stem}-bars.json") if options.json else None
    report("Bars", verdicts(rows, without_misses), bars)
    if options.png is not None:
        plot(rows, options.png)
    if memory is not None:
        memory.host.close()


if __name__ == "__main__":
    main()
