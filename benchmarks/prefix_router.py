"""Measures how many tokens of prompts two decode workers behind the router find in their prefix caches, against one
decode worker that has the memory of both. Then one of the two is killed, and its sessions must go on at the other.

    python benchmarks/prefix_router.py --json prefix_router.json

The processes are real: `hotset router`, a prefill worker and one or two decode workers (`hotset serve --role`), which
publish KV events. 32 sessions begin with the same system prompt. Each turn repeats the whole history and adds a message
of random tokens; the answer is part of the next turn. 8 requests run at a time. In both cases the host stores of the
decode workers together have room for `--memory` times the tokens of all sessions, by default two thirds, so sessions
evict each other. One and two workers get the same requests in the same order. The hit rate is the sum of
`usage.prompt_tokens_details.cached_tokens` over the sum of `usage.prompt_tokens`.

Bar: the hit rate of two workers is at least 95 % of that of one; otherwise the exit status is 1. If a request fails,
also after the death of a worker, the benchmark fails. The run takes some minutes on a CPU; --quick has 8 sessions of 3
turns.
"""

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from report import Bar, make_parser, report

DEMO = str(Path(__file__).resolve().parents[1] / "models" / "demo-dsa")
PAGE_ROWS = 64
TOKEN_IDS = range(16, 4096)
EVENTS = ["--kv-events", "tcp://127.0.0.1:0", "--kv-events-replay", "tcp://127.0.0.1:0"]
START_SECONDS = 300.0
STOP_SECONDS = 30.0
REQUEST_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of the run, in tokens unless stated otherwise."""

    sessions: int = 32  # number of sessions
    turns: int = 4  # number of turns of each session
    at_once: int = 8  # number of requests in flight
    system: int = 256
    message: int = 128
    answer: int = 8
    memory: float = 2 / 3  # the room in the host stores of all decode workers together / the tokens of all sessions

    @property
    def longest(self) -> int:
        """The length of a session after one turn more."""
        return self.system + (self.turns + 1) * (self.message + self.answer)

    @property
    def stored(self) -> int:
        """The tokens in the host stores of all decode workers together. A worker has room for three long requests."""
        needed = self.sessions * self.turns * (self.message + self.answer) + self.system
        return max(int(self.memory * needed), 2 * 3 * self.longest) // (2 * PAGE_ROWS) * 2 * PAGE_ROWS


@dataclass
class HitRate:
    """Totals over requests."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0

    @property
    def share(self) -> float:
        return self.cached_tokens / self.prompt_tokens


@contextmanager
def process(name: str, *arguments: str) -> "Iterator[tuple[str, subprocess.Popen[str]]]":
    """Runs `hotset`, and yields its URL and the process when it is ready."""
    command = [sys.executable, "-m", "hotset", *arguments, "--host", "127.0.0.1", "--port", "0"]
    with tempfile.TemporaryFile("w+") as log:
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert running.stdout is not None
            line = running.stdout.readline()
            url = re.search(r"http://\S+:\d+", line)
            if url is None:
                log.seek(0)
                raise SystemExit(f"{name} did not start: {log.read()[-2000:]}")
            yield url[0], running
        finally:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
                running.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    running.wait(STOP_SECONDS if number == signal.SIGTERM else None)
                    break
            if running.stdout is not None:
                running.stdout.close()


class Session:
    """A conversation in token ids."""

    def __init__(self, system: list[int], sizes: Sizes, seed: int) -> None:
        self._tokens = list(system)
        self._sizes = sizes
        self._random = random.Random(seed)

    def turn(self, http: httpx.Client, url: str) -> dict[str, Any]:
        """Sends the next turn, and returns the usage of the answer."""
        self._tokens += self._random.choices(TOKEN_IDS, k=self._sizes.message)
        limits = {"max_tokens": self._sizes.answer, "ignore_eos": True, "temperature": 0}
        body = {"prompt": self._tokens, **limits, "return_token_ids": True}
        answer = http.post(f"{url}/v1/completions", json=body, timeout=REQUEST_SECONDS)
        answer.raise_for_status()
        self._tokens += answer.json()["choices"][0]["token_ids"]
        usage: dict[str, Any] = answer.json()["usage"]
        return usage


def serve(url: str, sessions: list[Session], turns: int, at_once: int, seed: int) -> HitRate:
    """Serves all turns of all sessions in a random order, `at_once` at a time."""
    rate, rng = HitRate(), random.Random(seed)
    began = time.perf_counter()
    with httpx.Client(trust_env=False) as http, ThreadPoolExecutor(at_once) as threads:
        for _ in range(turns):
            rng.shuffle(sessions)
            for usage in threads.map(lambda session: session.turn(http, url), sessions):
                rate.prompt_tokens += usage["prompt_tokens"]
                rate.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
    rate.seconds = time.perf_counter() - began
    return rate


@contextmanager
def deployment(model: str, sizes: Sizes, decode_workers: int) -> "Iterator[tuple[str, list[subprocess.Popen[str]]]]":
    """Runs a router, a prefill worker and decode workers, and yields the router's URL and the decode workers."""
    sized = ["--device", "cpu", "--device-kv-tokens", str(2 * sizes.longest), "--max-model-len", str(sizes.longest)]
    prefill_flags = ["--role", "prefill", *sized, "--host-kv-tokens", str(sizes.stored), *EVENTS]
    decode_flags = ["--role", "decode", *sized, "--host-kv-tokens", str(sizes.stored // decode_workers), *EVENTS]
    with ExitStack() as stack:
        prefill, _ = stack.enter_context(process("prefill", "serve", model, *prefill_flags))
        decode = [
            stack.enter_context(process(f"decode {number}", "serve", model, *decode_flags))
            for number in range(decode_workers)
        ]
        urls = [url for url, _ in decode]
        url, _ = stack.enter_context(process("router", "router", "--prefill", prefill, "--decode", *urls))
        deadline = time.monotonic() + START_SECONDS
        while not _ready(url, 1 + decode_workers):
            if time.monotonic() > deadline:
                raise SystemExit(f"the router did not find all workers and their KV events: {_workers(url)}")
            time.sleep(0.1)
        yield url, [running for _, running in decode]


def _workers(url: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = httpx.get(f"{url}/workers", timeout=30, trust_env=False).json()["workers"]
    return listed


def _ready(url: str, workers: int) -> bool:
    listed = _workers(url)
    return len(listed) == workers and all(worker["up"] and worker["kv_events_synced"] for worker in listed)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default=DEMO, help="directory of the model")
    parser.add_argument("--turns", type=int, help=f"turns of each session; default: {Sizes().turns}")
    parser.add_argument("--memory", type=float, help="room in the host stores / tokens of all sessions; default: 2/3")
    parser.add_argument("--quick", action="store_true", help="a small run")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sizes = Sizes(sessions=8, turns=3, at_once=4) if options.quick else Sizes()
    sizes = replace(sizes, turns=options.turns or sizes.turns, memory=options.memory or sizes.memory)
    system = random.Random(0).choices(TOKEN_IDS, k=sizes.system)
    rows, rates = [], {}
    for count in (1, 2):
        sessions = [Session(system, sizes, seed) for seed in range(1, sizes.sessions + 1)]
        with deployment(options.model, sizes, count) as (url, decode):
            rates[count] = rate = serve(url, sessions, sizes.turns, sizes.at_once, seed=1)
            rows.append(row(f"{count} decode", rate))
            print(rows[-1], flush=True)
            if count == 2:
                decode[0].kill()
                rate = serve(url, sessions, 1, sizes.at_once, seed=2)
                rows.append(row("1 of 2 killed", rate))
    report("Hit rates through the router", rows, options.json)
    bar = Bar("hit rate of two workers / of one", rates[2].share / rates[1].share, 0.95, at_least=True)
    print(bar.row())
    sys.exit(0 if bar.met else 1)


def row(name: str, rate: HitRate) -> dict[str, Any]:
    return {
        "workers": name,
        "prompt tokens": rate.prompt_tokens,
        "cached tokens": rate.cached_tokens,
        "hit rate": rate.share,
        "seconds": rate.seconds,
    }


if __name__ == "__main__":
    main()
