"""Measures one server with `hotset bench` and with guidellm, in turn, and compares the results.

    python -m venv build/guidellm && build/guidellm/bin/pip install guidellm==0.8.1
    python benchmarks/against_guidellm.py --guidellm build/guidellm/bin/guidellm

Both send texts of the same length to /v1/completions and ask for answers of the same length, in rounds A B A B. The
server is `hotset serve` with the demo model, a running one (--url), or one that waits fixed times (--simulate).

The names differ: guidellm's ITL is the mean time between the tokens of one request, which `hotset bench` calls tpot;
guidellm's TPOT also contains the time to the first token. Its request latency is e2e. Tokens/s are those of one
request: its output tokens / e2e. `send gap` is the time between the end of a request and the start of the next one.

A generator takes CPU time, and where it shares the cores with the server, the server becomes slower. So the server that
this script starts has a core of its own. Hotset's /metrics tell how long the server itself took for the same requests,
in the mean. The second table divides the means that each program measured by those of the server: if the medians
differ, it shows whether the programs or the server's times did.

    Bar     each median differs from guidellm's by at most 5 %
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from aiohttp import web
from report import Bar, make_parser, report

from hotset.lab.bench.benchmark import Benchmark
from hotset.lab.bench.config import BenchConfig

ROOT = Path(__file__).resolve().parents[1]
DEMO = str(ROOT / "models" / "demo-dsa")
LIMIT = 0.05
OURS, THEIRS = "hotset bench", "guidellm"
LATENCIES = ("ttft", "tpot", "e2e")
ENDPOINT = '{endpoint="/v1/completions"}'
# The samples of /metrics with the sum and the number of the server's own times.
SERVER_TIMES = {
    "ttft": ("hotset_time_to_first_token_seconds_sum", "hotset_time_to_first_token_seconds_count"),
    "tpot": ("hotset_inter_token_seconds_sum", "hotset_inter_token_seconds_count"),
    "e2e": (f"hotset_http_request_seconds_sum{ENDPOINT}", f"hotset_http_request_seconds_count{ENDPOINT}"),
}
SERVER_SAMPLES = [sample for pair in SERVER_TIMES.values() for sample in pair]
FIRST_TOKEN_SECONDS, TOKEN_SECONDS = 0.4, 0.03  # of the simulated server


@dataclass(frozen=True)
class Sample:
    """One request, in seconds."""

    ttft: float
    tpot: float
    e2e: float
    start: float
    end: float
    output_tokens: int


@dataclass(frozen=True)
class Run:
    """One run of one program, and the server's own means of the same requests."""

    samples: list[Sample]
    server: dict[str, float]


def bench_run(options: argparse.Namespace, url: str, folder: Path) -> Run:
    """Runs `hotset bench` once, in this process, so that the server's times are read after its first short requests."""
    load = {"rate": str(options.rate), "burstiness": inf} if options.rate else {"concurrency": str(options.concurrency)}
    config = BenchConfig(
        **load,
        prompt_format="text",
        num_requests=options.requests,
        input_tokens=str(options.input_tokens),
        output_tokens=str(options.output_tokens),
        warmup=0,
    )

    async def run() -> Run:
        async with Benchmark(url, config, asyncio.Event()) as benchmark:
            before = server_sums(url)
            [result] = (await benchmark.run()).results
            server = server_means(before, server_sums(url))
        samples = [
            Sample(
                ttft=record.ttft or record.e2e,
                tpot=record.tpot or 0.0,
                e2e=record.e2e,
                start=result.began + record.sent,
                end=result.began + record.ended,
                output_tokens=record.output_tokens,
            )
            for record in result.completed
        ]
        return Run(samples, server)

    return asyncio.run(run())


def guidellm_run(options: argparse.Namespace, url: str, folder: Path) -> Run:
    """Runs guidellm once."""
    profile = "synchronous" if options.concurrency == 1 else f"concurrent,streams={options.concurrency}"
    profile = f"constant,rate={options.rate}" if options.rate else profile
    lengths = f"prompt_tokens={options.input_tokens},output_tokens={options.output_tokens}"
    command = [str(Path(options.guidellm).absolute()), "run", "--disable-console-interactive"]
    command += ["--backend", f"kind=openai_http,target={url},request_format=/v1/completions"]
    command += ["--profile", f"kind={profile}"]
    command += ["--constraint", f"kind=max_requests,count={options.requests}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={options.model}"]
    command += ["--data", f"kind=synthetic_text,{lengths}"]
    before = server_sums(url)
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = server_means(before, server_sums(url))
    [benchmark] = json.loads((folder / "benchmarks.json").read_text())["benchmarks"]
    samples = [
        Sample(
            ttft=request["time_to_first_token_ms"] / 1e3,
            tpot=request["inter_token_latency_ms"] / 1e3,
            e2e=request["request_latency"],
            start=request["request_start_time"],
            end=request["request_end_time"],
            output_tokens=request["output_tokens"],
        )
        for request in benchmark["requests"]["successful"]
    ]
    return Run(samples, server)


def server_sums(url: str) -> dict[str, float]:
    """Returns the sums and counts of the times that a Hotset server has measured; empty for another server."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
            text = reply.read().decode()
    except urllib.error.HTTPError:
        return {}
    found = (re.search(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE) for sample in SERVER_SAMPLES)
    return {sample: float(match[1]) if match else 0.0 for sample, match in zip(SERVER_SAMPLES, found, strict=True)}


def server_means(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Returns the server's mean times between two calls of `server_sums`, in seconds."""
    spent = {sample: after[sample] - before[sample] for sample in after}
    return {name: spent[total] / spent[count] for name, (total, count) in SERVER_TIMES.items()} if spent else {}


def medians(samples: list[Sample]) -> dict[str, float]:
    ordered = sorted(samples, key=lambda sample: sample.start)
    gaps = [later.start - earlier.end for earlier, later in pairwise(ordered)]
    return {
        **{f"{name} ms": statistics.median(getattr(s, name) for s in samples) * 1e3 for name in LATENCIES},
        "tokens/s": statistics.median(sample.output_tokens / sample.e2e for sample in samples),
        "send gap ms": statistics.median(gaps) * 1e3,
    }


def ratios(runs: list[Run]) -> dict[str, float]:
    """Returns the means that a program measured, over those of the server."""
    measured = {name: [statistics.mean(getattr(s, name) for s in run.samples) for run in runs] for name in LATENCIES}
    own = {name: [run.server[name] for run in runs] for name in LATENCIES}
    return {
        **{f"server {name} ms": statistics.mean(own[name]) * 1e3 for name in LATENCIES},
        **{f"{name} / server": sum(measured[name]) / sum(own[name]) for name in LATENCIES},
    }


@contextmanager
def hotset_server(model: str) -> Iterator[str]:
    """Runs a server on the first core. The others are left to the programs that measure."""
    server_core, *other_cores = sorted(os.sched_getaffinity(0))
    command = ["taskset", "--cpu-list", str(server_core), sys.executable, "-m", "hotset", "serve", model, "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    os.sched_setaffinity(0, other_cores or [server_core])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes) as server:
        try:
            assert server.stdout is not None
            ready = server.stdout.readline()
            yield next(word for word in ready.split() if word.startswith("http"))
        finally:
            server.terminate()


@contextmanager
def simulated_server() -> Iterator[str]:
    """Runs a server in a thread. It counts words as tokens, and waits the same times for every request."""
    started = threading.Event()
    address: list[str] = []

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "simulated"}]})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({})

    async def complete(request: web.Request) -> web.StreamResponse:
        due = asyncio.get_running_loop().time() + FIRST_TOKEN_SECONDS
        body = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = body["max_tokens"]
        for number in range(count):
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            due += TOKEN_SECONDS
            reason = "length" if number == count - 1 else None
            await response.write(event({"choices": [{"index": 0, "text": " word", "finish_reason": reason}]}))
        usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": count}
        await response.write(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        return response

    def event(chunk: dict[str, Any]) -> bytes:
        return f"data: {json.dumps(chunk)}\n\n".encode()

    async def serve() -> None:
        app = web.Application()
        app.add_routes([web.get("/v1/models", models), web.get("/health", health)])
        app.add_routes([web.post("/v1/completions", complete)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        started.set()
        await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    assert started.wait(60), "the simulated server did not start"
    yield address[0]


@contextmanager
def chosen_server(options: argparse.Namespace) -> Iterator[str]:
    if options.url:
        yield options.url
    else:
        with simulated_server() if options.simulate else hotset_server(options.model) as url:
            yield url


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--guidellm", required=True, help="the program guidellm")
    parser.add_argument("--model", default=DEMO, help="model directory; guidellm counts tokens with its tokenizer")
    parser.add_argument("--url", help="measure this running server, which serves --model")
    parser.add_argument("--simulate", action="store_true", help="measure a server that waits fixed times")
    parser.add_argument("--rounds", type=int, default=4, help="runs of each program")
    parser.add_argument("--requests", type=int, default=20, help="requests per run")
    parser.add_argument("--concurrency", type=int, default=1, help="requests at the same time")
    parser.add_argument("--rate", type=float, help="send requests evenly spaced, so many per second")
    parser.add_argument("--input-tokens", type=int, default=128, help="length of prompts")
    parser.add_argument("--output-tokens", type=int, default=64, help="length of answers")
    options = parser.parse_args()
    programs = {OURS: bench_run, THEIRS: guidellm_run}
    runs: dict[str, list[Run]] = {name: [] for name in programs}
    with tempfile.TemporaryDirectory() as folder, chosen_server(options) as url:
        bench_run(options, url, Path(folder))  # warm-up
        for _ in range(options.rounds):
            for name, run in programs.items():
                runs[name].append(run(options, url, Path(folder)))
                newest = medians(runs[name][-1].samples)
                print(name, {key: round(value, 2) for key, value in newest.items()}, flush=True)
    sys.exit(not show(options, runs))


def show(options: argparse.Namespace, runs: dict[str, list[Run]]) -> bool:
    """Prints the tables. Returns whether all bars are met."""
    found = {
        name: medians([sample for run in of_program for sample in run.samples]) for name, of_program in runs.items()
    }
    rows = dict(found)
    if options.simulate:
        whole = FIRST_TOKEN_SECONDS + (options.output_tokens - 1) * TOKEN_SECONDS
        truth = {"ttft ms": FIRST_TOKEN_SECONDS * 1e3, "tpot ms": TOKEN_SECONDS * 1e3, "e2e ms": whole * 1e3}
        rows["waited"] = {**truth, "tokens/s": options.output_tokens / whole, "send gap ms": 0.0}
    report("Medians", [{"program": name} | values for name, values in rows.items()], options.json)
    if all(run.server for run in runs[OURS]):
        to_server = [{"program": name} | ratios(of_program) for name, of_program in runs.items()]
        ratios_json = options.json.with_name(f"{options.json.stem}-ratios.json") if options.json else None
        report("Means against the server's own", to_server, ratios_json)
    names = [name for name in found[OURS] if name != "send gap ms"]
    bars = [Bar(f"{n}: difference from guidellm", abs(found[OURS][n] / found[THEIRS][n] - 1), LIMIT) for n in names]
    bars_json = options.json.with_name(f"{options.json.stem}-bars.json") if options.json else None
    report("Bars", [bar.row() for bar in bars], bars_json)
    return all(bar.met for bar in bars)


if __name__ == "__main__":
    main()
