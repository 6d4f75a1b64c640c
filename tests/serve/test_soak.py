"""Ten thousand random requests with aborts and faults get no wrong token, and leave no page held and no memory behind.

The model computes in float64, so its tokens do not depend on which requests share a step. Each test prints its counts,
and how much memory every process gained per thousand requests in the second half of the run.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import plain_http
import pytest
from harness import SPARSE_FIELDS, tiny_directory
from processes import descendants_of
from running_server import API_KEY, RunningServer, serving

from hotset import LLM
from hotset.base.sampling import SamplingParams

NUM_REQUESTS = 10_000
NUM_CLIENTS = 24
ANSWER_SECONDS = 120.0  # a request that takes longer, with its retries, counts as hung
RETRY_SECONDS = 0.5
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
    """What happened to the requests. `wrong` and `hung` must stay empty."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)


INVALID: tuple[tuple[dict[str, Any] | bytes, int], ...] = (
    (b"{", 400),
    (b"", 400),
    (b"[" * 5000, 400),
    ({"model": "no-such-model", "prompt": [1]}, 404),
    ({"model": "soak", "prompt": [1] * 300}, 400),
    ({"model": "soak", "prompt": [60]}, 400),
    ({"model": "soak", "prompt": [1], "temperature": -1}, 400),
    ({"model": "soak", "prompt": [1], "max_tokens": 10**400}, 400),
    ({"model": "soak", "prompt": "\ud800"}, 400),
)


def make_questions(model: str) -> list[Question]:
    """Returns random requests, of which half begin like an earlier one, with the answers of an offline engine that has
    room for everything and no prefix cache."""
    rng = random.Random(16)
    questions = []
    with contextlib.closing(
        LLM(model, device="cpu", dtype="float64", load_format="dummy", page_rows=8, tiers="off", progress=False)
    ) as llm:
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
    """Sends random requests to a server and checks the answers."""

    def __init__(self, url: str, questions: Sequence[Question], record: Record, seed: int, faults: bool) -> None:
        self._url, self._questions, self._record = f"{url}/v1/completions", questions, record
        self._rng = random.Random(seed)
        self._unavailable = False  # whether the newest response was 503
        # While workers are killed and paused, 503 and its relatives are correct answers.
        self._may_fail = (429, 500, 502, 503, 504) if faults else (429,)

    async def run(self, session: aiohttp.ClientSession, numbers: Iterator[int]) -> None:
        kinds = {self.ask: 50, self.stream: 20, self.abort_stream: 15, self.disconnect: 5, self.send_invalid: 10}
        for number in numbers:
            (send,) = self._rng.choices(list(kinds), list(kinds.values()))
            try:
                await asyncio.wait_for(self._until_available(send, session), ANSWER_SECONDS)
            except TimeoutError:
                self._record.hung.append(f"request {number}, {send.__name__}")
            except (aiohttp.ClientError, ConnectionError) as error:
                self._record.outcomes[f"connection: {type(error).__name__}"] += 1

    async def _until_available(
        self, send: Callable[[aiohttp.ClientSession], Awaitable[None]], session: aiohttp.ClientSession
    ) -> None:
        """Sends a request again until the status is not 503, as clients should."""
        self._unavailable = True
        while self._unavailable:
            self._unavailable = False
            await send(session)
            if self._unavailable:
                await asyncio.sleep(RETRY_SECONDS)

    def _body(self, question: Question, **fields: Any) -> dict[str, Any]:
        return {**question.body, "cache_salt": self._rng.choice([None, None, "a", "b"]), **fields}

    async def ask(self, session: aiohttp.ClientSession) -> None:
        question = self._rng.choice(self._questions)
        async with session.post(self._url, json=self._body(question)) as response:
            body = await response.json()
            if self._refused(response.status, body):
                return
            self._check(question, [choice["token_ids"] for choice in body["choices"]])

    async def stream(self, session: aiohttp.ClientSession) -> None:
        question = self._rng.choice(self._questions)
        answer: list[list[int]] = [[] for _ in question.answer]
        async with session.post(self._url, json=self._body(question, stream=True)) as response:
            if response.status != 200:
                self._refused(response.status, await response.json())
                return
            async for event in _events(response):
                if "error" in event:
                    self._refused(503, event)
                    return
                for choice in event["choices"]:
                    answer[choice["index"]] += choice["token_ids"]
        self._check(question, answer)

    async def abort_stream(self, session: aiohttp.ClientSession) -> None:
        question, events = self._rng.choice(self._questions), self._rng.randint(0, 6)
        async with session.post(self._url, json=self._body(question, stream=True)) as response:
            if response.status != 200:
                self._refused(response.status, await response.json())
                return
            async for _ in _events(response):
                events -= 1
                if events < 0:
                    break
            response.close()
        self._record.outcomes["aborted"] += 1

    async def disconnect(self, session: aiohttp.ClientSession) -> None:
        """Closes the connection before the answer arrives."""
        sending = asyncio.create_task(self.ask(session))
        await asyncio.wait([sending], timeout=self._rng.choice([0.0, 0.001, 0.01]))
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        self._record.outcomes["disconnected"] += 1

    async def send_invalid(self, session: aiohttp.ClientSession) -> None:
        body, expected = self._rng.choice(INVALID)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with session.post(self._url, data=data, headers={"content-type": "application/json"}) as response:
            error = await response.json()
            if not self._refused(response.status, error) or response.status not in (expected, *self._may_fail):
                self._record.wrong.append(f"{body!r} got {response.status}: {error}")

    def _refused(self, status: int, body: dict[str, Any]) -> bool:
        """Counts an error response. Records one that should not occur."""
        if status == 200:
            return False
        self._record.outcomes[f"{status} {body['error']['code']}"] += 1
        self._unavailable = status == 503
        if status >= 500 and status not in self._may_fail:
            self._record.wrong.append(f"{status}: {body}")
        return True

    def _check(self, question: Question, answer: list[list[int]]) -> None:
        self._record.outcomes["answered"] += 1
        if answer != question.answer:
            self._record.wrong.append(f"{question.body} got {answer} instead of {question.answer}")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


async def send_all(
    url: str, questions: Sequence[Question], fault: Callable[[int], Awaitable[None]] | None, memory: "Memory"
) -> Record:
    """Sends NUM_REQUESTS requests over NUM_CLIENTS connections, and calls `fault(number)` from time to time."""
    record = Record()
    numbers = iter(range(NUM_REQUESTS))
    sent = Counter[str]()

    def counted() -> Iterator[int]:
        for number in numbers:
            sent["requests"] = number
            yield number

    async def disturb() -> None:
        for fault_number in range(10**6):
            memory.sample(sent["requests"])
            if fault_number % 60 == 59:
                print(f"{sent['requests']} requests", file=sys.__stderr__, flush=True)
            await asyncio.sleep(0.5)
            if fault is not None and fault_number % 20 == 19:
                await fault(fault_number // 20)

    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=NUM_CLIENTS)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=KEY) as session:
        disturbing = asyncio.create_task(disturb())
        clients = [Client(url, questions, record, seed, fault is not None) for seed in range(NUM_CLIENTS)]
        await asyncio.gather(*(client.run(session, counted()) for client in clients))
        disturbing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await disturbing
    memory.sample(NUM_REQUESTS)
    return record


class Memory:
    """The resident memory of processes over the number of requests."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._samples: dict[str, list[tuple[int, int]]] = {name: [] for name in pids}

    def sample(self, num_requests: int) -> None:
        for name, pid in self._pids.items():
            with contextlib.suppress(FileNotFoundError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                self._samples[name].append((num_requests, pages * os.sysconf("SC_PAGE_SIZE")))

    def report(self) -> dict[str, float]:
        """Returns how many MiB each process gains per thousand requests in the second half, by a straight-line fit."""
        slopes = {}
        for name, samples in self._samples.items():
            later = np.array([sample for sample in samples if sample[0] >= NUM_REQUESTS / 2], float)
            slope = np.polyfit(later[:, 0], later[:, 1], 1)[0] if len(later) > 2 else 0.0
            slopes[name] = float(slope) * 1000 / 2**20
        return slopes


def assert_clean(record: Record, memory: Memory, workers: Sequence[RunningServer]) -> None:
    print(dict(record.outcomes))
    slopes = memory.report()
    print("MiB per thousand requests:", {name: round(slope, 3) for name, slope in slopes.items()})
    assert not record.wrong, record.wrong[:3]
    assert not record.hung, record.hung[:3]
    for worker in workers:
        for gauge in ("device_pages_held", "host_pages_held", "pages_quarantined", "requests_running"):
            value = worker.wait_for_gauge(f"hotset_{gauge}", lambda value: value == 0, IDLE_SECONDS)
            assert value == 0, f"{worker.url}: {gauge} is {value:g}"
    growth = {name: slope * NUM_REQUESTS / 2000 for name, slope in slopes.items()}
    assert max(growth.values()) < MAX_GROWTH_MIB, growth


@pytest.fixture(scope="module")
def soak_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "soak"
    directory.mkdir()
    return tiny_directory(directory, **SPARSE_MODEL)


@pytest.fixture(scope="module")
def questions(soak_model: str) -> list[Question]:
    return make_questions(soak_model)


def pids_of(name: str, server: RunningServer) -> dict[str, int]:
    return {
        f"{name} {index}": pid for index, pid in enumerate([server.process.pid, *descendants_of(server.process.pid)])
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_server_survives_ten_thousand_requests(
    soak_model: str, questions: list[Question], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path, soak_model, *FLAGS) as server:
        memory = Memory(pids_of("server", server))
        record = asyncio.run(send_all(server.url, questions, None, memory))
        with capsys.disabled():
            assert_clean(record, memory, [server])
        cached = [f"prefix_cache_{name}" for name in ("tokens_queried", "tokens_reused", "pages_evicted")]
        counts = {name: server.gauge(f"hotset_{name}_total") for name in ("parks", "demotions", *cached)}
        with capsys.disabled():
            print(counts)
        assert min(counts.values()) > 0, "the pools were large enough, so this test checks too little"
        assert "Traceback" not in server.log()
    assert record.outcomes["answered"] > NUM_REQUESTS / 2


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

    def start_prefill(self) -> RunningServer:
        folder = self.folder / f"prefill{self.started}"
        folder.mkdir()
        self.started += 1
        return self.running.enter_context(serving(folder, self.model, "--role", "prefill", *FLAGS))

    def replace_prefill(self) -> None:
        os.kill(self.prefill.engine_pid(), signal.SIGKILL)
        dead, self.prefill = self.prefill, self.start_prefill()
        for method, worker in (("DELETE", dead), ("POST", self.prefill)):
            answer = plain_http.request(
                method, f"{self.router.url}/workers", json={"url": worker.url}, headers=KEY, timeout=60
            )
            assert answer.status_code in (201, 204), answer.text

    def pause(self, worker: RunningServer, seconds: float) -> None:
        pid = worker.engine_pid()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    async def fault(self, number: int) -> None:
        match number % 3:
            case 0:
                await asyncio.to_thread(self.replace_prefill)
            case 1:
                await asyncio.to_thread(self.pause, self.decode, 2.0)
            case _:
                await asyncio.to_thread(self.pause, self.prefill, 2.0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_prefill_and_a_decode_worker_survive_ten_thousand_requests_with_kills_and_pauses(
    soak_model: str, questions: list[Question], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as running:
        folders = {name: tmp_path / name for name in ("prefill0", "decode", "router")}
        for folder in folders.values():
            folder.mkdir()
        prefill = running.enter_context(serving(folders["prefill0"], soak_model, "--role", "prefill", *FLAGS))
        decode = running.enter_context(serving(folders["decode"], soak_model, "--role", "decode", *FLAGS))
        arguments = ["--prefill", prefill.url, "--decode", decode.url, "--api-key", API_KEY]
        router = running.enter_context(serving(folders["router"], *arguments, command="router"))
        router.wait_until_healthy()
        cluster = Cluster(soak_model, tmp_path, running, decode, router, prefill)
        memory = Memory({**pids_of("decode", decode), **pids_of("router", router)})
        record = asyncio.run(send_all(router.url, questions, cluster.fault, memory))
        with capsys.disabled():
            print(f"{cluster.started - 1} prefill workers were killed")
            assert_clean(record, memory, [cluster.decode, cluster.prefill])
        for server in (decode, router):
            assert "Traceback" not in server.log()
    assert record.outcomes["answered"] > NUM_REQUESTS / 2
