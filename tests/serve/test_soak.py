"""Ten thousand random requests get no wrong token, although clients abort, workers are killed and engines are paused.
Afterwards no page is held, and the processes have not grown.

The model computes in float64, so its tokens do not depend on which requests share a step. benchmarks/fuzz_requests.py
sends other requests to other endpoints, most of them valid.
"""

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import plain_http
import pytest
from harness import SPARSE_FIELDS, tiny_directory
from processes import descendants_of, resident_mib
from running_server import API_KEY, RunningServer, serving
from waiting import wait_until

from hotset import LLM
from hotset.base.sampling import SamplingParams

NUM_REQUESTS = 10_000
NUM_CLIENTS = 24
ANSWER_SECONDS = 120.0  # a request that takes longer, with its retries, counts as hung
RETRY_SECONDS = 0.5
FAULT_SECONDS = 10.0  # time between two faults
IDLE_SECONDS = 120.0  # time until all pages must be free after the last request
MAX_GROWTH_MIB = 24.0  # of one process in the second half of the run
KEY = {"Authorization": f"Bearer {API_KEY}"}

SPARSE_MODEL = SPARSE_FIELDS | {"num_hidden_layers": 3, "num_key_value_heads": 2, "max_position_embeddings": 256}
# The pools are small, so requests are demoted, parked and recomputed all the time.
SIZES = ["--page-rows", "8", "--device-kv-tokens", "272", "--host-kv-tokens", "1600", "--hot-slots", "12"]
FLAGS = ["--device", "cpu", "--dtype", "float64", "--load-format", "dummy", "--max-num-batched-tokens", "64", *SIZES]


@dataclass(frozen=True)
class Question:
    body: dict[str, Any]
    answer: list[list[int]]  # the token ids of each choice


@dataclass
class Record:
    """What happened to the requests. `wrong` must stay empty."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def make_questions(model: str) -> list[Question]:
    """Returns random requests, of which half begin like an earlier one, with the answers of an offline engine that has
    room for everything and no prefix cache."""
    rng = random.Random(16)
    questions: list[Question] = []
    settings: Any = {"device": "cpu", "dtype": "float64", "load_format": "dummy", "page_rows": 8, "tiers": "off"}
    with closing(LLM(model, **settings, progress=False)) as llm:
        for number in range(64):
            length = rng.choice([1, 7, 8, 9, 17, 30, 64, 65, 120])
            earlier = rng.choice(questions).body["prompt"] if number % 2 else []
            shared = earlier[: rng.randint(0, length)]
            prompt = shared + [rng.randrange(60) for _ in range(length - len(shared))]
            fields: dict[str, Any] = {"max_tokens": rng.randint(1, 16), "ignore_eos": True}
            fields["n"] = rng.choice([1, 1, 1, 1, 2])
            fields |= {"temperature": rng.choice([0.0, 0.9]), "seed": number}
            (result,) = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(**fields))
            body = {"model": "soak", "prompt": prompt, "return_token_ids": True, **fields}
            questions.append(Question(body, [output.token_ids for output in result.outputs]))
    return questions


class Client:
    """Sends random requests one after the other and checks the answers. It leaves some before they end."""

    def __init__(self, url: str, questions: Sequence[Question], record: Record, seed: int) -> None:
        self._url, self._questions, self._record = f"{url}/v1/completions", questions, record
        self._rng = random.Random(seed)

    async def run(self, session: aiohttp.ClientSession, numbers: Iterator[int]) -> None:
        for number in numbers:
            question = self._rng.choice(self._questions)
            salt = self._rng.choice([None, None, "a", "b"])
            body = {**question.body, "cache_salt": salt, "stream": self._rng.random() < 0.3}
            leaves_after = self._rng.choice([0.001, 0.01, 0.1]) if self._rng.random() < 0.25 else None
            try:
                async with asyncio.timeout(ANSWER_SECONDS if leaves_after is None else leaves_after):
                    answer = await self._answer(session, body)
                self._record.outcomes["answered"] += 1
                if answer != question.answer:
                    self._record.wrong.append(f"{body} got {answer} instead of {question.answer}")
            except TimeoutError:
                self._record.outcomes["aborted"] += 1
                if leaves_after is None:
                    self._record.wrong.append(f"request {number} hung")
            except (aiohttp.ClientError, ConnectionError) as error:
                self._record.outcomes[f"connection: {type(error).__name__}"] += 1

    async def _answer(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> list[list[int]]:
        """Sends a request until it is answered. While workers are killed and paused, errors are correct answers."""
        while True:
            async with session.post(self._url, json=body) as response:
                text = await response.text()
                if response.status == 200 and '"error"' not in text:
                    return tokens_of(text, body["n"], stream=body["stream"])
                assert response.status in (200, 429, 500, 502, 503, 504), text
                self._record.outcomes[f"{response.status}"] += 1
            await asyncio.sleep(RETRY_SECONDS)


def tokens_of(text: str, n: int, *, stream: bool) -> list[list[int]]:
    """Returns the tokens of each choice of an answer."""
    events = text.splitlines() if stream else [text]
    answer: list[list[int]] = [[] for _ in range(n)]
    for event in events:
        if event not in ("", "data: [DONE]"):
            for choice in json.loads(event.removeprefix("data: "))["choices"]:
                answer[choice["index"]] += choice["token_ids"]
    return answer


@dataclass
class Cluster:
    """One prefill and one decode worker behind a router. Faults replace the prefill worker and pause engines."""

    model: str
    folder: Path
    running: ExitStack
    decode: RunningServer
    router: RunningServer
    prefill: RunningServer
    started: int = 1

    def replace_prefill(self) -> None:
        os.kill(self.prefill.engine_pid(), signal.SIGKILL)
        folder = self.folder / f"prefill{self.started}"
        folder.mkdir()
        self.started += 1
        dead = self.prefill
        self.prefill = self.running.enter_context(serving(folder, self.model, "--role", "prefill", *FLAGS))
        for method, worker in (("DELETE", dead), ("POST", self.prefill)):
            url = f"{self.router.url}/workers"
            answer = plain_http.request(method, url, json={"url": worker.url}, headers=KEY, timeout=60)
            assert answer.status_code in (201, 204), answer.text

    def pause(self, worker: RunningServer, seconds: float = 2.0) -> None:
        pid = worker.engine_pid()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    async def disturb(self) -> None:
        """Causes one fault after the other, until it is cancelled."""
        while True:
            for fault in (self.replace_prefill, lambda: self.pause(self.decode), lambda: self.pause(self.prefill)):
                await asyncio.sleep(FAULT_SECONDS)
                await asyncio.to_thread(fault)


async def send_all(
    url: str, questions: Sequence[Question], disturb: Callable[[], Awaitable[None]], on_half: Callable[[], None]
) -> Record:
    """Sends all requests while `disturb` runs, and calls `on_half` after half of them."""
    record = Record()

    def numbers() -> Iterator[int]:
        for number in range(NUM_REQUESTS):
            if number == NUM_REQUESTS // 2:
                on_half()
            yield number

    connector, timeout = aiohttp.TCPConnector(limit=NUM_CLIENTS), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=KEY) as session:
        disturbing = asyncio.ensure_future(disturb())
        clients = [Client(url, questions, record, seed) for seed in range(NUM_CLIENTS)]
        common = numbers()
        await asyncio.gather(*(client.run(session, common) for client in clients))
        disturbing.cancel()
        with suppress(asyncio.CancelledError):
            await disturbing
    return record


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_prefill_and_a_decode_worker_survive_ten_thousand_requests_with_kills_and_pauses(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("soak", "prefill0", "decode", "router")}
    for folder in folders.values():
        folder.mkdir()
    model = tiny_directory(folders["soak"], **SPARSE_MODEL)
    with ExitStack() as running:
        prefill = running.enter_context(serving(folders["prefill0"], model, "--role", "prefill", *FLAGS))
        decode = running.enter_context(serving(folders["decode"], model, "--role", "decode", *FLAGS))
        arguments = ["--prefill", prefill.url, "--decode", decode.url, "--api-key", API_KEY]
        router = running.enter_context(serving(folders["router"], *arguments, command="router"))
        assert wait_until(router.is_healthy)
        cluster = Cluster(model, tmp_path, running, decode, router, prefill)
        pids = [decode.process.pid, *descendants_of(decode.process.pid), router.process.pid]
        half: dict[int, float] = {}
        record = asyncio.run(
            send_all(
                router.url,
                make_questions(model),
                cluster.disturb,
                lambda: half.update({pid: resident_mib(pid) for pid in pids}),
            )
        )
        print(dict(record.outcomes), f"{cluster.started - 1} prefill workers were killed")
        assert not record.wrong, record.wrong[:3]
        for worker in (decode, cluster.prefill):
            for gauge in ("device_pages_held", "host_pages_held", "pages_quarantined", "requests_running"):
                worker.wait_for_gauge(f"hotset_{gauge}", 0, IDLE_SECONDS)
        assert max(resident_mib(pid) - half[pid] for pid in pids) < MAX_GROWTH_MIB
        counts = {name: decode.gauge(f"hotset_{name}_total") for name in ("parks", "demotions")}
        counts["tokens_reused"] = cluster.prefill.gauge("hotset_prefix_cache_tokens_reused_total")
        assert min(counts.values()) > 0, f"the pools were large enough, so this test checks too little: {counts}"
        for server in (decode, router):
            assert "Traceback" not in server.log()
    assert record.outcomes["answered"] > NUM_REQUESTS / 2
