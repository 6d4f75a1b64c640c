"""Measures one rank of eight of DeepSeek-V3.2 and of GLM-5.2, at full size, on one GPU.

    python benchmarks/one_rank.py --model deepseek-v3.2 --json one_rank.json --markdown one_rank.md

Weights are random numbers in fp8 with the published shapes (hotset/lab/plan/configs). Rows and index keys are fp8. The
rank is one of eight that divide the experts and compute their own requests (dp8), or one of eight that divide heads,
columns, experts and vocabulary (tp8). The other seven are simulated: collectives move their bytes within this GPU, and
the experts receive as many tokens as eight ranks would send.

1. A prompt is computed and timed, and compared with the time that its matrix products would take, each at the rate that
   a large product of its type reaches in this run (fp8, bf16, fp32).
2. A tiered request must get the same tokens as a resident one.
3. Requests decode with tiers off and auto. Their prompts are not computed: random rows and index keys are stored. The
   indexer runs at full cost, but its selection is replaced by one with the published miss rates (LRU: 30, 13.4 and
   6.7 % of top-k with 1, 2 and 4 times top-k slots). Tokens are sampled with temperature 1 and top-p 0.95.

Columns:
  host pages     distinct: every request has host pages of its own; shared: more requests than host memory holds, so
                 several requests use the same host pages; shared prefix: with the prefix cache, and prompts whose first
                 --shared-prefix tokens are the same, so that these are on the host once, and their index keys on the
                 device once
  tokens/s       per GPU: with tp8, an eighth of the tokens of a step
  bytes ms       the bytes that a step reads (weights once, of experts those in use; index keys; selected rows), divided
                 by the copy bandwidth of this run
  experts        share of the rank's routed experts that a step uses, measured
  miss           share of the rows selected by tiered requests, outside their tails, that no slot held
  sampling ms    time of sampling, measured alone; the profile lists its torch operations with others
  NVLink ms      what the links between eight GPUs would add: bytes of all collectives / 450 GB/s, without latencies
  collectives    calls in a step, each of which adds its latency; the last column leaves the latencies out, too

Bars (required results): with tiers off and 16 requests or more, a step takes at most 1.35 times its bytes ms; the
prompt takes at most twice the time of its products; the best tokens/s with tiers auto is at least 2.2 times (32k) and
3.0 times (128k) that with tiers off for DeepSeek-V3.2, 3.2 and 5.0 times for GLM-5.2. Requests with shared host pages
count only at 128k, those with a shared prefix never.

Requires a GPU with 141 GB (H200). Results are written after every case. A case that --seconds would cut off is skipped.
"""

import argparse
import dataclasses
import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from gpu_timing import require_gpu
from one_rank_cases import (
    CHUNK,
    MAX_ANSWER,
    Case,
    Rank,
    Row,
    measure,
    measure_prefill,
    tokens_of_one_request,
)
from one_rank_limits import Rates, measure_rates
from one_rank_model import RankServer, load_spec, planned_bytes
from report import Bar, make_parser, markdown_table, report, write_json

from hotset.base.config import EngineConfig, TiersMode
from hotset.base.host_memory import host_memory
from hotset.base.units import GIB
from hotset.engine.sizing import KvBudget, kv_budget
from hotset.memory.host_store import HostStore
from hotset.models.attention.dsa_spec import MlaSpec
from hotset.models.spec import ModelSpec
from hotset.models.split import Split

SPLITS = {"dp8": Split(dp_size=8), "tp8": Split(tp_size=8)}
# Tokens of the computed prompt per step. With data parallelism, the experts receive eight times as many, and need
# memory for every pair of a token and an expert.
PREFILL_CHUNKS = {"dp8": 2048, "tp8": 8192}
SEATS = 128
GROWTH = 512  # tokens by which a context grows while it is measured, on average at most
MAX_HOST_SHARE = 0.9  # of the free host memory
UTILISATION = 0.92  # share of the GPU's memory that weights, workspace and KV may take
DEFAULT_WORKSPACE = 6 * GIB  # if no prompt was computed, whose peak would be known
FIRST_CASE_S = 30.0  # expected seconds of a case, until one has taken longer
STEP_BAR, STEP_BAR_REQUESTS, PREFILL_BAR = 1.35, 16, 2.0
TIERS_BARS = {
    ("deepseek-v3.2", 32768): 2.2,
    ("deepseek-v3.2", 131072): 3.0,
    ("glm-5.2", 32768): 3.2,
    ("glm-5.2", 131072): 5.0,
}
HIDDEN_COLUMNS = (
    "model",
    "split",
    "p99 ms",
    "collectives",
    "tokens/s with NVLink",
    "finite",
)  # too many for a terminal
SHARED_PAGES_COUNT_FROM = 131072  # the shortest context whose bar counts requests with shared host pages


@dataclass(frozen=True, slots=True)
class Results:
    """All tables of a run."""

    weights: list[Row] = field(default_factory=list)
    prefill: list[Row] = field(default_factory=list)
    serving: list[Row] = field(default_factory=list)
    failures: list[Row] = field(default_factory=list)

    def bars(self) -> list[Bar]:
        bars = [
            Bar(f"{_name(row)}: tokens of a tiered request that differ from a resident one's", row["differ"], 0)
            for row in self.weights
            if row["differ"] is not None
        ]
        if self.serving:
            not_finite = sum(not row["finite"] for row in self.serving)
            bars.append(Bar("cases with logits that are not finite", not_finite, 0))
        bars += [
            Bar(f"{_name(row)}: prompt of {row['prompt']} / its products", row["seconds / products"], PREFILL_BAR)
            for row in self.prefill
        ]
        bars += [
            Bar(
                f"{_name(row)} {row['context']}: step / bytes of {row['requests']} requests",
                row["step / bytes"],
                STEP_BAR,
            )
            for row in self.serving
            if row["tiers"] == "off" and row["requests"] >= STEP_BAR_REQUESTS
        ]
        for model, split, context in dict.fromkeys(map(_load, self.serving)):
            counted = [row for row in self.serving if _load(row) == (model, split, context) and _counts(row)]
            best = {
                tiers: max((row["tokens/s"] for row in counted if row["tiers"] == tiers), default=None)
                for tiers in ("off", "auto")
            }
            limit = TIERS_BARS.get((model, context))
            if best["off"] and best["auto"] and limit:
                what = f"{model} {split} {context}: best auto / best off"
                bars.append(Bar(what, best["auto"] / best["off"], limit, at_least=True))
        return bars

    def tables(self) -> dict[str, list[Row]]:
        tables = {
            "Weights of one rank": self.weights,
            "Prefill": self.prefill,
            "Decode": self.serving,
            "Failures": self.failures,
            "Bars": [bar.row() for bar in self.bars()],
        }
        return {title: rows for title, rows in tables.items() if rows}

    def write(self, options: argparse.Namespace) -> None:
        """Writes everything measured so far."""
        if options.json is not None:
            write_json(options.json, "One rank of eight", self.tables())
        if options.markdown is not None:
            parts = [f"## {title}\n\n{markdown_table(flat(rows))}" for title, rows in self.tables().items()]
            if any(row["profile ms"] for row in self.serving):
                parts.append(f"## Profile of a step, ms\n\n{markdown_table(self._profiles())}")
            options.markdown.write_text("\n\n".join(parts) + "\n")

    def _profiles(self) -> list[Row]:
        """Returns a row for each case of decode, with a column for each group of kernels."""
        groups = dict.fromkeys(group for row in self.serving for group in row["profile ms"])
        columns = ("context", "tiers", "host pages", "requests", "step ms")
        return [
            {key: row[key] for key in columns} | {group: row["profile ms"].get(group, 0.0) for group in groups}
            for row in self.serving
        ]


def _name(row: Row) -> str:
    return f"{row['model']} {row['split']}"


def _load(row: Row) -> tuple[str, str, int]:
    return row["model"], row["split"], row["context"]


def _counts(row: Row) -> bool:
    """Returns whether the row counts for the bars of tiers."""
    if row["host pages"] == "shared prefix":
        return False
    return bool(row["host pages"] != "shared" or row["context"] >= SHARED_PAGES_COUNT_FROM)


def flat(rows: list[Row]) -> list[Row]:
    """Returns the rows without nested values."""
    return [{key: value for key, value in row.items() if not isinstance(value, dict)} for row in rows]


def first_layers(spec: ModelSpec, layers: int) -> ModelSpec:
    """Returns the model with only its first layers, for a quick trial."""
    assert isinstance(spec.attention, MlaSpec) and spec.moe is not None
    index = spec.attention.index
    full = tuple(layer for layer in index.full_layers if layer < layers)
    moe = tuple(layer for layer in spec.moe.layers if layer < layers)
    attention = dataclasses.replace(spec.attention, index=dataclasses.replace(index, full_layers=full))
    return dataclasses.replace(spec, layers=layers, attention=attention, moe=dataclasses.replace(spec.moe, layers=moe))


def make_config(tiers: TiersMode, device_gib: float, options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        tiers=tiers,
        max_num_seqs=options.seats,
        max_num_batched_tokens=CHUNK,
        device_kv_gib=device_gib,
        host_kv_gib=None if tiers == "off" else host_gib(options),
        max_model_len=max(options.context) + MAX_ANSWER,
        kv_dtype="fp8",
        index_dtype="fp8",
    )


def host_gib(options: argparse.Namespace) -> float:
    """Returns the GiB of the host store: those asked for, or less if too little memory is free."""
    return float(min(options.host_gib, MAX_HOST_SHARE * host_memory().free / GIB))


def kv_gib(workspace: int) -> float:
    """Returns the GiB of device memory that are left for KV beside the weights and the workspace of prompts."""
    free, total = torch.cuda.mem_get_info()
    return (UTILISATION * total - (total - free) - workspace) / GIB


def cases_of(server: RankServer, tiers: TiersMode, options: argparse.Namespace) -> list[Case]:
    """Returns the cases of one mode of tiers, those with the most requests first: they decide the bars."""
    largest, others = [], []
    for context in options.context:
        fit = server.max_requests(context + GROWTH)
        if not fit:
            print(f"skipped: not one request of {context} tokens fits with tiers {tiers}", flush=True)
            continue
        largest.append(Case(tiers, context, fit))
        most = 0 if tiers == "off" else server.max_requests(context + GROWTH, shared_pages=True)
        if most > fit:
            largest.append(Case(tiers, context, most, shared_pages=True))
        if tiers != "off" and options.shared_prefix is not None and options.shared_prefix < context:
            reusing = server.max_requests_with_prefix(context + GROWTH, options.shared_prefix)
            counts = dict.fromkeys([reusing, fit])  # as many as fit, and as many as fit without the cache
            largest += [Case(tiers, context, count, shared_prefix=options.shared_prefix) for count in counts]
        others += [Case(tiers, context, count) for count in sorted(options.requests, reverse=True) if count < fit]
    return largest + others


class RankRun:
    """Loads one rank and measures all its cases."""

    def __init__(
        self,
        options: argparse.Namespace,
        spec: ModelSpec,
        rates: Rates,
        device: torch.device,
        dtype: torch.dtype,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.results = Results()
        self._clock = clock
        self._options, self._rates = options, rates
        self._end = clock() + options.seconds
        self._longest_case_s = FIRST_CASE_S
        split = SPLITS[options.split]
        planned = planned_bytes(spec, split, dtype, device)
        print(f"{options.model} {options.split}: {planned * 1e-9:.1f} GB of weights expected", flush=True)
        start = time.perf_counter()
        self._rank = Rank.load(
            name=options.model,
            split_name=options.split,
            spec=spec,
            split=split,
            device=device,
            dtype=dtype,
            max_step_tokens=CHUNK + options.seats,
        )
        weights = self._rank.weights
        self._weights_row: Row = {
            "model": options.model,
            "split": options.split,
            "expected GB": planned * 1e-9,
            "loaded GB": weights.total * 1e-9,
            "of which experts GB": weights.experts * 1e-9,
            "seconds": time.perf_counter() - start,
            "differ": None,
        }
        self._add(self.results.weights, self._weights_row)

    def measure(self) -> None:
        options, decoder = self._options, self._rank.decoder
        workspace = self._prefill() if options.prefill else DEFAULT_WORKSPACE
        release_memory()
        device_gib = options.device_gib or kv_gib(workspace)
        configs = {tiers: make_config(tiers, device_gib, options) for tiers in options.tiers}
        # Both budgets are computed before host memory is allocated, because they check how much of it is free.
        budgets = {
            tiers: kv_budget(config, decoder.kv_shape, self._rank.spec.context, decoder.device)
            for tiers, config in configs.items()
        }
        for tiers, budget in budgets.items():
            print(f"tiers {tiers}: {device_gib:.1f} GiB on the device, {budget.device_pages} pages", flush=True)
            host = None if tiers == "off" else self._host_store(budget)
            try:
                self._serve(RankServer(self._rank.model, self._rank.spec, configs[tiers], budget, host), tiers)
            finally:
                if host is not None:
                    release_memory()  # waits until nothing writes to the store any more
                    host.close()
            release_memory()

    def _prefill(self) -> int:
        """Measures a computed prompt. Returns the bytes of device memory that its steps needed."""
        options = self._options
        chunk = options.prefill_chunk or PREFILL_CHUNKS[options.split]
        case = partial(measure_prefill, self._rank, options.prefill, chunk, self._rates)
        row = self._run(f"prompt of {options.prefill} tokens", partial(case, profiles=not options.no_profile))
        if row is None:
            return DEFAULT_WORKSPACE
        self._add(self.results.prefill, row)
        return int(row["workspace GB"] * 1e9)

    def _host_store(self, budget: KvBudget) -> HostStore:
        decoder = self._rank.decoder
        print(f"allocating and pinning {budget.host_pages} host pages", flush=True)
        return HostStore(decoder.kv_shape, budget.host_pages, budget.geometry.page_rows, decoder.device)

    def _serve(self, server: RankServer, tiers: TiersMode) -> None:
        rank, options = self._rank, self._options
        if tiers != "off":
            compared = self._run("tokens of a tiered and a resident request", partial(self._compare_tokens, server))
            self._weights_row |= compared or {}
        for case in cases_of(server, tiers, options):
            start = self._clock()
            work = partial(measure, rank, server, case, self._rates, options.steps, profiles=not options.no_profile)
            row = self._run(str(case), work)
            if row is not None:
                self._add(self.results.serving, row)
            self._longest_case_s = max(self._longest_case_s, self._clock() - start)

    def _compare_tokens(self, server: RankServer) -> Row:
        shortest = min(self._options.context)
        resident = tokens_of_one_request(self._rank, server, shortest, "auto")
        tiered = tokens_of_one_request(self._rank, server, shortest, "always")
        differ = sum(left != right for left, right in zip(resident, tiered, strict=True))
        print(f"{differ} of {len(tiered)} tokens of a tiered request differ from those of a resident one", flush=True)
        return {"differ": differ}

    def _run(self, what: str, work: Callable[[], Row]) -> Row | None:
        """Returns the result of one case, or None if too little time is left for it, or if it failed."""
        left = self._end - self._clock()
        if left < self._longest_case_s:
            print(f"skipped: {what}; {left:.0f} s are left, a case may take {self._longest_case_s:.0f} s", flush=True)
            return None
        try:
            return work()
        except Exception as error:  # the other cases are still worth measuring
            traceback.print_exc()
            self._add(self.results.failures, {"case": what, "error": repr(error)[:300]})
            return None

    def _add(self, rows: list[Row], row: Row) -> None:
        """Adds the row to a table, prints it, and writes all results."""
        rows.append(row)
        (shown,) = flat([row])
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in shown.items()}, flush=True)
        if row.get("profile ms"):
            print("  ", {group: round(ms, 3) for group, ms in row["profile ms"].items()}, flush=True)
        self.results.write(self._options)


def release_memory() -> None:
    """Waits for the GPU, and returns the memory of objects that are no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def make_options() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--markdown", type=Path, help="also write the results as Markdown tables to this file")
    parser.add_argument("--model", default="deepseek-v3.2", help="a configuration in hotset/lab/plan/configs")
    parser.add_argument("--split", choices=tuple(SPLITS), default="dp8", help="how eight ranks divide the model")
    parser.add_argument("--context", nargs="+", type=int, default=[32768, 131072], help="context lengths in tokens")
    parser.add_argument("--tiers", nargs="+", choices=("off", "auto"), default=["off", "auto"], help="modes of tiers")
    parser.add_argument(
        "--requests",
        nargs="+",
        type=int,
        default=[1, 16, 32],
        help="numbers of concurrent requests; the largest number that fits is always measured",
    )
    parser.add_argument("--shared-prefix", type=int, help="also measure prompts whose first tokens are the same")
    parser.add_argument("--prefill", type=int, default=32768, help="length of the computed prompt; 0: none")
    parser.add_argument(
        "--prefill-chunk", type=int, help=f"tokens of it that one step computes; default: {PREFILL_CHUNKS}"
    )
    parser.add_argument("--layers", type=int, help="only the first layers of the model, for a quick trial")
    parser.add_argument("--device-gib", type=float, help="GiB of device memory for KV; default: what is left")
    parser.add_argument("--host-gib", type=float, default=96, help="GiB of the host store")
    parser.add_argument("--seats", type=int, default=SEATS, help="maximum number of concurrent requests")
    parser.add_argument("--steps", type=int, default=48, help="timed steps per row of the table")
    parser.add_argument("--no-profile", action="store_true", help="do not profile")
    parser.add_argument("--seconds", type=float, default=560, help="time limit; cases that would exceed it are skipped")
    return parser


def main() -> None:
    start = time.monotonic()
    options = make_options().parse_args()
    require_gpu()
    rates = measure_rates()
    print(rates, flush=True)
    release_memory()
    spec = load_spec(options.model)
    if options.layers is not None:
        spec = first_layers(spec, options.layers)
    options.seconds -= time.monotonic() - start
    run = RankRun(options, spec, rates, torch.device("cuda"), torch.bfloat16)
    run.measure()
    note = "prompts of decoding requests are not computed; their selections are synthetic"
    for title, rows in run.results.tables().items():
        hidden = HIDDEN_COLUMNS if title == "Decode" else ()
        report(title, [{key: row[key] for key in row if key not in hidden} for row in flat(rows)], None, note)
    if run.results.failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
