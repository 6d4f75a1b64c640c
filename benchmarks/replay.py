"""Replays the first requests of a trace against a server and measures latencies at the client.

    hotset serve MODEL --disaggregate 1P1D --port 8000 &
    hotset serve MODEL --port 8001 &
    python benchmarks/replay.py TRACE http://127.0.0.1:8000 --beside http://127.0.0.1:8001 --json replay.json

The trace has one JSON object per line: `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, which has one
id per 512-token block of the prompt. Blocks with equal ids become equal tokens. If necessary, all lengths are scaled
down by one factor such that no request has more than `--context` tokens. Requests arrive `--faster` times as fast as in
the trace. The server must accept token ids and `ignore_eos` in /v1/completions. The server given by `--beside` gets the
same requests after the first server has answered all of them.

The table shows one row per server. TTFT is the time from the scheduled arrival of a request to the first event of its
answer. ITL is the time between two events; an event carries one token, or several if a single token is not valid text.
There is no required result, but the exit code is 1 unless every request was answered completely. For each server, a
replay takes at least the time between the first and the last arrival in the trace, divided by `--faster`.
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

BLOCK_TOKENS = 512  # tokens per block in the trace
MIN_TOKEN_ID = 16  # lower ids may be special tokens
MIN_ANSWER_TOKENS = 2  # an answer of one token would have no time between tokens


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of the trace, scaled."""

    arrival_s: float
    token_ids: tuple[int, ...]
    answer_tokens: int


@dataclass(slots=True)
class Answer:
    """The measured answer to one request."""

    tokens: int = 0
    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    failure: str | None = None


def read_trace(path: Path, count: int, context: int, faster: float, vocab: int) -> list[TraceRequest]:
    """Reads and scales the first `count` requests. Raises ValueError, OSError or KeyError if the trace is invalid."""
    with path.open() as lines:
        entries = [json.loads(line) for line in itertools.islice(lines, count)]
    if not entries:
        raise ValueError("the file is empty")
    longest = max(entry["input_length"] + entry["output_length"] for entry in entries)
    factor = min(1.0, (context - MIN_ANSWER_TOKENS) / longest)  # leaves room for the minimum answer
    first_arrival = entries[0]["timestamp"]
    return [
        TraceRequest(
            (entry["timestamp"] - first_arrival) / 1e3 / faster,
            make_prompt(entry["hash_ids"], max(1, int(entry["input_length"] * factor)), factor, vocab),
            max(MIN_ANSWER_TOKENS, int(entry["output_length"] * factor)),
        )
        for entry in entries
    ]


def make_prompt(blocks: Sequence[int], length: int, factor: float, vocab: int) -> tuple[int, ...]:
    """Returns `length` token ids. The id of a block determines its tokens."""
    block_tokens = max(1, int(BLOCK_TOKENS * factor))
    token_ids: list[int] = []
    # Because of rounding, the scaled blocks can have fewer than `length` tokens in total. Then blocks with negative
    # ids follow.
    for block in itertools.chain(blocks, itertools.count(-1, -1)):
        if len(token_ids) >= length:
            break
        seed = block if block >= 0 else 2**32 + length - block
        token_ids += np.random.default_rng(seed).integers(MIN_TOKEN_ID, vocab, block_tokens).tolist()
    return tuple(token_ids[:length])


async def send(client: httpx.AsyncClient, model: str, request: TraceRequest, due: float) -> Answer:
    answer = Answer()
    try:
        await stream(client, model, request, due, answer)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        answer.failure = f"{type(error).__name__}: {error}"
    if answer.failure is None and answer.tokens != request.answer_tokens:
        answer.failure = f"the answer has {answer.tokens} tokens instead of {request.answer_tokens}"
    return answer


async def stream(client: httpx.AsyncClient, model: str, request: TraceRequest, due: float, answer: Answer) -> None:
    body = {
        "model": model,
        "prompt": request.token_ids,
        "max_tokens": request.answer_tokens,
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
                last = record_event(event, last, answer)
        if not ended and answer.failure is None:
            answer.failure = "the stream ended without [DONE]"


def record_event(event: dict[str, Any], last: float, answer: Answer) -> float:
    """Adds an event to the answer. Returns the current time if the event carries tokens, otherwise `last`."""
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


async def replay(
    url: str, requests: Sequence[TraceRequest], timeout_s: float, on_answer: Callable[[], None]
) -> tuple[list[Answer], float]:
    """Returns the answers in the order of the requests, and the total seconds."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    async with httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits) as client:
        models = (await client.get("/v1/models")).raise_for_status().json()
        model = models["data"][0]["id"]
        start = time.perf_counter()

        async def send_when_due(request: TraceRequest) -> Answer:
            due = start + request.arrival_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            answer = await send(client, model, request, due)
            on_answer()
            return answer

        answers = await asyncio.gather(*(send_when_due(request) for request in requests))
    return answers, time.perf_counter() - start


def table_row(url: str, requests: Sequence[TraceRequest], answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    def percentile_ms(values: Sequence[float], percent: float) -> float | None:
        return float(np.percentile(values, percent)) * 1e3 if values else None

    complete = [answer for answer in answers if answer.failure is None]
    ttft = [answer.ttft_s for answer in complete if answer.ttft_s is not None]
    gaps = [gap for answer in complete for gap in answer.gaps_s]
    return {
        "server": url,
        "requests": len(requests),
        "failed": len(answers) - len(complete),
        "TTFT p50 ms": percentile_ms(ttft, 50),
        "TTFT p99 ms": percentile_ms(ttft, 99),
        "ITL p50 ms": percentile_ms(gaps, 50),
        "ITL p99 ms": percentile_ms(gaps, 99),
        "tokens/s": sum(answer.tokens for answer in complete) / seconds,
        "seconds": seconds,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("trace", type=Path, help="trace in Mooncake's format (JSON lines)")
    parser.add_argument("url", help="URL of a server, without /v1")
    parser.add_argument("--beside", help="URL of another server, for comparison")
    parser.add_argument("--requests", type=int, default=200, help="number of requests to replay")
    parser.add_argument("--context", type=int, default=4096, help="maximum tokens of a request")
    parser.add_argument("--faster", type=float, default=1.0, help="factor by which the arrival rate is increased")
    parser.add_argument("--vocab", type=int, default=1000, help="token ids are lower than this")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="a request fails after this many seconds without new data"
    )
    options = parser.parse_args()
    try:
        requests = read_trace(options.trace, options.requests, options.context, options.faster, options.vocab)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"error: {options.trace} is not a valid trace: {error!r}")
    rows, failures = [], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    for url in filter(None, (options.url, options.beside)):
        with Progress(*columns, transient=True) as progress:
            bar = progress.add_task(url, total=len(requests))
            try:
                answers, seconds = asyncio.run(replay(url, requests, options.timeout, partial(progress.advance, bar)))
            except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                sys.exit(f"error: {url}/v1/models cannot be read: {error!r}")
        rows.append(table_row(url, requests, answers, seconds))
        failures += [f"{url}, request {n}: {a.failure}" for n, a in enumerate(answers) if a.failure]
    prompts = [len(request.token_ids) for request in requests]
    note = (
        f"prompts of {min(prompts)} to {max(prompts)} tokens, {sum(prompts) / len(prompts):.0f} on average; "
        f"{sum(request.answer_tokens for request in requests)} tokens requested; "
        f"the last request arrives after {requests[-1].arrival_s:.1f} s"
    )
    report(f"The first {len(requests)} requests of {options.trace.name}", rows, options.json, note)
    if failures:
        sys.exit("\n".join(failures[:20]))


if __name__ == "__main__":
    main()
