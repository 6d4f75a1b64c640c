"""`hotset serve --disaggregate` answers like one server, and no process outlives the command.

The decode worker acts as the one server: if a request names no prefill worker, it computes the prompt itself.
"""

import asyncio
import itertools
import random
import re
import signal
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import plain_http
import pytest
import zmq.asyncio
from harness import DEMO
from listening import listening
from processes import descendants_of, wait_until_ended
from running_server import RunningServer, metrics_of, serving
from waiting import until, wait_until

from hotset.fleet.kv_events.subscriber import KvEventSubscriber
from hotset.serve.page_marks import PAGE_MARKS_HEADER, parse_page_marks
from hotset.serve.prefill_header import prefill_headers

SIZES = ["--device", "cpu", "--device-kv-tokens", "4096", "--host-kv-tokens", "8192", "--max-num-batched-tokens", "256"]
TEXT = "/v1/completions"
SECRET = "at-least-16-characters"
LENGTHS = (1, 64, 65, 257)  # at and near the boundaries of pages (64 rows) and of prefill chunks (256 tokens here)
SALTS = map(str, itertools.count())
ANSWER: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    events = ["--kv-events", "tcp://127.0.0.1:0", "--kv-events-replay", "tcp://127.0.0.1:0"]
    flags = ["--disaggregate", "1P1D", "--drain-seconds", "20", *SIZES, *events]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTSET_HANDOFF_SECRET", SECRET)
        with serving(tmp_path_factory.mktemp("disaggregated"), DEMO, *flags) as server:
            yield server


@pytest.fixture(scope="module")
def prefill(server: RunningServer) -> str:
    return url_of_worker(server, "prefill")


@pytest.fixture(scope="module")
def decode(server: RunningServer) -> str:
    return url_of_worker(server, "decode")


def url_of_worker(server: RunningServer, role: str) -> str:
    """Returns the URL of the only worker of a role, from the router's log."""
    (url,) = re.findall(rf"{role} worker (http://\S+) is up", server.log())
    return str(url)


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(3, 203), k=length)


def post(url: str, path: str = TEXT, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    """Sends a request with a new salt, so that no worker finds pages of earlier requests in its cache."""
    body = {"model": "demo-dsa", "cache_salt": next(SALTS), **fields}
    return plain_http.post(url + path, json=body, headers=headers, timeout=120)


def choices_of(url: str, length: int, **fields: Any) -> Any:
    answer = post(url, **{"prompt": prompt_of(length), **ANSWER, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_equal_those_of_one_server(server: RunningServer, decode: str, length: int) -> None:
    expected = choices_of(decode, length)
    for landing in ("auto", "host", "device"):
        assert choices_of(server.url, length, landing=landing) == expected, landing


def test_seeded_choices_and_logprobs_equal_those_of_one_server(server: RunningServer, decode: str) -> None:
    seeded = {"seed": 7, "temperature": 0.9, "logprobs": 2}
    assert choices_of(server.url, 70, **seeded) == choices_of(decode, 70, **seeded)
    # The workers may batch several prompts differently, which changes the last bits of logprobs, so only tokens
    # are compared.
    several = {**seeded, "n": 2, "prompt": [prompt_of(70), prompt_of(200)]}
    answers = [choices_of(url, 1, **several) for url in (server.url, decode)]
    tokens = [[choice["token_ids"] for choice in choices] for choices in answers]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 4


def test_responses_and_messages_equal_those_of_one_server(server: RunningServer, prefill: str, decode: str) -> None:
    handed_off = metrics_of(prefill)["hotset_prompts_handed_off_total"]
    question = "Which of these is true? " * 9
    for path, fields in (
        ("/v1/responses", {"input": question, "max_output_tokens": 6}),
        ("/v1/messages", {"messages": [{"role": "user", "content": question}], "max_tokens": 6}),
    ):
        answers = [post(url, path, temperature=0, **fields) for url in (decode, server.url)]
        one, both = (answer.raise_for_status().json() for answer in answers)
        texts = [answer["content"] if "content" in answer else answer["output"][0]["content"] for answer in (one, both)]
        assert texts[0] == texts[1] and texts[0][0]["text"]
    assert metrics_of(prefill)["hotset_prompts_handed_off_total"] == handed_off + 2


def test_log_probabilities_of_a_prompt_equal_those_of_one_server(
    server: RunningServer, prefill: str, decode: str
) -> None:
    handed_off = metrics_of(prefill)["hotset_prompts_handed_off_total"]
    for fields in ({"max_tokens": 0, "echo": True, "logprobs": 1}, {"max_tokens": 2, "prompt_logprobs": 1}):
        (expected,), (choice,) = (choices_of(url, 300, **fields) for url in (decode, server.url))
        assert choice == expected and len(choice["token_ids"]) == fields["max_tokens"]
    assert metrics_of(prefill)["hotset_prompts_handed_off_total"] == handed_off, "the decode worker computes them"
    refused = post(server.url, prompt=prompt_of(9), prompt_logprobs=0, landing="host")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "landing"


def test_stream_equals_that_of_one_server(server: RunningServer, decode: str) -> None:
    received = []
    for url in (decode, server.url):
        *events, last = plain_http.events_of(post(url, prompt=prompt_of(300), stream=True, **ANSWER))
        assert last == "[DONE]"
        received.append([event["choices"] for event in events])
    assert received[0] == received[1] and len(received[0]) > 1


def test_metrics_count_prefilled_tokens_and_transferred_bytes(server: RunningServer, prefill: str, decode: str) -> None:
    before = {url: metrics_of(url) for url in (prefill, decode)}
    choices_of(server.url, 500)
    increase = {
        url: {name: value - before[url].get(name, 0) for name, value in metrics_of(url).items()}
        for url in (prefill, decode)
    }
    assert increase[prefill]["hotset_tokens_prefilled_total"] == 500
    assert increase[decode]["hotset_tokens_prefilled_total"] == 0, (
        "the decode worker must not compute a prompt that is handed off"
    )
    assert increase[decode]["hotset_handoffs_total/landed"] == 1
    assert increase[decode]["hotset_handoff_bytes_total"] == increase[prefill]["hotset_handoff_bytes_total"] > 500
    assert metrics_of(prefill)["hotset_transfer_gb_per_second"] > 0
    assert metrics_of(decode)["hotset_pages_quarantined"] == 0
    assert metrics_of(server.url)["hotset_router_requests_total/completed"] >= 1
    for role in ("prefill", "decode"):
        started = rf"\[{role} 1\] .* INFO transfer engine nixl on 127\.0\.0\.1, interface lo, UCX"
        assert re.search(started, server.log())
    reached = r"\[prefill 1\] .* INFO nixl reaches 127\.0\.0\.1:\d+ over UCX \(.+\), \S+ GB/s"
    assert re.search(reached, server.log()), "the log must name the transport and its speed"


def test_pages_that_a_worker_reports_to_the_router_are_those_of_its_kv_events(
    server: RunningServer, decode: str
) -> None:
    body = {"prompt": prompt_of(400), "max_tokens": 2, "ignore_eos": True}
    answer = plain_http.post(decode + TEXT, json=body, headers={PAGE_MARKS_HEADER: "1"}, timeout=120)
    marks = parse_page_marks(answer.headers[PAGE_MARKS_HEADER])
    assert [mark.share_of_prompt for mark in marks] == [pages * 64 / 400 for pages in range(1, 7)]
    with plain_http.stream(
        "POST", decode + TEXT, json={**body, "stream": True}, headers={PAGE_MARKS_HEADER: "1"}, timeout=120
    ) as stream:
        assert stream.headers[PAGE_MARKS_HEADER] == answer.headers[PAGE_MARKS_HEADER]
    through_router = plain_http.post(server.url + TEXT, json=body, timeout=120)
    assert PAGE_MARKS_HEADER not in through_router.headers
    (ports,) = plain_http.get(f"{decode}/handoff", timeout=30).json()["kv_events"]

    async def published() -> None:
        """Returns when the worker has published all pages."""
        with zmq.asyncio.Context() as context:
            live, replay = (f"tcp://127.0.0.1:{ports[name]}" for name in ("live", "replay"))
            subscriber = KvEventSubscriber(context, live, replay)
            following = asyncio.create_task(subscriber.run())
            await until(lambda: all(mark.block_hash in subscriber.blocks for mark in marks))
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    asyncio.run(published())

    def router_follows() -> bool:
        workers = plain_http.get(f"{server.url}/workers", timeout=30).json()["workers"]
        return [worker["kv_events_synced"] for worker in workers] == [True, True]

    assert wait_until(router_follows), "the router must follow the events of both workers"


def test_workers_report_their_role_and_reject_requests_that_do_not_fit_it(prefill: str, decode: str) -> None:
    controls = set()
    for role, url in (("prefill", prefill), ("decode", decode)):
        state = plain_http.get(f"{url}/handoff", timeout=30).json()
        assert (state["role"], state["model"]) == (role, "demo-dsa")
        assert re.fullmatch(r"127\.0\.0\.1:\d+", state["control"])
        controls.add(state["control"])
    assert len(controls) == 2
    refused = post(prefill, prompt=prompt_of(20))
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "wrong_role")
    for address, status in (("nonsense", 400), ("tcp://127.0.0.1:1", 400), ("127.0.0.1:1", 503)):
        answer = post(decode, headers=dict(prefill_headers(address, SECRET)), prompt=prompt_of(20))
        assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == "prefill_lost" and "no message from 127.0.0.1:1 for 4 s" in error["message"]


def test_the_documentation_comes_from_a_worker(server: RunningServer) -> None:
    for path in ("/docs", "/docs/start.js", "/docs/swagger-ui.css", "/openapi.json"):
        assert plain_http.get(server.url + path, timeout=30).status_code == 200, path
    policy = plain_http.get(f"{server.url}/docs", timeout=30).headers["content-security-policy"]
    assert "default-src 'self'" in policy


def test_a_decode_worker_connects_only_to_prefill_workers_that_its_router_signed(prefill: str, decode: str) -> None:
    known = plain_http.get(f"{prefill}/handoff", timeout=30).json()["control"]
    with socket.create_server(("127.0.0.1", 0)) as victim:
        victim.settimeout(0)
        address = f"127.0.0.1:{victim.getsockname()[1]}"
        of_known = prefill_headers(known, SECRET)[1]
        for headers in (
            prefill_headers(address, None),
            prefill_headers(address, "another-secret-of-16"),
            [("x-hotset-prefill", address), of_known],
            prefill_headers(known, None),
            prefill_headers("169.254.169.254:80", None),
        ):
            answer = post(decode, headers=dict(headers), prompt=prompt_of(20))
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_allowed"), headers
        with pytest.raises(BlockingIOError):
            victim.accept()
    answer = post(decode, headers=dict(prefill_headers(known, SECRET)), prompt=prompt_of(20))
    assert answer.status_code == 200, answer.text


def test_defect_21_every_process_listens_on_loopback_only_also_after_handoffs(
    server: RunningServer, prefill: str, decode: str
) -> None:
    choices_of(server.url, 70)
    found = listening({server.process.pid} | descendants_of(server.process.pid))
    assert {listener.host for listener in found} == {"127.0.0.1"}
    http_ports = {int(url.rpartition(":")[2]) for url in (server.url, prefill, decode)}
    assert len(http_ports) == 3 and http_ports < {listener.port for listener in found}


def test_sigint_drains_in_order_and_leaves_no_process(server: RunningServer) -> None:
    """This is the last test of this file, because it ends the shared server."""
    body = {"prompt": [3], "max_tokens": 60, "ignore_eos": True, "stream": True}
    pids = descendants_of(server.process.pid)
    assert len(pids) >= 5, "there must be two workers, an engine for each, and a router"
    with plain_http.stream("POST", server.url + TEXT, json=body, timeout=60) as stream:
        server.process.send_signal(signal.SIGINT)
        assert plain_http.events_of(stream)[-1] == "[DONE]"
    assert server.process.wait(90) == 0
    wait_until_ended(pids)
    stopped = re.findall(r"\[(\w+)[^]]*\].*shutting down: requests in flight", server.log())
    assert stopped == ["router", "decode", "prefill"]
    assert "Traceback" not in server.log()
