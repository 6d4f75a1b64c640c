"""What passes through a router: bytes unchanged, failures mended where another worker can, and nothing kept open."""

import itertools
import json
import subprocess
import sys
from typing import Any

import httpx
import pytest
from running_router import Cluster, Router, Stub, eventually
from stub_worker import event

PATH = "/v1/completions"


def requests_of(stubs: list[Stub]) -> list[dict[str, Any]]:
    return [{**request, "at": stub.name} for stub in stubs for request in stub.seen()["requests"]]


def prefills_of(stubs: list[Stub]) -> list[str]:
    """The prefill workers that were named to decode workers."""
    return [request["headers"]["x-hotset-prefill"] for request in requests_of(stubs)]


def error_of(data: str | bytes) -> str:
    return json.loads(data)["error"]["code"]


def test_body_and_headers_arrive_as_they_were_sent(router: Router, calm: list[Stub]) -> None:
    body = b'{ "prompt":"\xc3\xa9" ,\n\t"odd": 1e3}'
    sent = {"Authorization": "Bearer k", "X-Own": "1", "X-Request-Id": "mine", "X-Hotset-Prefill": "evil:1"}
    answer = httpx.post(f"{router.url}{PATH}?a=%2F", content=body, headers=sent, timeout=30)
    (seen,) = requests_of(calm)
    assert seen["body"].encode("latin-1") == body
    headers = seen["headers"]
    assert (headers["authorization"], headers["x-own"], headers["x-request-id"]) == ("Bearer k", "1", "mine")
    assert headers["x-hotset-prefill"] in ("p1:9000", "p2:9000"), "a client must not choose who is connected to"
    assert headers["host"] in [stub.url.removeprefix("http://") for stub in calm]
    assert (answer.headers["x-request-id"], answer.headers["x-worker"]) == ("mine", seen["at"])
    assert answer.json() == {"text": f"from {seen['at']}"}


def test_events_arrive_as_they_were_sent(router: Router, calm: list[Stub]) -> None:
    with router.stream() as stream:
        name, got = stream.headers["x-worker"], b"".join(stream.iter_raw())
    assert got == b"".join(event(name, number) for number in range(5)) + b"data: [DONE]\n\n"
    assert stream.headers["content-type"].startswith("text/event-stream")


def test_events_are_passed_on_while_the_worker_still_speaks(router: Router, calm: list[Stub]) -> None:
    for stub in calm[2:]:
        stub.behave(behaviour="drip")
    with router.stream() as stream:
        lines = (line for line in stream.iter_lines() if line)
        assert [json.loads(line[6:])["text"] for line in itertools.islice(lines, 3)] == ["é0", "é1", "é2"]


@pytest.mark.parametrize("behaviour", ["drip", "slow"], ids=["in a stream", "before the first byte"])
def test_a_client_that_leaves_takes_the_request_from_the_worker(
    router: Router, calm: list[Stub], behaviour: str
) -> None:
    for stub in calm[2:]:
        stub.behave(behaviour=behaviour)
    left = router.metric("hotset_router_requests_total", outcome="disconnected")
    if behaviour == "drip":
        with router.stream() as stream:
            next(stream.iter_raw())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{router.url}{PATH}", json={"stream": True}, timeout=0.5)
    assert eventually(lambda: sum(stub.seen()["left"] for stub in calm) == 1)
    assert eventually(lambda: router.metric("hotset_router_requests_in_flight") == 0)
    assert router.metric("hotset_router_tokens_in_flight") == 0
    assert router.metric("hotset_router_requests_total", outcome="disconnected") == left + 1


def test_a_lost_prefill_is_asked_of_another_worker(router: Router, calm: list[Stub]) -> None:
    for stub in calm[2:]:
        stub.behave(behaviour="lost-once")
    retries = router.metric("hotset_router_retries_total", reason="prefill_lost")
    answer = router.post()
    assert answer.status_code == 200
    tried = prefills_of(calm)
    assert len(tried) == 3 and set(tried) == {"p1:9000", "p2:9000"}
    assert len({request["headers"]["x-request-id"] for request in requests_of(calm)}) == 1
    assert router.metric("hotset_router_retries_total", reason="prefill_lost") == retries + 2


def test_a_decode_worker_without_room_is_passed_over_and_no_prefill_worker_blamed(
    router: Router, calm: list[Stub]
) -> None:
    for stub in calm[2:]:
        stub.behave(behaviour="full")
    blamed = router.metric("hotset_router_retries_total", reason="prefill_lost")
    passed = router.metric("hotset_router_retries_total", reason="decode_lost")
    answer = router.post()
    assert (answer.status_code, error_of(answer.text)) == (503, "no_room_left")
    assert router.metric("hotset_router_retries_total", reason="prefill_lost") == blamed
    assert router.metric("hotset_router_retries_total", reason="decode_lost") == passed + 2
    assert all(stub.seen()["requests"] for stub in calm[2:]), "the other one might have had room"


def test_attempts_end_and_the_last_answer_says_why(router: Router, calm: list[Stub]) -> None:
    for stub in calm[2:]:
        stub.behave(behaviour="lost")
    answer = router.post(stream=True)
    assert (answer.status_code, error_of(answer.text)) == (503, "prefill_lost")
    assert answer.headers["retry-after"] == "1"
    assert len(prefills_of(calm)) == 3


def test_an_only_prefill_worker_that_lives_is_asked_again(shared: Cluster, calm: list[Stub]) -> None:
    p1, _, d1, _ = calm
    alone = shared.router([p1], [d1])
    d1.behave(behaviour="lost-once")
    assert alone.post().status_code == 200
    assert prefills_of([d1]) == ["p1:9000", "p1:9000"]


@pytest.mark.parametrize("behaviour", ["stopped", "garbage"])
def test_a_decode_worker_that_cannot_answer_is_replaced(router: Router, calm: list[Stub], behaviour: str) -> None:
    calm[2].behave(behaviour=behaviour)
    workers = [router.post().headers["x-worker"] for _ in range(4)]
    assert workers == ["d2"] * 4
    assert calm[2].bodies(), "it was asked and failed"


def test_a_refusal_is_passed_on_and_not_retried(router: Router, calm: list[Stub]) -> None:
    for stub in calm[2:]:
        stub.behave(behaviour="busy")
    refused = router.metric("hotset_router_requests_total", outcome="rejected")
    answer = router.post()
    assert (answer.status_code, answer.headers["retry-after"], error_of(answer.text)) == (429, "7", "queue_full")
    assert len(requests_of(calm)) == 1
    assert router.metric("hotset_router_requests_total", outcome="rejected") == refused + 1


def test_decode_worker_with_fewer_tokens_gets_the_next_request(router: Router, calm: list[Stub]) -> None:
    for stub in calm[2:]:
        stub.behave(behaviour="drip")
    with router.stream(prompt="x" * 4000) as long:
        pieces = long.iter_raw()
        next(pieces)
        busy = long.headers["x-worker"]
        (free,) = [stub for stub in calm[2:] if stub.name != busy]
        free.behave(behaviour="well")
        others = {router.post(prompt="x" * 400).headers["x-worker"] for _ in range(4)}
        assert 1000 <= router.metric("hotset_router_tokens_in_flight", role="decode") <= 1100
        assert router.metric("hotset_router_tokens_in_flight", role="prefill") == 0, "free again at the first byte"
    assert others == {free.name}


def test_prefill_worker_with_fewer_tokens_gets_the_next_request(router: Router, calm: list[Stub]) -> None:
    p1, p2, *decodes = calm
    p1.behave(waiting_tokens=5000)
    assert eventually(lambda: router.workers()[p1.url]["state"]["waiting_tokens"] == 5000)
    for _ in range(4):
        router.post()
    assert set(prefills_of(decodes)) == {"p2:9000"}
    p1.behave(waiting_tokens=0)
    p2.behave(waiting_tokens=5000)
    assert eventually(lambda: router.workers()[p2.url]["state"]["waiting_tokens"] == 5000)
    router.post()
    assert set(prefills_of(decodes)) == {"p1:9000", "p2:9000"}


def test_equal_workers_take_turns(router: Router, calm: list[Stub]) -> None:
    workers = [router.post().headers["x-worker"] for _ in range(6)]
    assert workers.count("d1") == workers.count("d2") == 3


def test_deadlines_end_what_does_not_begin_or_falls_silent(shared: Cluster, calm: list[Stub]) -> None:
    router = shared.router(calm[:2], calm[2:], "--response-timeout-seconds", "0.8", "--idle-timeout-seconds", "0.3")
    for stub in calm[2:]:
        stub.behave(behaviour="slow")
    answer = router.post()
    assert (answer.status_code, error_of(answer.text)) == (504, "deadline_exceeded")
    assert eventually(lambda: sum(stub.seen()["left"] for stub in calm) == 1), "the worker was told"
    for stub in calm[2:]:
        stub.behave(behaviour="silent")
    with router.stream() as stream:
        *_, last = [line for line in stream.iter_lines() if line]
    assert error_of(last.removeprefix("data: ")) == "worker_lost"
    assert router.metric("hotset_router_requests_total", outcome="interrupted") == 1
    assert router.metric("hotset_router_requests_total", outcome="failed") == 1


def test_models_and_tokens_come_from_a_worker(router: Router, calm: list[Stub]) -> None:
    listed = httpx.get(f"{router.url}/v1/models", headers={"Authorization": "Bearer k"}, timeout=10).json()
    assert listed["data"][0]["id"] == "stub"
    assert router.post("/tokenize").status_code == 200
    for request in requests_of(calm):
        assert "x-hotset-prefill" not in request["headers"], "no prompt is computed for this"


def test_limits_of_bodies_and_of_requests_in_progress(shared: Cluster, calm: list[Stub]) -> None:
    router = shared.router(calm[:2], calm[2:], "--max-body-mib", "0.01", "--max-concurrency", "1")
    assert error_of(router.post(prompt="x" * 20_000).text) == "request_too_large"
    for stub in calm[2:]:
        stub.behave(behaviour="drip")
    with router.stream() as stream:
        pieces = stream.iter_raw()
        next(pieces)
        assert (router.post().status_code, error_of(router.post().text)) == (429, "queue_full")


def test_what_the_router_itself_refuses_has_our_shape(router: Router, calm: list[Stub]) -> None:
    assert error_of(httpx.get(f"{router.url}/nothing", timeout=10).text) == "not_found"
    assert error_of(httpx.get(f"{router.url}{PATH}", timeout=10).text) == "method_not_allowed"
    assert httpx.get(f"{router.url}/health", timeout=10).json() == {"status": "ok", "prefill": 2, "decode": 2}


def test_router_needs_neither_engine_nor_tensors() -> None:
    code = (
        "import sys, hotset.serve.router.server\n"
        "heavy = [name for name in sys.modules if name == 'torch' or name.startswith('hotset.engine')]\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
