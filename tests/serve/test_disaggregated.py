"""`hotset serve --disaggregate` answers like a single server, and no process outlives the command."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plain_http
import pytest
import zmq.asyncio
from listening import listening
from processes import command_line, descendants_of, wait_until_ended
from prometheus_client.parser import text_string_to_metric_families
from running_server import API_KEY, RunningServer, serving

from hotset.fleet.kv_events.subscriber import KvEventSubscriber
from hotset.serve.page_marks import PAGE_MARKS_HEADER, parse_page_marks
from hotset.serve.prefill_header import prefill_headers

DEMO = str(Path(__file__).resolve().parents[2] / "models" / "demo-dsa")
SIZES = ["--device", "cpu", "--device-kv-tokens", "4096", "--host-kv-tokens", "8192"]
TEXT = "/v1/completions"
SECRET = "at-least-16-characters"
# Prompt lengths at and near the boundaries of pages (64 rows) and of prefill chunks (256 tokens here).
LENGTHS = (1, 2, 63, 64, 65, 128, 129, 255, 256, 257, 600)
LANDING_LENGTHS = (1, 64, 65, 257)  # prompt lengths that are tested with every value of `landing`
CHUNKS = ["--max-num-batched-tokens", "256"]


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(tmp_path_factory.mktemp("colocated"), DEMO, *SIZES, *CHUNKS) as server:
        yield server


@pytest.fixture(scope="module")
def disaggregated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("disaggregated")
    events = ["--kv-events", "tcp://127.0.0.1:0", "--kv-events-replay", "tcp://127.0.0.1:0"]
    flags = ["--disaggregate", "1P1D", "--drain-seconds", "5", *SIZES, *CHUNKS, *events]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTSET_HANDOFF_SECRET", SECRET)
        with serving(folder, DEMO, *flags) as server:
            yield server


def prompt_of(length: int, variant: str = "") -> list[int]:
    """Returns a prompt that begins unlike those of other lengths and variants, so that no prefix is in a cache."""
    tokens = random.Random(f"{length} {variant}")
    return [tokens.randrange(3, 203) for _ in range(length)]


def choices_of(server: RunningServer, length: int, variant: str = "", **fields: Any) -> Any:
    body = {
        "model": "demo-dsa",
        "prompt": prompt_of(length, variant),
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = plain_http.post(server.url + TEXT, json={**body, "return_token_ids": True, **fields}, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def workers_of(server: RunningServer, role: str) -> list[str]:
    """Returns the URLs of the workers of a role, from the router's log."""
    return re.findall(rf"{role} worker (http://\S+) is up", server.log())


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_equal_those_of_one_server(colocated: RunningServer, disaggregated: RunningServer, length: int) -> None:
    for landing in ("auto", "host", "device") if length in LANDING_LENGTHS else ("auto",):
        expected = choices_of(colocated, length, landing)
        assert choices_of(disaggregated, length, landing, landing=landing) == expected, landing


def test_seeded_choices_and_logprobs_equal_those_of_one_server(
    colocated: RunningServer, disaggregated: RunningServer
) -> None:
    seeded = {"seed": 7, "temperature": 0.9, "logprobs": 2}
    assert choices_of(disaggregated, 70, **seeded) == choices_of(colocated, 70, **seeded)
    # The servers may batch several prompts differently, which changes the last bits of logprobs, so only tokens
    # are compared.
    several = {**seeded, "n": 2, "prompt": [prompt_of(70), prompt_of(200)]}
    answers = [choices_of(server, 1, **several) for server in (disaggregated, colocated)]
    tokens = [[choice["token_ids"] for choice in choices] for choices in answers]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 4


def test_responses_and_messages_equal_those_of_one_server(
    colocated: RunningServer, disaggregated: RunningServer
) -> None:
    (prefill,) = workers_of(disaggregated, "prefill")
    handed_off = metrics_of(prefill)["hotset_prompts_handed_off_total"]
    question = "Which of these is true? " * 9
    for path, fields in (
        ("/v1/responses", {"input": question, "max_output_tokens": 6}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Why? " + question}], "max_tokens": 6}),
    ):
        body = {"temperature": 0, "model": "demo-dsa", **fields}
        answers = [plain_http.post(server.url + path, json=body, timeout=120) for server in (colocated, disaggregated)]
        one, both = (answer.raise_for_status().json() for answer in answers)
        text = (
            (lambda answer: answer["content"]) if "content" in one else (lambda answer: answer["output"][0]["content"])
        )
        assert text(one) == text(both) and text(one)[0]["text"]
    assert metrics_of(prefill)["hotset_prompts_handed_off_total"] == handed_off + 2


def test_log_probabilities_of_a_prompt_equal_those_of_one_server(
    colocated: RunningServer, disaggregated: RunningServer
) -> None:
    (prefill,) = workers_of(disaggregated, "prefill")
    handed_off = metrics_of(prefill)["hotset_prompts_handed_off_total"]
    for fields in ({"max_tokens": 0, "echo": True, "logprobs": 1}, {"max_tokens": 2, "prompt_logprobs": 1}):
        (expected,), (choice,) = (choices_of(server, 300, **fields) for server in (colocated, disaggregated))
        assert choice == expected and len(choice["token_ids"]) == fields["max_tokens"]
    assert metrics_of(prefill)["hotset_prompts_handed_off_total"] == handed_off, "the decode worker computes them"
    body = {"model": "demo-dsa", "prompt": prompt_of(9), "prompt_logprobs": 0, "landing": "host"}
    refused = plain_http.post(disaggregated.url + TEXT, json=body, timeout=120)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "landing"


def test_stream_equals_that_of_one_server(colocated: RunningServer, disaggregated: RunningServer) -> None:
    received = []
    for server in (colocated, disaggregated):
        body = {"model": "demo-dsa", "prompt": prompt_of(300), "max_tokens": 8, "temperature": 0, "stream": True}
        with plain_http.stream("POST", server.url + TEXT, json={**body, "ignore_eos": True}, timeout=120) as stream:
            *events, last = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
        assert last == "[DONE]"
        received.append([json.loads(event)["choices"] for event in events])
    assert received[0] == received[1] and len(received[0]) > 1


def metrics_of(url: str) -> dict[str, float]:
    text = plain_http.get(f"{url}/metrics", timeout=30).text
    families = text_string_to_metric_families(text)
    return {
        "/".join((sample.name, *sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_count_prefilled_tokens_and_transferred_bytes(disaggregated: RunningServer) -> None:
    (prefill,), (decode,) = workers_of(disaggregated, "prefill"), workers_of(disaggregated, "decode")
    before = {url: metrics_of(url) for url in (prefill, decode)}
    choices_of(disaggregated, 500)
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
    assert metrics_of(disaggregated.url)["hotset_router_requests_total/completed"] >= 1
    for role in ("prefill", "decode"):
        assert re.search(
            rf"\[{role} 1\] .* INFO transfer engine nixl on 127\.0\.0\.1, interface lo, UCX", disaggregated.log()
        )
    reached = re.search(
        r"\[prefill 1\] .* INFO nixl reaches 127\.0\.0\.1:\d+ over UCX \(.+\), \S+ GB/s", disaggregated.log()
    )
    assert reached, "the log must name the transport and its speed"


def test_pages_that_a_worker_reports_to_the_router_are_those_of_its_kv_events(disaggregated: RunningServer) -> None:
    (decode,) = workers_of(disaggregated, "decode")
    body = {"prompt": prompt_of(400, "pages"), "max_tokens": 2, "ignore_eos": True}
    answer = plain_http.post(decode + TEXT, json=body, headers={PAGE_MARKS_HEADER: "1"}, timeout=120)
    marks = parse_page_marks(answer.headers[PAGE_MARKS_HEADER])
    assert [mark.share_of_prompt for mark in marks] == [pages * 64 / 400 for pages in range(1, 7)]
    with plain_http.stream(
        "POST", decode + TEXT, json={**body, "stream": True}, headers={PAGE_MARKS_HEADER: "1"}, timeout=120
    ) as stream:
        assert stream.headers[PAGE_MARKS_HEADER] == answer.headers[PAGE_MARKS_HEADER]
    through_router = plain_http.post(disaggregated.url + TEXT, json=body, timeout=120)
    assert PAGE_MARKS_HEADER not in through_router.headers
    (ports,) = plain_http.get(f"{decode}/handoff", timeout=30).json()["kv_events"]

    async def published() -> None:
        """Returns when the worker has published all pages."""
        with zmq.asyncio.Context() as context:
            live, replay = (f"tcp://127.0.0.1:{ports[name]}" for name in ("live", "replay"))
            subscriber = KvEventSubscriber(context, live, replay)
            following = asyncio.create_task(subscriber.run())
            async with asyncio.timeout(60):
                while not all(mark.block_hash in subscriber.blocks for mark in marks):
                    await asyncio.sleep(0.02)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    asyncio.run(published())

    def router_follows() -> bool:
        workers = plain_http.get(f"{disaggregated.url}/workers", timeout=30).json()["workers"]
        return [worker["kv_events_synced"] for worker in workers] == [True, True]

    deadline = time.monotonic() + 60
    while not router_follows():
        assert time.monotonic() < deadline, "the router must follow the events of both workers"
        time.sleep(0.05)


def test_workers_report_their_role_and_reject_requests_that_do_not_fit_it(disaggregated: RunningServer) -> None:
    states = {}
    for role in ("prefill", "decode"):
        (url,) = workers_of(disaggregated, role)
        states[role] = plain_http.get(f"{url}/handoff", timeout=30).json()
        assert (states[role]["role"], states[role]["model"]) == (role, "demo-dsa")
        assert re.fullmatch(r"127\.0\.0\.1:\d+", states[role]["control"])
    assert states["prefill"]["control"] != states["decode"]["control"]
    (prefill,), (decode,) = workers_of(disaggregated, "prefill"), workers_of(disaggregated, "decode")
    body = {"model": "demo-dsa", "prompt": prompt_of(20), "max_tokens": 2}
    refused = plain_http.post(prefill + TEXT, json=body, timeout=30)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "wrong_role")
    assert plain_http.post(decode + TEXT, json=body, timeout=30).status_code == 200, (
        "a decode worker must also answer requests that name no prefill worker"
    )
    for address, status in (("nonsense", 400), ("tcp://127.0.0.1:1", 400), ("127.0.0.1:1", 503)):
        headers = dict(prefill_headers(address, SECRET))
        answer = plain_http.post(decode + TEXT, json=body, headers=headers, timeout=60)
        assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == "prefill_lost" and "no message from 127.0.0.1:1 for 4 s" in error["message"]


def test_defect_21_every_process_listens_on_loopback_only_also_after_handoffs(
    colocated: RunningServer, disaggregated: RunningServer
) -> None:
    choices_of(disaggregated, 70)
    alone, together = (
        listening({server.process.pid} | descendants_of(server.process.pid)) for server in (colocated, disaggregated)
    )
    assert {listener.host for listener in [*alone, *together]} == {"127.0.0.1"}
    assert len(alone) == 1, "a server without peers needs one port"
    urls = [disaggregated.url, *workers_of(disaggregated, "prefill"), *workers_of(disaggregated, "decode")]
    http_ports = {int(url.rpartition(":")[2]) for url in urls}
    assert len(http_ports) == 3 and http_ports < {listener.port for listener in together}


def test_a_decode_worker_connects_only_to_prefill_workers_that_its_router_signed(disaggregated: RunningServer) -> None:
    (prefill,), (decode,) = workers_of(disaggregated, "prefill"), workers_of(disaggregated, "decode")
    known = plain_http.get(f"{prefill}/handoff", timeout=30).json()["control"]
    body = {"model": "demo-dsa", "prompt": prompt_of(20), "max_tokens": 2}
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
            answer = plain_http.post(decode + TEXT, json=body, headers=dict(headers), timeout=60)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_allowed"), headers
        with pytest.raises(BlockingIOError):
            victim.accept()
    answer = plain_http.post(decode + TEXT, json=body, headers=dict(prefill_headers(known, SECRET)), timeout=60)
    assert answer.status_code == 200, answer.text


def test_a_server_of_both_roles_rejects_handoffs(colocated: RunningServer) -> None:
    body = {"model": "demo-dsa", "prompt": [3], "max_tokens": 1}
    refused = plain_http.post(colocated.url + TEXT, json=body, headers={"x-hotset-prefill": "127.0.0.1:1"}, timeout=30)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "wrong_role")
    refused_landing = plain_http.post(colocated.url + TEXT, json={**body, "landing": "host"}, timeout=30)
    assert (refused_landing.status_code, refused_landing.json()["error"]["param"]) == (400, "landing")
    state = plain_http.get(f"{colocated.url}/handoff", timeout=30).json()
    assert (state["role"], state["control"]) == ("both", None)


@pytest.fixture
def tiny_disaggregated(tiny_model: str, tmp_path: Path) -> Iterator[RunningServer]:
    flags = ["--disaggregate", "1P1D", "--load-format", "dummy", "--drain-seconds", "20", "--api-key", API_KEY]
    with serving(tmp_path, tiny_model, *SIZES, *flags) as server:
        yield server


def test_sigint_drains_in_order_and_leaves_no_process(tiny_disaggregated: RunningServer) -> None:
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True, "stream": True}
    pids = descendants_of(tiny_disaggregated.process.pid)
    assert len(pids) >= 5, "there must be two workers, an engine for each, and a router"
    key = {"Authorization": f"Bearer {API_KEY}"}
    assert plain_http.post(tiny_disaggregated.url + TEXT, json=body, timeout=30).status_code == 401
    for path in ("/", "/docs", "/docs/start.js", "/docs/swagger-ui.css", "/openapi.json"):
        page = plain_http.get(tiny_disaggregated.url + path, timeout=30, follow_redirects=True)
        assert page.status_code == 200, "the router's page, and the documentation that it forwards, need no key"
        source = {"/": "'none'", "/docs": "'self'"}.get(path)
        assert source is None or f"default-src {source}" in page.headers["content-security-policy"]
    for pid in pids:
        assert API_KEY.encode() not in command_line(pid), "every user of the machine can read a process's arguments"
    with plain_http.stream("POST", tiny_disaggregated.url + TEXT, json=body, headers=key, timeout=60) as stream:
        tiny_disaggregated.process.send_signal(signal.SIGINT)
        *_, last = [line for line in stream.iter_lines() if line]
    assert last == "data: [DONE]"
    assert tiny_disaggregated.process.wait(90) == 0
    wait_until_ended(pids)
    stopped = re.findall(r"\[(\w+)[^]]*\].*shutting down: requests in flight", tiny_disaggregated.log())
    assert stopped == ["router", "decode", "prefill"]
    assert re.search(
        r"\[router\] .* POST /v1/completions 401 \d+ ms \S+: missing or wrong API key", tiny_disaggregated.log()
    )
    assert "Traceback" not in tiny_disaggregated.log()


def test_the_death_of_one_child_process_stops_all_and_names_it(tiny_disaggregated: RunningServer) -> None:
    pids = descendants_of(tiny_disaggregated.process.pid)
    (prefill,) = [pid for pid in pids if b"\0prefill\0" in command_line(pid)]
    os.kill(prefill, signal.SIGKILL)
    assert tiny_disaggregated.process.wait(90) == 1
    assert "error: prefill 1 ended (SIGKILL); the other processes are stopped" in tiny_disaggregated.log()
    wait_until_ended(pids)


def test_death_of_the_command_itself_leaves_no_orphans(disaggregated: RunningServer) -> None:
    """This must be the last test of this file that uses `disaggregated`, because it kills the shared server."""
    pids = descendants_of(disaggregated.process.pid)
    assert len(pids) >= 5, "there must be two workers, an engine for each, and a router"
    disaggregated.process.kill()
    disaggregated.process.wait(90)
    wait_until_ended(pids)
