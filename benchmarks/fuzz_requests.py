"""Sends random requests, most of them valid, to every endpoint of a server, and checks that the server survives.

    OMP_NUM_THREADS=1 python benchmarks/fuzz_requests.py --json fuzz.json
    OMP_NUM_THREADS=1 python benchmarks/fuzz_requests.py --count 500 --log server.log
    OMP_NUM_THREADS=1 python benchmarks/fuzz_requests.py --only 1234
    OMP_NUM_THREADS=1 python benchmarks/fuzz_requests.py -- --disaggregate 1P1D

The script starts `hotset serve` with a small context, small pools and the flags after `--`. It sends --count requests,
--at-once at a time, to all endpoints, including those that are not in the OpenAPI document. About two thirds of the
requests are valid. The others have a wrong value, key, byte or header, a hostile structure, or a client that leaves
early. Request number N depends only on --seed and N, so that --only N repeats it alone. Each failed request is printed.

Columns: the answers of each endpoint by the first digit of their status; clients that left before a status arrived;
other failures (a server error within a stream, a stream without an end, or no answer within 120 s).

Bars: no answer is a 5xx; no request hangs or gets no answer; at least half of all requests are accepted (2xx); the
memory of all processes (PSS) grows by at most 32 MiB after the first fifth of the requests, both times measured
--settle seconds after the last answer; a fixed request has the same answer as before; SIGTERM ends the server within
its drain time.
"""

import asyncio
import os
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from hostile import DRAIN_SECONDS, ROOT, Json, Server, drained
from random_requests import ENDPOINTS, Case, case_of
from report import Bar, make_parser, report

FLAGS = ["--max-model-len", "2048", "--device-kv-tokens", "4096", "--host-kv-tokens", "8192", "--max-num-seqs", "16"]
DEADLINE_SECONDS = 120
MAX_GROWTH_MIB = 32
STREAM_ENDS = ("[DONE]", "message_stop", "response.completed", "response.incomplete", '"error"')
SERVER_ERRORS = ("internal_error", "server_error", "service_unavailable_error", "api_error", "overloaded_error")
FIXED = {"prompt": "Once upon a time", "max_tokens": 32, "ignore_eos": True, "temperature": 1.0, "seed": 7}


@dataclass
class Outcome:
    """Counts of the answers to all requests."""

    answers: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # by endpoint
    total: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0  # seconds

    def count(self, case: Case, what: str) -> None:
        self.answers[case.endpoint][what] += 1
        self.total[what] += 1

    def rows(self) -> list[Json]:
        columns = ["2xx", "3xx", "4xx", "5xx", "left", "failed"]
        every = [*sorted(self.answers.items()), ("all", self.total)]
        return [{"endpoint": name} | {column: counts[column] for column in columns} for name, counts in every]


class ClientLeft(Exception):
    """The client ends its connection in the middle of the body."""


async def half_of(body: bytes) -> AsyncIterator[bytes]:
    yield body[: len(body) // 2]
    raise ClientLeft


def failure_of(response: httpx.Response, text: str) -> str | None:
    """Returns what is wrong with a stream that was read to its end, or None."""
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        return None
    if any(f'"{kind}"' in text for kind in SERVER_ERRORS):
        return "an error of the server in a stream"
    return None if any(end in text for end in STREAM_ENDS) else "a stream without its end"


async def send(client: httpx.AsyncClient, case: Case, outcome: Outcome) -> str:
    """Sends one request and counts its answer. Returns the answer."""
    status, text, failure, began = 0, "", None, time.monotonic()
    content: Any = half_of(case.body) if case.half else case.body
    try:
        async with asyncio.timeout(case.leaves_after if case.leaves_after is not None else DEADLINE_SECONDS):
            async with client.stream(case.method, case.path, headers=case.headers, content=content) as response:
                status = response.status_code
                text = (await response.aread()).decode(errors="replace")
        failure = failure_of(response, text)
    except ClientLeft:
        pass
    except TimeoutError:
        failure = "hang" if case.leaves_after is None else None
    except httpx.HTTPError as error:
        failure = f"no answer: {error!r}"
    outcome.slowest = max(outcome.slowest, time.monotonic() - began)
    if status or failure is None:
        outcome.count(case, f"{status // 100}xx" if status else "left")
    if failure is not None:
        outcome.count(case, "failed")
    if failure is not None or status >= 500:
        print(f"number {case.number}: {failure or ''} {status} {text[:300]!r}\n  {shown(case)[:700]}", file=sys.stderr)
    return f"{status} {text}"


def shown(case: Case) -> str:
    return f"{case.method} {case.path} {dict(case.headers)} half={case.half} leaves={case.leaves_after} {case.body!r}"


async def send_all(url: str, cases: Iterable[Case], at_once: int, outcome: Outcome) -> None:
    waiting = iter(cases)

    async def sender(client: httpx.AsyncClient) -> None:
        for case in waiting:
            await send(client, case, outcome)
            if case.number % 500 == 499:
                print(f"{case.number + 1} requests: {dict(outcome.total)}", file=sys.stderr, flush=True)

    limits = httpx.Limits(max_keepalive_connections=0)  # a server may close idle connections
    async with httpx.AsyncClient(base_url=url, timeout=None, verify=False, limits=limits) as client:
        await asyncio.gather(*(sender(client) for _ in range(at_once)))


def fixed_answer(url: str) -> str:
    return str(httpx.post(f"{url}/v1/completions", json=FIXED, timeout=DEADLINE_SECONDS).json()["choices"][0]["text"])


def check_endpoints(url: str) -> None:
    """Ends the script if the server documents an endpoint that gets no request."""
    paths = httpx.get(f"{url}/openapi.json", timeout=DEADLINE_SECONDS).json()["paths"]
    documented = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    if missing := documented - ENDPOINTS.keys():
        sys.exit(f"endpoints without requests: {missing}")


def measure(server: Server, args: Any, outcome: Outcome) -> list[Bar]:
    """Sends all requests. Returns all bars except that of SIGTERM."""
    check_endpoints(server.url)
    expected = fixed_answer(server.url)
    memories = []
    for begin, end in [(0, args.count // 5), (args.count // 5, args.count)]:
        cases = (case_of(args.seed, number) for number in range(begin, end))
        asyncio.run(send_all(server.url, cases, args.at_once, outcome))
        time.sleep(args.settle)
        memories.append(server.memory())
    print(f"memory after a fifth and at the end: {memories} MiB; slowest answer: {outcome.slowest:.1f} s")
    return [
        Bar("answers with a 5xx", outcome.total["5xx"], 0),
        Bar("other failures, including hangs", outcome.total["failed"], 0),
        Bar("% of requests accepted", 100 * outcome.total["2xx"] / args.count, 50, at_least=True),
        Bar("MiB more than after a fifth", memories[1] - memories[0], MAX_GROWTH_MIB),
        Bar("the fixed request has another answer", float(fixed_answer(server.url) != expected), 0),
    ]


def main() -> None:
    own, flags = sys.argv[1:], list[str]()
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = make_parser(__doc__)
    parser.add_argument("--model", default=str(ROOT / "models" / "demo-dsa"))
    parser.add_argument("--count", type=int, default=10_000, help="requests")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--settle", type=float, default=40.0, help="seconds until memory must have returned")
    parser.add_argument("--only", type=int, default=None, help="send only the request of this number, and print it")
    parser.add_argument("--log", type=Path, help="write the server's log to this file")
    args = parser.parse_args(own)
    outcome, server = Outcome(), Server(args.model, [*FLAGS, *flags], args.log)
    try:
        if args.only is not None:
            asyncio.run(repeat(server.url, case_of(args.seed, args.only)))
            return
        bars = measure(server, args, outcome)
        bars.append(Bar("seconds until SIGTERM has ended the server", drained(server), DRAIN_SECONDS + 5))
    finally:
        if server.process.poll() is None:
            for pid in server.pids():
                os.kill(pid, signal.SIGKILL)
    report("Fuzzed requests", outcome.rows(), args.json)
    report("Bars", [bar.row() for bar in bars], None)
    sys.exit(not all(bar.met for bar in bars))


async def repeat(url: str, case: Case) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=None, verify=False) as client:
        print(shown(case), "", await send(client, case, Outcome()), sep="\n")


if __name__ == "__main__":
    main()
