"""Measures what the prefix cache saves and costs: an engine with the cache against one without it, in one run.

    python benchmarks/prefix.py --json prefix.json --markdown prefix.md
    python benchmarks/prefix.py --model dsa-50b --device cuda --json prefix_gpu.json --markdown prefix_gpu.md

With a model directory (default: the demo model, on a CPU), two measurements:

1. Conversations. 16 conversations of 8 turns begin with the same system prompt of 4096 tokens and run at the same time.
   Each sends its next turn when the answer to the last one is complete. A turn adds a message of 64 random tokens and
   an answer of 32 tokens. The engine without the cache runs first. Its answers are part of the later prompts of both
   engines, so that both get the same prompts. Decoding is greedy. Batches differ between the engines, so sums can be
   rounded differently. If an answer differs, the log-probabilities of the first two different tokens are compared: a
   difference below 0.01 is a near tie, and any other difference is an error.
   Bars (required results): from the second turn on, the mean time to first token is at least 8 times lower with the
   cache; all turns together take at most a third of the time; no answer differs by more than a near tie.
2. Nothing shared. Requests with random prompts run on both engines in turn. The engine that begins alternates. The host
   store is so small that pages are evicted. Bar: the median of all ratios of times is at most 1.02.

On a CPU, one thread computes. Times are its CPU time, which depends less on other load on the machine than wall time.
The whole run takes about 35 minutes of CPU time, --quick a few seconds.

With the name of a configuration in hotset/lab/plan/configs (dsa-50b), weights are random, and requests start from a
prefix of 32k tokens that is only on the host:

  computed    the prompt is computed in chunks
  resident    the prefix is copied into device pages; then the rest of the prompt is computed
  known       the same, but only the last token of the prompt is not in the cache
  streamed    the prompt starts without device pages for its rows: each layer of the prefix passes through a workspace
  tiered      only index keys and a hot buffer come to the device; one token is computed
  decode      one decode step of a tiered request, for comparison

Bars: the first token comes at least 60 times sooner than with a computed prompt; rows and index keys are copied at 60 %
or more of the speed of one large copy from pinned memory in the same run; streamed and tiered requests have their first
token within the time of one step plus 30 ms. Times are wall times. Needs a GPU with 141 GB (H200); a run takes about
five minutes, most of it for the weights. Results are printed and written as they come. Cases that --seconds would cut
off are skipped. --layers and --device cpu make a trial without a GPU possible.
"""

import argparse
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from decode_server import CONFIGS, load_spec
from gpu_timing import require_gpu
from prefix_load import Client, Clock, Script, compare, converse, random_tokens
from prefix_start import PrefixStart, StartSizes
from report import Bar, make_parser, markdown_table, report, write_json

from hotset.base.config import EngineConfig
from hotset.base.errors import HotsetError
from hotset.engine.build import build_engine
from hotset.engine.core import Engine
from hotset.models.checkpoint.files import find_model

DEMO = str(Path(__file__).resolve().parents[1] / "models" / "demo-dsa")
SEED = 0
NAMES = {True: "with the cache", False: "without"}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of the run with a model directory."""

    conversations: int = 16
    turns: int = 8
    system: int = 4096
    message: int = 64
    answer: int = 32
    requests: int = 2  # with nothing shared, in one round
    prompt: int = 512  # of these requests
    rounds: int = 16

    @property
    def longest(self) -> int:
        return self.system + self.turns * (self.message + self.answer) + 64


QUICK = Sizes(conversations=3, turns=3, system=256, message=40, answer=8, requests=1, prompt=160, rounds=4)


@dataclass(slots=True)
class Results:
    """All tables of a run. Their rows are printed and written as they come."""

    options: argparse.Namespace
    tables: dict[str, list[Row]] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    failed: bool = False  # whether a case failed

    def add(self, title: str, rows: list[Row], *bars: Bar) -> None:
        for row in rows:
            shown = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
            print(f"{title}: {shown}", flush=True)
        self.tables.setdefault(title, []).extend(rows)
        self.bars += bars
        self.write()

    def write(self) -> None:
        """Writes everything measured so far."""
        tables = self.all_tables()
        if self.options.json is not None:
            write_json(self.options.json, "Prefix cache", tables)
        if self.options.markdown is not None:
            parts = [f"## {title}\n\n{markdown_table(table)}" for title, table in tables.items()]
            self.options.markdown.write_text("\n\n".join(parts) + "\n")

    def all_tables(self) -> dict[str, list[Row]]:
        return self.tables | ({"Bars": [bar.row() for bar in self.bars]} if self.bars else {})


@contextmanager
def opened(config: EngineConfig) -> Iterator[Engine]:
    engine = build_engine(config)
    try:
        yield engine
        engine.audit()
    finally:
        engine.close()
        gc.collect()  # frees the memory for the next engine


def make_config(options: argparse.Namespace, length: int, requests: int, *, cache: bool, host: int) -> EngineConfig:
    """Returns the configuration of a server, with device memory for `requests` requests of `length` tokens and a host
    store for `host` tokens."""
    return EngineConfig(
        model=options.model,
        device=options.device,
        max_model_len=length,
        device_kv_tokens=requests * length,
        host_kv_tokens=host,
        prefix_cache=cache,
        speculate=0,
    )


def measure_conversations(
    options: argparse.Namespace, sizes: Sizes, vocab: int, clock: Clock, results: Results
) -> None:
    script = Script.make(sizes.conversations, sizes.turns, sizes.system, sizes.message, vocab, SEED)
    length, count = sizes.longest, sizes.conversations
    configs = {
        cache: make_config(options, length, count, cache=cache, host=2 * count * length) for cache in (False, True)
    }
    title = f"{count} conversations of {sizes.turns} turns over a system prompt of {sizes.system} tokens"
    with opened(configs[False]) as engine:
        judge = Client(engine, clock)
        expected = converse(judge, script, sizes.answer)
        results.add(title, [{"engine": NAMES[False]} | expected.row()])
        with opened(configs[True]) as cached_engine:
            measured = converse(Client(cached_engine, clock), script, sizes.answer, expected)
        results.add(title, [{"engine": NAMES[True]} | measured.row()])
        compared = compare(expected, measured, judge)
    ttft = [statistics.mean(answer.ttft_s for answer in run.later) for run in (expected, measured)]
    results.add(
        "Answers",
        [
            {
                "compared": compared.compared,
                "different": compared.different,
                "largest difference of log-probabilities": max(compared.gaps, default=0.0),
            }
        ],
        Bar("later turns: time to first token, without / with the cache", ttft[0] / ttft[1], 8, at_least=True),
        Bar("all turns: time, without / with the cache", expected.seconds / measured.seconds, 3, at_least=True),
        Bar("answers that differ by more than a near tie", compared.wrong, 0),
    )


def measure_nothing_shared(
    options: argparse.Namespace, sizes: Sizes, vocab: int, clock: Clock, results: Results
) -> None:
    length = sizes.prompt + sizes.answer + 64
    host = sizes.requests * length + 128  # little more than the device holds: later rounds evict
    random = Random(SEED + 2)
    with (
        opened(make_config(options, length, sizes.requests, cache=True, host=host)) as cached_engine,
        opened(make_config(options, length, sizes.requests, cache=False, host=host)) as engine,
    ):
        clients = {True: Client(cached_engine, clock), False: Client(engine, clock)}

        def seconds(cache: bool) -> float:
            prompts = [random_tokens(random, sizes.prompt, vocab) for _ in range(sizes.requests)]
            start = clock()
            answers = clients[cache].answer(prompts, sizes.answer)
            assert not any(answer.cached for answer in answers), "random prompts must share nothing"
            return clock() - start

        for cache in (True, False):
            seconds(cache)  # warm-up
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(sizes.rounds):
            for cache in (number % 2 == 0, number % 2 == 1):
                times[cache].append(seconds(cache))
        host_pages = cached_engine.schedulers[0].ledger.host
        assert host_pages is not None and host_pages.evictions > 0, "the host store must be full"
        evictions = host_pages.evictions
    ratio = statistics.median(with_cache / off for with_cache, off in zip(times[True], times[False], strict=True))
    rows = [
        {"engine": NAMES[cache], "rounds": sizes.rounds, "median s": statistics.median(times[cache])}
        for cache in (False, True)
    ]
    rows[0] |= {"evicted pages": 0, "ratio": 1.0}
    rows[1] |= {"evicted pages": evictions, "ratio": ratio}
    title = f"Nothing shared: {sizes.requests} requests of {sizes.prompt} + {sizes.answer} tokens at a time"
    results.add(title, rows, Bar("nothing shared: time, with / without the cache", ratio, 1.02))


def measure_start(start: PrefixStart, seconds: float, clock: Clock, results: Results) -> None:
    """Measures all kinds of starts, until `seconds` have passed."""
    end = clock() + seconds
    rows: dict[str, Row] = {}
    for case in (start.computed, start.resident, start.known, start.decode, start.tiered, start.streamed):
        if clock() > end:
            print(f"skipped: {case.__name__}; {seconds:.0f} s have passed", flush=True)
            continue
        try:
            row = rows[case.__name__] = case()
        except Exception:  # the other cases are still worth measuring
            traceback.print_exc()
            results.failed = True
            continue
        results.add(f"First token after a prefix of {start.sizes.prefix} tokens on the host", [row])
    step_ms = rows["decode"]["first token ms"] if "decode" in rows else None
    bars = []
    if "resident" in rows:
        speed = start.copy_speed() * 1e-9
        sooner, share = rows["resident"]["sooner than computed"], rows["resident"]["GB/s"] / speed
        bars.append(Bar("resident: first token, computed / from the prefix", sooner, 60, at_least=True))
        if "known" in rows:
            bars.append(Bar("known: the same", rows["known"]["sooner than computed"], 60, at_least=True))
        bars.append(Bar(f"resident: copies, of the {speed:.3g} GB/s of one large copy", share, 0.6, at_least=True))
    for name in ("tiered", "streamed"):
        if name in rows and step_ms is not None:
            bars.append(Bar(f"{name}: first token, ms beyond one step", rows[name]["first token ms"] - step_ms, 30))
    results.bars += bars
    results.write()


def start_large_model(options: argparse.Namespace, clock: Clock, results: Results) -> None:
    began = clock()
    device, spec = torch.device(options.device), load_spec(options.model, layers=options.layers)
    sizes = StartSizes() if options.prefix is None else StartSizes(prefix=options.prefix)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    print(f"loading {options.model}, {spec.layers} layers", flush=True)
    start = PrefixStart(options.model, spec, device, dtype, sizes, clock)
    try:
        measure_start(start, options.seconds - (clock() - began), clock, results)
    finally:
        start.close()


def make_options() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--markdown", type=Path, help="also write the results as Markdown tables to this file")
    parser.add_argument("--model", default=DEMO, help="model directory, or a configuration in hotset/lab/plan/configs")
    parser.add_argument("--device", default="cpu", help="'cpu', 'cuda' or 'cuda:N'")
    parser.add_argument("--quick", action="store_true", help="few and short conversations")
    parser.add_argument("--conversations", type=int, help=f"number of conversations; default: {Sizes().conversations}")
    parser.add_argument("--turns", type=int, help=f"turns of each conversation; default: {Sizes().turns}")
    parser.add_argument("--prefix", type=int, help="tokens of the prefix on the host, for a configuration")
    parser.add_argument("--layers", type=int, help="only the first layers of a configuration, for a quick trial")
    parser.add_argument("--seconds", type=float, default=540, help="time limit, for a configuration")
    return parser


def sizes_of(options: argparse.Namespace) -> Sizes:
    sizes = QUICK if options.quick else Sizes()
    return replace(
        sizes, conversations=options.conversations or sizes.conversations, turns=options.turns or sizes.turns
    )


def main() -> None:
    options = make_options().parse_args()
    results = Results(options)
    clock: Clock = time.perf_counter
    if options.device == "cpu":
        torch.set_num_threads(1)  # one thread: its CPU time is the time of a step on a machine without other load
        clock = time.thread_time
    try:
        if options.device != "cpu":
            require_gpu()
        if (CONFIGS / f"{options.model}.json").exists():
            start_large_model(options, clock, results)
        else:
            sizes, vocab = sizes_of(options), find_model(options.model).spec.vocab
            measure_nothing_shared(options, sizes, vocab, clock, results)
            measure_conversations(options, sizes, vocab, clock, results)
    except HotsetError as error:
        sys.exit(f"error: {error}")
    for title, rows in results.all_tables().items():
        report(title, rows, None)
    if results.failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
