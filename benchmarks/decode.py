"""Measures decode steps of large models with random weights on one GPU: of a whole model, or of one rank of eight.

    python benchmarks/decode.py --model dsa-50b-dense dsa-50b --requests 1 4 16 --no-profile --json decode.json
    python benchmarks/decode.py --model dsa-50b --tiers off --requests 1 4 16 --context 32768
    python benchmarks/decode.py --model dsa-50b-dense --drafts 0 3
    python benchmarks/one_rank.py --model deepseek-v3.2 --json one_rank.json --markdown one_rank.md

Weights are random numbers with the published shapes, in the formats of the checkpoints (hotset/lab/plan/configs). Rows
and index keys are fp8. With --split dp8, eight ranks divide the experts, and each computes its own requests. With
--split tp8, they divide heads, columns, experts and vocabulary. One rank is measured, and the other seven are
simulated: collectives move their bytes within this GPU, and the experts receive as many tokens as eight ranks would
send.

1. With --prefill, a prompt is computed and timed, and compared with the time that its matrix products would take, each
   at the rate that a large product of its type reaches in this run (fp8, bf16, fp32).
2. A tiered request must get the same tokens as a resident one.
3. Requests decode with tiers off and auto. Their prompts are not computed: random rows and index keys are stored. The
   indexer runs at full cost, but its selection is replaced by one with the published miss rates (LRU: 30, 13.4 and
   6.7 % of top-k with 1, 2 and 4 times top-k slots). The number of accepted --drafts is drawn at random, 1.65 of 3 on
   average. With --all-hits N, N requests also decode with a constant selection, resident and tiered.

Columns:
  host pages     distinct: every request has host pages of its own; shared: more requests than host memory holds, so
                 several requests use the same host pages; shared prefix: prompts begin with the same --shared-prefix
                 tokens, and the prefix cache holds their rows once on the host and their index keys once on the device
  tokens/s       per GPU: with tp8, an eighth of the tokens of a step
  per step       tokens that a step adds to each answer
  rows/token     rows of all layers that are copied from the host, for each token of an answer
  bytes ms       the bytes that a step reads (weights once, but only of the experts in use; index keys; selected rows),
                 divided by the copy bandwidth of this run
  experts        measured share of the rank's routed experts that a step uses
  replay ms      time of the step's CUDA graph, replayed alone
  idle           share of a step in which the GPU waits: 1 - replay ms / step ms; only if no request is tiered
  miss           share of the rows selected by tiered requests, outside their tails, that no slot held
  sampling ms    time of sampling, measured alone; the profile lists its torch operations with others
  NVLink ms      what the links between eight GPUs would add: bytes of all collectives / 450 GB/s, without latencies
  collectives    calls in a step; the latency of each would add to the step time, and is not in NVLink ms

Tables of one request, from a profile: milliseconds by part of the model, and the kernels of the layer of median length.
A profile slows steps down, by a fifth for one request, because it delays early launches.

Bars (required results): with tiers off and 16 requests or more, a step takes at most 1.35 times its bytes ms, and one
request of dsa-50b 1.6 times; the GPU idles for at most 5 % of a step; while all requests are resident, tiers auto has
0.98 of the tokens/s of off; a tiered step without misses takes at most 1.05 times a resident one; the prompt takes at
most twice the time of its products; the best tokens/s with tiers auto is at least 2.2 times (32k) and 3.0 times (128k)
that with tiers off for DeepSeek-V3.2, 3.2 and 5.0 times for GLM-5.2, 2.5 and 3.8 times for dsa-50b-dense. Requests
with shared host pages count only at 128k. Requests with a shared prefix or drafts do not count.

Requires a GPU with 141 GB (H200). Results are written after every case. A case that --seconds would cut off is skipped.
"""

import argparse
import gc
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decode_cases import (
    CHUNK,
    MAX_ANSWER,
    Case,
    Rank,
    measure,
    measure_prefill,
    tokens_of_one_request,
)
from decode_limits import Rates, measure_rates
from decode_results import HIDDEN_COLUMNS, Results, flat
from decode_server import RankServer, load_spec, planned_bytes
from gpu_timing import require_gpu
from report import Row, make_parser, report

from hotset.base.config import EngineConfig, TiersMode
from hotset.base.host_memory import host_memory
from hotset.base.units import GIB
from hotset.engine.sizing import KvBudget, kv_budget
from hotset.memory.host_store import HostStore
from hotset.models.spec import ModelSpec
from hotset.models.split import WHOLE_MODEL, Split

SPLITS = {"one": WHOLE_MODEL, "dp8": Split(dp_size=8), "tp8": Split(tp_size=8)}
# Tokens of the computed prompt per step. With data parallelism, the experts receive eight times as many, and need
# memory for every pair of a token and an expert.
PREFILL_CHUNKS = {"one": 8192, "dp8": 2048, "tp8": 8192}
SEATS = 128
GROWTH = 512  # tokens by which a context grows while it is measured, on average at most
MAX_HOST_SHARE = 0.9  # of the free host memory
UTILISATION = 0.92  # share of the GPU's memory that weights, workspace and KV may take
DEFAULT_WORKSPACE = 6 * GIB  # used if no computed prompt has shown the peak
FIRST_CASE_S = 30.0  # expected seconds of a case, until one has taken longer


def make_config(tiers: TiersMode, drafts: int, device_gib: float, options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        tiers=tiers,
        speculate=drafts,
        max_num_seqs=options.seats,
        max_num_batched_tokens=CHUNK,
        device_kv_gib=device_gib,
        host_kv_gib=None if tiers == "off" else host_gib(options),
        max_model_len=max(options.context) + MAX_ANSWER,
        kv_dtype="fp8",
        index_dtype="fp8",
    )


def host_gib(options: argparse.Namespace) -> float:
    """Returns the GiB of the host store: --host-gib, or less if too little memory is free."""
    return float(min(options.host_gib, MAX_HOST_SHARE * host_memory().free / GIB))


def kv_gib(workspace: int) -> float:
    """Returns the GiB of device memory that are left for KV beside the weights and the workspace of prompts."""
    free, total = torch.cuda.mem_get_info()
    return (UTILISATION * total - (total - free) - workspace) / GIB


def cases_of(server: RankServer, tiers: TiersMode, drafts: int, options: argparse.Namespace) -> list[Case]:
    """Returns the cases of one mode of tiers. Cases with the most requests come first, because they decide the bars."""
    largest: list[Case] = []
    others: list[Case] = []
    for context in options.context:
        fit = server.max_requests(context + GROWTH)
        if not fit:
            print(f"skipped: not one request of {context} tokens fits with tiers {tiers}", flush=True)
            continue
        if drafts:
            largest.append(Case(tiers, context, fit, drafts=drafts))
            continue
        largest.append(Case(tiers, context, fit))
        if options.all_hits and options.all_hits <= fit and context == min(options.context):
            all_hits: TiersMode = "off" if tiers == "off" else "always"
            others.append(Case(all_hits, context, options.all_hits, misses=False))
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
        name: str,
        spec: ModelSpec,
        rates: Rates,
        device: torch.device,
        dtype: torch.dtype,
        results: Results,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.results = results
        self._clock, self._name = clock, name
        self._options, self._rates = options, rates
        self._end = clock() + options.seconds
        self._longest_case_s = FIRST_CASE_S
        split = SPLITS[options.split]
        planned = planned_bytes(spec, split, dtype, device)
        print(f"{name} {options.split}: {planned * 1e-9:.1f} GB of weights expected", flush=True)
        start = time.perf_counter()
        self._rank = Rank.load(
            name=name,
            split_name=options.split,
            spec=spec,
            split=split,
            device=device,
            dtype=dtype,
            max_step_tokens=CHUNK + options.seats,
        )
        weights = self._rank.weights
        self._weights_row: Row = {
            "model": name,
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
        modes = [(tiers, drafts) for drafts in options.drafts for tiers in options.tiers]
        configs = {mode: make_config(*mode, device_gib, options) for mode in modes}
        # All budgets are computed before host memory is allocated, because they check how much of it is free.
        budgets = {
            mode: kv_budget(config, decoder.kv_shape, self._rank.spec.context, decoder.device)
            for mode, config in configs.items()
        }
        for mode, budget in budgets.items():
            tiers, drafts = mode
            print(f"tiers {tiers}: {device_gib:.1f} GiB on the device, {budget.device_pages} pages", flush=True)
            host = None if tiers == "off" else self._host_store(budget)
            try:
                server = RankServer(self._rank.model, self._rank.spec, configs[mode], budget, host)
                self._serve(server, tiers, drafts)
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

    def _serve(self, server: RankServer, tiers: TiersMode, drafts: int) -> None:
        rank, options = self._rank, self._options
        if tiers != "off" and not drafts:
            compared = self._run("tokens of a tiered and a resident request", partial(self._compare_tokens, server))
            self._weights_row |= compared or {}
        for case in cases_of(server, tiers, drafts, options):
            start = self._clock()
            work = partial(measure, rank, server, case, self._rates, options.steps, temperature=options.temperature)
            row = self._run(str(case), partial(work, profiles=not options.no_profile))
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
    parser.add_argument(
        "--model", nargs="+", default=["dsa-50b", "dsa-50b-dense"], help="configurations in hotset/lab/plan/configs"
    )
    parser.add_argument(
        "--split", choices=tuple(SPLITS), default="one", help="how eight ranks divide the model; one: whole"
    )
    parser.add_argument("--context", nargs="+", type=int, default=[32768, 131072], help="context lengths in tokens")
    parser.add_argument("--tiers", nargs="+", choices=("off", "auto"), default=["off", "auto"], help="modes of tiers")
    parser.add_argument("--drafts", nargs="+", type=int, default=[0], help="drafts of each request in every step")
    parser.add_argument(
        "--requests",
        nargs="+",
        type=int,
        default=[1, 16, 32],
        help="numbers of concurrent requests; the largest number that fits is always measured",
    )
    parser.add_argument("--shared-prefix", type=int, help="also measure prompts whose first tokens are the same")
    parser.add_argument("--all-hits", type=int, help="also measure this many requests without missing rows")
    parser.add_argument("--share", type=int, help="number of layers that use the selection of one indexer")
    parser.add_argument("--temperature", type=float, default=0.0, help="of sampling; 0: greedy; else with top-p 0.95")
    parser.add_argument("--prefill", type=int, default=0, help="length of the computed prompt; 0: none")
    parser.add_argument(
        "--prefill-chunk", type=int, help=f"prompt tokens that one step computes; default: {PREFILL_CHUNKS}"
    )
    parser.add_argument("--layers", type=int, help="only the first layers of the model, for a quick trial")
    parser.add_argument("--device-gib", type=float, default=16, help="GiB of device memory for KV; 0: what is left")
    parser.add_argument("--host-gib", type=float, default=80, help="GiB of the host store")
    parser.add_argument("--seats", type=int, default=SEATS, help="maximum number of concurrent requests")
    parser.add_argument("--steps", type=int, default=48, help="timed steps per row of the table")
    parser.add_argument("--no-profile", action="store_true", help="do not profile")
    parser.add_argument("--seconds", type=float, default=560, help="time limit; cases that would exceed it are skipped")
    return parser


def main(**defaults: Any) -> None:
    """Runs the benchmark. `defaults` replace those of the options."""
    start = time.monotonic()
    parser = make_options()
    parser.set_defaults(**defaults)
    options = parser.parse_args()
    require_gpu()
    rates = measure_rates()
    print(rates, flush=True)
    release_memory()
    results = Results()
    options.seconds -= time.monotonic() - start
    for name in options.model:
        began = time.monotonic()
        drafting = any(options.drafts)
        spec = load_spec(name, layers=options.layers, layers_per_indexer=options.share, with_mtp=drafting)
        run = RankRun(options, name, spec, rates, torch.device("cuda"), torch.bfloat16, results)
        run.measure()
        del run
        release_memory()
        options.seconds -= time.monotonic() - began
    note = "prompts of decoding requests are not computed; their selections are synthetic"
    for title, rows in results.tables().items():
        hidden = HIDDEN_COLUMNS if title == "Decode" else ()
        report(title, [{key: row[key] for key in row if key not in hidden} for row in flat(rows)], None, note)
    if results.failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
