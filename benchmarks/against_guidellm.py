"""Measures one server with `hotset bench` and with guidellm, in turn, and compares the medians.

    python -m venv build/guidellm && build/guidellm/bin/pip install guidellm==0.8.1
    python benchmarks/against_guidellm.py --guidellm build/guidellm/bin/guidellm

Both send texts of the same length to /v1/completions and ask for answers of the same length, in rounds A B A B. With
--together both run at the same time, so that other work on the machine disturbs both alike; but two loops of equal
requests can fall into step, and then one of them sends all its prompts while the other one decodes, which changes ttft
and tpot, but not e2e and tokens/s. The server is `hotset serve` with the demo model, a running one (--url), or one that
waits fixed times (--simulate), which shows how far both are from the truth.

The names differ: guidellm's ITL is the mean time between the tokens of one request, which `hotset bench` calls tpot;
guidellm's TPOT also contains the time to the first token. Its request latency is e2e. Tokens/s are the output tokens of
a round over the time from its first request to the end of its last one, computed in the same way for both.

The bar: each median differs by at most 5 %. Medians over all requests of all rounds; tokens/s over the rounds.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from report import Bar, make_parser, report

ROOT = Path(__file__).resolve().parents[1]
DEMO = str(ROOT / "models" / "demo-dsa")
LIMIT = 0.05
OURS, THEIRS = "hotset bench", "guidellm"
QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
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


Samples = dict[str, list[Sample]]  # by the name of the program


def bench_command(options: argparse.Namespace, url: str, result: Path) -> list[str]:
    command = [sys.executable, "-m", "hotset", "bench", url, "--prompt-format", "text", "--warmup", "0"]
    command += ["--concurrency", str(options.concurrency), "--num-requests", str(options.requests)]
    command += ["--input-tokens", str(options.input_tokens), "--output-tokens", str(options.output_tokens)]
    return [*command, "--json", str(result)]


def bench_samples(options: argparse.Namespace, url: str, folder: Path) -> list[Sample]:
    """Runs `hotset bench` once."""
    result = folder / "hotset.json"
    subprocess.run(bench_command(options, url, result), cwd=ROOT, check=True, **QUIET)
    return read_bench(result)


def read_bench(result: Path) -> list[Sample]:
    [load] = json.loads(result.read_text())["loads"]
    return [
        Sample(
            ttft=request["ttft_ms"] / 1e3,
            tpot=request["tpot_ms"] / 1e3,
            e2e=request["e2e_ms"] / 1e3,
            start=load["began"] + request["sent"],
            end=load["began"] + request["ended"],
            output_tokens=request["output_tokens"],
        )
        for request in load["requests"]
    ]


def guidellm_samples(options: argparse.Namespace, url: str, folder: Path) -> list[Sample]:
    """Runs guidellm once."""
    concurrent = f"kind=concurrent,streams={options.concurrency}"
    lengths = f"prompt_tokens={options.input_tokens},output_tokens={options.output_tokens}"
    command = [str(Path(options.guidellm).absolute()), "run", "--disable-console-interactive"]
    command += ["--backend", f"kind=openai_http,target={url},request_format=/v1/completions"]
    command += ["--profile", "kind=synchronous" if options.concurrency == 1 else concurrent]
    command += ["--constraint", f"kind=max_requests,count={options.requests}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={options.model}"]
    command += ["--data", f"kind=synthetic_text,{lengths}"]
    subprocess.run(command, cwd=folder, check=True, **QUIET)
    [benchmark] = json.loads((folder / "benchmarks.json").read_text())["benchmarks"]
    return [
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


def samples_in_turn(options: argparse.Namespace, url: str, folder: Path) -> Samples:
    """Runs one program after the other."""
    return {OURS: bench_samples(options, url, folder), THEIRS: guidellm_samples(options, url, folder)}


def samples_together(options: argparse.Namespace, url: str, folder: Path) -> Samples:
    """Runs both programs at the same time. `hotset bench` starts first and is interrupted when guidellm has ended; only
    its requests from the time of guidellm's requests count."""
    result = folder / "hotset.json"
    endless = argparse.Namespace(**{**vars(options), "requests": 1_000_000})
    with subprocess.Popen(bench_command(endless, url, result), cwd=ROOT, **QUIET) as bench:
        try:
            theirs = guidellm_samples(options, url, folder)
        finally:
            bench.send_signal(signal.SIGINT)
    start, end = min(sample.start for sample in theirs), max(sample.end for sample in theirs)
    ours = [sample for sample in read_bench(result) if start <= sample.start and sample.end <= end]
    return {OURS: ours, THEIRS: theirs}


def tokens_per_second(samples: list[Sample]) -> float:
    seconds = max(sample.end for sample in samples) - min(sample.start for sample in samples)
    return sum(sample.output_tokens for sample in samples) / seconds


def medians(rounds: list[list[Sample]]) -> dict[str, float]:
    samples = [sample for one_round in rounds for sample in one_round]
    latencies = {name: statistics.median(getattr(s, name) for s in samples) * 1e3 for name in ("ttft", "tpot", "e2e")}
    speed = statistics.median(tokens_per_second(one_round) for one_round in rounds)
    return {f"{name} ms": value for name, value in latencies.items()} | {"tokens/s": speed}


@contextmanager
def hotset_server(model: str) -> Iterator[str]:
    """Runs a server on one core, so that another one is free for the program that measures."""
    command = [sys.executable, "-m", "hotset", "serve", model, "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
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
    parser.add_argument("--together", action="store_true", help="run both at the same time, for a busy machine")
    parser.add_argument("--rounds", type=int, default=4, help="runs of each program")
    parser.add_argument("--requests", type=int, default=20, help="requests per run")
    parser.add_argument("--concurrency", type=int, default=1, help="requests at the same time")
    parser.add_argument("--input-tokens", type=int, default=128, help="length of prompts")
    parser.add_argument("--output-tokens", type=int, default=64, help="length of answers")
    options = parser.parse_args()
    one_round = samples_together if options.together else samples_in_turn
    rounds: dict[str, list[list[Sample]]] = {OURS: [], THEIRS: []}
    with tempfile.TemporaryDirectory() as folder, chosen_server(options) as url:
        bench_samples(options, url, Path(folder))  # warm-up
        for _ in range(options.rounds):
            for name, samples in one_round(options, url, Path(folder)).items():
                rounds[name].append(samples)
                print(name, {key: round(value, 2) for key, value in medians([samples]).items()}, flush=True)
    found = {name: medians(of_program) for name, of_program in rounds.items()}
    if options.simulate:
        whole = FIRST_TOKEN_SECONDS + (options.output_tokens - 1) * TOKEN_SECONDS
        truth = {"ttft ms": FIRST_TOKEN_SECONDS * 1e3, "tpot ms": TOKEN_SECONDS * 1e3, "e2e ms": whole * 1e3}
        found["waited"] = truth | {"tokens/s": options.concurrency * options.output_tokens / whole}
    report("Medians", [{"program": name} | values for name, values in found.items()], options.json)
    ours, theirs = found[OURS], found[THEIRS]
    bars = [Bar(f"{name}: difference from guidellm", abs(ours[name] / theirs[name] - 1), LIMIT) for name in ours]
    bars_json = options.json.with_name(f"{options.json.stem}-bars.json") if options.json else None
    report("Bars", [bar.row() for bar in bars], bars_json)
    sys.exit(not all(bar.met for bar in bars))


if __name__ == "__main__":
    main()
