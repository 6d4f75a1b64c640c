"""The first requests of a trace against a server, as a client sees them.

    hotset serve MODEL --disaggregate 1P1D --port 8000 &
    hotset serve MODEL --port 8001 &
    python benchmarks/replay.py TRACE http://127.0.0.1:8000 --beside http://127.0.0.1:8001 --json replay.json

The trace has one request in each line: `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, the blocks of
512 tokens that a prompt consists of; equal blocks are equal tokens here too. All lengths are scaled by one factor, so
that the longest request has `--context` tokens; arrivals come `--faster` times as fast. Any server of /v1/completions
that takes token ids and `ignore_eos` will do. `--beside` gets the same requests when the first has answered all.

TTFT is the time to the first event of the answer, counted from when the request was due; ITL the time from one event
to the next, which brings one token, or several where one alone is no text. Exits 1 unless every request
was answered in full.
"""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from report import make_parser, report
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

BLOCK_TOKENS = 512  # of the trace
FIRST_TOKEN = 16  # ids below may be special
SHORTEST_ANSWER = 2  # or there would be no time between tokens


@dataclass(frozen=True, slots=True)
class Request:
    at_s: float
    token_ids: tuple[int, ...]
    answer: int  # tokens


@dataclass(slots=True)
class Answer:
    tokens: int = 0
    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    failure: str | None = None


def read_trace(path: Path, count: int, context: int, faster: float, vocab: int) -> list[Request]:
    """ValueError, OSError or KeyError where it is no such trace."""
    with path.open() as lines:
        entries = [json.loads(line) for line in itertools.islice(lines, count)]
    if not entries:
        raise ValueError("it is empty")
    longest = max(entry["input_length"] + entry["output_length"] for entry in entries)
    factor = min(1.0, (context - SHORTEST_ANSWER) / longest)  # an answer may be made longer by so much
    begin = entries[0]["timestamp"]
    return [
        Request(
            (entry["timestamp"] - begin) / 1e3 / faster,
            prompt(entry["hash_ids"], max(1, int(entry["input_length"] * factor)), factor, vocab),
            max(SHORTEST_ANSWER, int(entry["output_length"] * factor)),
        )
        for entry in entries
    ]


def prompt(blocks: Sequence[int], length: int, factor: float, vocab: int) -> tuple[int, ...]:
    """`length` tokens; a block has the same ones wherever it occurs."""
    each = max(1, int(BLOCK_TOKENS * factor))
    token_ids: list[int] = []
    for block in itertools.chain(blocks, itertools.count(-1, -1)):  # scaled blocks may fall a little short
        if len(token_ids) >= length:
            break
        seed = block if block >= 0 else 2**32 + length - block
        token_ids += np.random.default_rng(seed).integers(FIRST_TOKEN, vocab, each).tolist()
    return tuple(token_ids[:length])


async def send(client: httpx.AsyncClient, model: str, request: Request, due: float) -> Answer:
    answer = Answer()
    try:
        await stream(client, model, request, due, answer)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        answer.failure = f"{type(error).__name__}: {error}"
    if answer.failure is None and answer.tokens != request.answer:
        answer.failure = f"{answer.tokens} tokens of {request.answer}"
    return answer


async def stream(client: httpx.AsyncClient, model: str, request: Request, due: float, answer: Answer) -> None:
    body = {
        "model": model,
        "prompt": request.token_ids,
        "max_tokens": request.answer,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            answer.failure = f"status {response.status_code}: {(await response.aread()).decode(errors='replace')[:200]}"
            return
        last, ended = due, False
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                last = take(event, last, answer)
        if not ended and answer.failure is None:
            answer.failure = "the stream broke off"


def take(event: dict[str, Any], last: float, answer: Answer) -> float:
    """Notes one event of an answer. Returns the time of the last one with something of the answer in it."""
    if "error" in event:
        answer.failure = str(event["error"])[:200]
    if event.get("usage"):
        answer.tokens = event["usage"]["completion_tokens"]
    choices = event.get("choices") or []
    if not choices or (not choices[0]["text"] and choices[0].get("finish_reason")):
        return last
    now = time.perf_counter()
    if answer.ttft_s is None:
        answer.ttft_s = now - last
    else:
        answer.gaps_s.append(now - last)
    return now


async def replay(url: str, requests: Sequence[Request], timeout_s: float, done: Callable[[], None]) -> Any:
    """Answers in the order of the requests, and the seconds that all of it took."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    async with httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits) as client:
        found = (await client.get("/v1/models")).raise_for_status().json()
        model = found["data"][0]["id"]
        started = time.perf_counter()

        async def one(request: Request) -> Answer:
            due = started + request.at_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            answer = await send(client, model, request, due)
            done()
            return answer

        answers = await asyncio.gather(*(one(request) for request in requests))
    return answers, time.perf_counter() - started


def row(url: str, requests: Sequence[Request], answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    def percentile(values: Sequence[float], share: float) -> float | None:
        return float(np.percentile(values, share)) * 1e3 if values else None

    whole = [answer for answer in answers if answer.failure is None]
    first = [answer.ttft_s for answer in whole if answer.ttft_s is not None]
    gaps = [gap for answer in whole for gap in answer.gaps_s]
    return {
        "server": url,
        "requests": len(requests),
        "failed": len(answers) - len(whole),
        "TTFT p50 ms": percentile(first, 50),
        "TTFT p99 ms": percentile(first, 99),
        "ITL p50 ms": percentile(gaps, 50),
        "ITL p99 ms": percentile(gaps, 99),
        "tokens/s": sum(answer.tokens for answer in whole) / seconds,
        "seconds": seconds,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("trace", type=Path, help="a trace as Mooncake's, in JSON lines")
    parser.add_argument("url", help="a server, without /v1")
    parser.add_argument("--beside", help="another one, for comparison")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--context", type=int, default=4096, help="tokens of the longest request")
    parser.add_argument("--faster", type=float, default=1.0, help="how much faster requests arrive")
    parser.add_argument("--vocab", type=int, default=1000, help="token ids are below this")
    parser.add_argument("--timeout", type=float, default=300.0, help="read timeout of a request, in seconds")
    options = parser.parse_args()
    try:
        requests = read_trace(options.trace, options.requests, options.context, options.faster, options.vocab)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"error: {options.trace} is no trace: {error!r}")
    rows, failures = [], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    for url in filter(None, (options.url, options.beside)):
        with Progress(*columns, transient=True) as progress:
            bar = progress.add_task(url, total=len(requests))
            try:
                answers, seconds = asyncio.run(replay(url, requests, options.timeout, partial(progress.advance, bar)))
            except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                sys.exit(f"error: {url} cannot be asked for its models: {error!r}")
        rows.append(row(url, requests, answers, seconds))
        failures += [f"{url}, request {n}: {a.failure}" for n, a in enumerate(answers) if a.failure]
    prompts = [len(request.token_ids) for request in requests]
    note = (
        f"prompts of {min(prompts)} to {max(prompts)} tokens, {sum(prompts) / len(prompts):.0f} on average; "
        f"{sum(request.answer for request in requests)} tokens asked for; over {requests[-1].at_s:.1f} s"
    )
    report(f"The first {len(requests)} requests of {options.trace.name}", rows, options.json, note)
    if failures:
        sys.exit("\n".join(failures[:20]))


if __name__ == "__main__":
    main()
