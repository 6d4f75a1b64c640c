"""The relay forwards bytes unchanged, retries with other workers, and leaves no connection open."""

import http.client
import itertools
import json
import re
import subprocess
import sys
from typing import Any

import plain_http
import pytest
from idle_connections import exchange, health_seconds, many_idle_connections
from running_router import Cluster, Router, Stub, behave
from stub_worker import LATE_SECONDS, event
from waiting import wait_until

import hotset

PATH = "/v1/completions"


def requests_of(stubs: list[Stub]) -> list[dict[str, Any]]:
    return [{**request, "worker": stub.name} for stub in stubs for request in stub.seen()["requests"]]


def prefills_of(stubs: list[Stub]) -> list[str]:
    """Returns the address of the prefill worker in each request that these workers received."""
    return [request["headers"]["x-hotset-prefill"] for request in requests_of(stubs)]


def error_code_of(data: str | bytes) -> str:
    return json.loads(data)["error"]["code"]


def test_body_and_headers_arrive_as_they_were_sent(router: Router, idle_workers: list[Stub]) -> None:
    body = b'{ "prompt":"\xc3\xa9" ,\n\t"odd": 1e3}'
    sent = {"Authorization": "Bearer k", "X-Own": "1", "X-Request-Id": "mine", "X-Hotset-Prefill": "evil:1"}
    sent["X-Hotset-Prefill-Signature"] = "forged"
    answer = plain_http.post(f"{router.url}{PATH}?a=%2F", content=body, headers=sent, timeout=30)
    (seen,) = requests_of(idle_workers)
    assert seen["body"].encode("latin-1") == body
    headers = seen["headers"]
    assert (headers["authorization"], headers["x-own"], headers["x-request-id"]) == ("Bearer k", "1", "mine")
    assert headers["x-hotset-prefill"] in ("p1:9000", "p2:9000"), "the client has chosen the prefill worker"
    assert "x-hotset-prefill-signature" not in headers, "a forged signature was forwarded"
    assert headers["host"] in [stub.url.removeprefix("http://") for stub in idle_workers]
    assert (answer.headers["x-request-id"], answer.headers["x-worker"]) == ("mine", seen["worker"])
    assert answer.json() == {"text": f"from {seen['worker']}"}


def test_events_arrive_as_they_were_sent(router: Router, idle_workers: list[Stub]) -> None:
    with router.stream() as stream:
        name, received = stream.headers["x-worker"], b"".join(stream.iter_raw())
    assert received == b"".join(event(name, number) for number in range(5)) + b"data: [DONE]\n\n"
    assert stream.headers["content-type"].startswith("text/event-stream")


def test_events_are_forwarded_while_the_worker_still_streams(router: Router, idle_workers: list[Stub]) -> None:
    behave(idle_workers[2:], "drip")
    with router.stream() as stream:
        lines = (line for line in stream.iter_lines() if line)
        assert [json.loads(line[6:])["text"] for line in itertools.islice(lines, 3)] == ["é0", "é1", "é2"]


@pytest.mark.parametrize("behaviour", ["drip", "slow"], ids=["in a stream", "before the first byte"])
def test_a_client_that_disconnects_aborts_the_request_at_the_worker(
    router: Router, idle_workers: list[Stub], behaviour: str
) -> None:
    behave(idle_workers[2:], behaviour)
    assert wait_until(lambda: router.metric("hotset_router_requests_in_flight") == 0)
    disconnects = router.metric("hotset_router_requests_total", outcome="disconnected")
    if behaviour == "drip":
        with router.stream() as stream:
            next(stream.iter_raw())
    else:
        client = http.client.HTTPConnection(router.url.removeprefix("http://"))
        client.request("POST", PATH, json.dumps({"stream": True}), {"Content-Type": "application/json"})
        assert wait_until(lambda: sum(stub.seen()["open"] for stub in idle_workers) == 1)
        client.close()
    assert wait_until(lambda: sum(stub.seen()["disconnected"] for stub in idle_workers) == 1)
    assert wait_until(lambda: router.metric("hotset_router_requests_in_flight") == 0)
    assert router.metric("hotset_router_tokens_in_flight") == 0
    assert router.metric("hotset_router_requests_total", outcome="disconnected") == disconnects + 1


@pytest.mark.parametrize("path", [PATH, "/v1/responses", "/v1/messages"])
def test_a_lost_prefill_is_retried_with_another_worker(router: Router, idle_workers: list[Stub], path: str) -> None:
    behave(idle_workers[2:], "lost-once")
    retries = router.metric("hotset_router_retries_total", reason="prefill_lost")
    answer = router.post(f"{path}?beta=true")
    assert answer.status_code == 200
    tried = prefills_of(idle_workers)
    assert len(tried) == 3 and set(tried) == {"p1:9000", "p2:9000"}
    (request_id,) = {request["headers"]["x-request-id"] for request in requests_of(idle_workers)}
    assert answer.headers.get("request-id") == (request_id if path == "/v1/messages" else None)
    assert router.metric("hotset_router_retries_total", reason="prefill_lost") == retries + 2


def test_if_a_decode_worker_has_no_room_another_is_tried_and_no_prefill_worker_counts_as_failed(
    router: Router, idle_workers: list[Stub]
) -> None:
    behave(idle_workers[2:], "full")
    prefill_retries = router.metric("hotset_router_retries_total", reason="prefill_lost")
    decode_retries = router.metric("hotset_router_retries_total", reason="decode_lost")
    answer = router.post()
    assert (answer.status_code, error_code_of(answer.text)) == (503, "no_room_left")
    assert router.metric("hotset_router_retries_total", reason="prefill_lost") == prefill_retries
    assert router.metric("hotset_router_retries_total", reason="decode_lost") == decode_retries + 2
    assert all(stub.seen()["requests"] for stub in idle_workers[2:]), "not both decode workers were tried"


def test_after_the_last_attempt_the_worker_error_is_returned(router: Router, idle_workers: list[Stub]) -> None:
    behave(idle_workers[2:], "lost")
    answer = router.post(stream=True)
    assert (answer.status_code, error_code_of(answer.text)) == (503, "prefill_lost")
    assert answer.headers.get_list("retry-after") == ["1"]
    assert len(prefills_of(idle_workers)) == 3


def test_the_only_prefill_worker_is_retried_if_it_is_alive(cluster: Cluster, idle_workers: list[Stub]) -> None:
    p1, _, d1, _ = idle_workers
    small_router = cluster.router([p1], [d1])
    d1.behave(behaviour="lost-once")
    assert small_router.post().status_code == 200
    assert prefills_of([d1]) == ["p1:9000", "p1:9000"]


@pytest.mark.parametrize("behaviour", ["stopped", "garbage", "moved"])
def test_a_decode_worker_that_cannot_answer_is_replaced(
    router: Router, idle_workers: list[Stub], behaviour: str
) -> None:
    idle_workers[2].behave(behaviour=behaviour)
    workers = [router.post().headers["x-worker"] for _ in range(4)]
    assert workers == ["d2"] * 4
    assert idle_workers[2].bodies(), "the worker that cannot answer was not tried"


def test_a_rejection_is_forwarded_and_not_retried(router: Router, idle_workers: list[Stub]) -> None:
    behave(idle_workers[2:], "busy")
    rejections = router.metric("hotset_router_requests_total", outcome="rejected")
    answer = router.post()
    assert (answer.status_code, answer.headers["retry-after"], error_code_of(answer.text)) == (429, "7", "queue_full")
    assert len(requests_of(idle_workers)) == 1
    assert router.metric("hotset_router_requests_total", outcome="rejected") == rejections + 1
    line = re.compile(rf"POST {PATH} 429 \d+ ms \S+: queue_full\n")  # the stub's code is also its message
    assert wait_until(lambda: line.search(router.log()) is not None)


def test_decode_worker_with_fewer_tokens_gets_the_next_request(router: Router, idle_workers: list[Stub]) -> None:
    behave(idle_workers[2:], "drip")
    with router.stream(prompt="x" * 4000) as long:
        pieces = long.iter_raw()
        next(pieces)
        busy = long.headers["x-worker"]
        (free,) = [stub for stub in idle_workers[2:] if stub.name != busy]
        free.behave(behaviour="well")
        next_workers = {router.post(prompt="x" * 400).headers["x-worker"] for _ in range(4)}
        assert 1000 <= router.metric("hotset_router_tokens_in_flight", role="decode") <= 1100
        assert router.metric("hotset_router_tokens_in_flight", role="prefill") == 0, "the first byte ends the load"
    assert next_workers == {free.name}


def test_prefill_worker_with_fewer_tokens_gets_the_next_request(router: Router, idle_workers: list[Stub]) -> None:
    p1, p2, *decode_workers = idle_workers
    p1.behave(waiting_tokens=5000)
    assert wait_until(lambda: router.workers()[p1.url]["state"]["waiting_tokens"] == 5000)
    for _ in range(4):
        router.post()
    assert set(prefills_of(decode_workers)) == {"p2:9000"}
    p1.behave(waiting_tokens=0)
    p2.behave(waiting_tokens=5000)
    assert wait_until(lambda: router.workers()[p2.url]["state"]["waiting_tokens"] == 5000)
    router.post()
    assert set(prefills_of(decode_workers)) == {"p1:9000", "p2:9000"}


def test_timeouts_end_responses_that_do_not_begin_or_stop_midway(cluster: Cluster, idle_workers: list[Stub]) -> None:
    router = cluster.router(
        idle_workers[:2], idle_workers[2:], "--response-timeout-seconds", "2", "--idle-timeout-seconds", "0.3"
    )
    behave(idle_workers[2:], "slow")
    answer = router.post()
    assert (answer.status_code, error_code_of(answer.text)) == (504, "deadline_exceeded")
    assert wait_until(lambda: sum(stub.seen()["disconnected"] for stub in idle_workers) == 1), (
        "the worker has not noticed the disconnect"
    )
    behave(idle_workers[2:], "silent")
    with router.stream() as stream:
        *_, last = [line for line in stream.iter_lines() if line]
    assert error_code_of(last.removeprefix("data: ")) == "worker_lost"
    assert wait_until(lambda: router.metric("hotset_router_requests_in_flight") == 0)
    assert wait_until(lambda: ": the worker was lost in the middle" in router.log())
    with router.stream("/v1/messages") as stream:
        *_, name, last = [line for line in stream.iter_lines() if line]
    assert name == "event: error" and json.loads(last.removeprefix("data: "))["type"] == "error"
    assert wait_until(lambda: router.log().count(": the worker was lost in the middle") == 2)
    assert router.metric("hotset_router_requests_total", outcome="interrupted") == 2
    assert router.metric("hotset_router_requests_total", outcome="failed") == 1


def test_the_router_is_as_lenient_as_a_worker(router: Router, idle_workers: list[Stub]) -> None:
    with plain_http.Client(base_url=router.url, timeout=30) as http:
        assert http.get("/version").json() == {"version": hotset.__version__}
        assert http.get("/ping/").json()["status"] == "ok"
        for path in ("/v1/models/", "/health", "/metrics"):
            head = http.head(path)
            assert (head.status_code, head.content) == (200, b"") and int(head.headers["content-length"]) > 0
        answer = http.post(
            f"{PATH}/", content=b"{}", headers={"Content-Type": "text/plain", "X-Request-Id": "two words"}
        )
        assert answer.status_code == 200
        page = {"Content-Type": "text/plain", "Origin": "http://page.example"}
        assert error_code_of(http.post(PATH, content=b"{}", headers=page).text) == "not_allowed"
    (seen,) = [request for request in requests_of(idle_workers) if "body" in request]
    assert seen["headers"]["content-type"] == "application/json"
    assert answer.headers.get_list("x-request-id") == [seen["headers"]["x-request-id"]] != ["two words"]


def test_a_worker_that_answers_messages_with_an_error_is_replaced(router: Router, idle_workers: list[Stub]) -> None:
    idle_workers[2].behave(behaviour="stopped")
    assert [router.post("/v1/messages").headers["x-worker"] for _ in range(2)] == ["d2"] * 2
    assert idle_workers[2].bodies(), "the worker that cannot answer was not tried"


def test_errors_of_messages_have_the_shape_of_anthropic(router: Router, idle_workers: list[Stub]) -> None:
    behave(idle_workers[2:], "lost")
    answer = router.post("/v1/messages")
    assert answer.status_code == 503 and answer.headers.get_list("retry-after") == ["1"]
    body = answer.json()
    assert body["type"] == "error" and body["request_id"] == answer.headers["request-id"]
    assert body["error"] == {"type": "api_error", "message": "prefill_lost", "details": {"error_code": "prefill_lost"}}
    unknown = router.post("/v1/messages/batches").json()
    assert (unknown["type"], unknown["error"]["type"]) == ("error", "not_found_error")


def test_models_and_tokens_come_from_a_worker(router: Router, idle_workers: list[Stub]) -> None:
    listed = plain_http.get(f"{router.url}/v1/models", headers={"Authorization": "Bearer k"}, timeout=10).json()
    assert listed["data"][0]["id"] == "stub"
    assert router.post("/tokenize").status_code == 200
    assert router.post("/v1/messages/count_tokens").status_code == 200
    for request in requests_of(idle_workers):
        assert "x-hotset-prefill" not in request["headers"], "these requests need no prefill"


def test_the_time_to_the_first_byte_of_a_full_response_does_not_include_the_rest(
    router: Router, idle_workers: list[Stub]
) -> None:
    behave(idle_workers[2:], "late-body")
    names = ("hotset_router_upstream_first_byte_seconds_sum", "hotset_router_upstream_seconds_sum")
    before = [router.metric(name) for name in names]
    assert router.post().json() == {}
    first_byte, last_byte = (router.metric(name) - start for name, start in zip(names, before, strict=True))
    assert last_byte - first_byte > 0.5 * LATE_SECONDS  # the router may get the first byte late


def test_with_more_idle_connections_than_file_descriptors_the_router_serves_within_its_limits(
    cluster: Cluster, idle_workers: list[Stub]
) -> None:
    flags = ("--max-body-mib", "0.01", "--max-concurrency", "1")
    router = cluster.router(idle_workers[:2], idle_workers[2:], *flags, few_descriptors=True)
    with many_idle_connections(router.url):
        assert health_seconds(router.url) < 1.0
        assert router.post().status_code == 200
    assert router.log().count("\n") <= 100, router.log()
    assert "the limit of open files is 1024" in router.log()
    assert error_code_of(router.post(prompt="x" * 20_000).text) == "request_too_large"
    behave(idle_workers[2:], "drip")
    with router.stream() as stream:
        pieces = stream.iter_raw()
        next(pieces)
        assert (router.post().status_code, error_code_of(router.post().text)) == (429, "queue_full")


def test_a_request_with_a_length_and_a_chunked_encoding_is_refused(router: Router) -> None:
    headers = "Host: a\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n"
    answer = exchange(router.url, f"POST {PATH} HTTP/1.1\r\n{headers}\r\n0\r\n\r\nG".encode())
    assert answer.startswith(b"HTTP/1.1 400 ") and b"ambiguous_length" in answer


def test_errors_of_the_router_have_the_openai_format(router: Router, idle_workers: list[Stub]) -> None:
    unknown = plain_http.get(f"{router.url}/nothing", timeout=10).text
    assert error_code_of(unknown) == "not_found" and "/docs" in unknown
    assert error_code_of(plain_http.get(f"{router.url}{PATH}", timeout=10).text) == "method_not_allowed"
    assert plain_http.get(f"{router.url}/health", timeout=10).json() == {"status": "ok", "prefill": 2, "decode": 2}


def test_router_imports_neither_engine_nor_torch() -> None:
    code = (
        "import sys, hotset.fleet.router.server\n"
        "heavy = [name for name in sys.modules if name == 'torch' or name.startswith('hotset.engine')]\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_defect_23_a_degraded_decode_worker_gets_requests_only_if_there_is_no_other(
    router: Router, idle_workers: list[Stub]
) -> None:
    d1, d2 = idle_workers[2:]

    def degraded_workers() -> list[str]:
        states = [router.workers()[stub.url]["state"] for stub in (d1, d2)]
        return [state["degraded"] for state in states if state["degraded"]]

    d1.behave(degraded="309 pages are in quarantine")
    assert wait_until(lambda: len(degraded_workers()) == 1)
    assert [router.post().headers["x-worker"] for _ in range(6)] == ["d2"] * 6
    assert plain_http.get(f"{router.url}/health", timeout=30).status_code == 200
    d2.behave(degraded="400 pages are in quarantine")
    assert wait_until(lambda: len(degraded_workers()) == 2)
    health = plain_http.get(f"{router.url}/health", timeout=30)
    assert (health.status_code, error_code_of(health.content)) == (503, "no_room_left")
    assert "309 pages" in health.text
    assert router.post().status_code == 200, "short requests may still fit"
    for stub in (d1, d2):
        stub.behave(degraded=None)
    assert wait_until(lambda: not degraded_workers())
