"""If a worker or the router dies, clients get another worker's answer or an error, and no worker continues a
request whose client is gone."""

import json
import signal
from typing import Any

import httpx
import plain_http
import pytest
from ports import reserved_port
from processes import pause
from running_router import WAIT_SECONDS, Cluster, Router, Stub
from stub_worker import event
from waiting import wait_until


@pytest.fixture
def prefill(idle_workers: list[Stub]) -> Stub:
    return idle_workers[0]


def test_workers_that_die_before_the_first_byte_are_replaced_by_another(
    cluster: Cluster, prefill: Stub, idle_workers: list[Stub]
) -> None:
    """The router forwards a response that is not an event stream only when it is complete, so a worker that dies within
    such a response ("short") dies before the client's first byte, too."""
    doomed = [cluster.stub("decode", name, behaviour=name) for name in ("dies", "short")]
    router = cluster.router([prefill], [*doomed, idle_workers[2]])
    answers = [router.post(stream=stream) for stream in (True, False, True)]
    assert [answer.headers["x-worker"] for answer in answers] == ["d1"] * 3
    assert [stub.process.wait(WAIT_SECONDS) for stub in doomed] == [-signal.SIGKILL] * 2
    # The failed request and the next health check are two failures.
    assert router.up(prefill, idle_workers[2]), "a worker that died is not marked as down"
    assert router.metric("hotset_router_retries_total", reason="decode_lost") == 2
    assert router.metric("hotset_router_workers", role="decode", state="down") == 2
    assert "Traceback" not in router.log()


def test_death_in_a_stream_ends_it_with_an_error_event(
    cluster: Cluster, prefill: Stub, idle_workers: list[Stub]
) -> None:
    """One worker dies between two events, the other within an event."""
    behaviours = ("dies-midway", "half")
    router = cluster.router([prefill], [cluster.stub("decode", name, behaviour=name) for name in behaviours])
    answered = set()
    for _ in behaviours:
        with router.stream() as stream:
            *received, last = plain_http.events_of(stream)
        answered.add(name := stream.headers["x-worker"])
        assert received == [json.loads(event(name, number)[6:]) for number in range(3)]
        assert (last["error"]["code"], last["error"]["type"]) == ("worker_lost", "service_unavailable_error")
    assert answered == set(behaviours)
    assert wait_until(lambda: router.metric("hotset_router_requests_in_flight") == 0)
    assert router.metric("hotset_router_requests_total", outcome="interrupted") == 2
    assert router.metric("hotset_router_retries_total") == 0, "a response is not retried after its first byte"


def test_a_prefill_worker_that_dies_is_down_until_it_is_restarted(cluster: Cluster, idle_workers: list[Stub]) -> None:
    with reserved_port() as port:
        doomed = cluster.stub("prefill", "doomed", port=port)
        router = cluster.router([doomed], [idle_workers[2]])
        doomed.kill()
        assert wait_until(lambda: router.post().status_code == 503)
        answer = router.post()
        assert (answer.json()["error"]["code"], answer.headers["retry-after"]) == ("no_workers", "2")
        assert "prefill" in answer.json()["error"]["message"]
        restarted = cluster.stub("prefill", "restarted", port=port)
        assert wait_until(lambda: router.post().status_code == 200)
    assert idle_workers[2].seen()["requests"][-1]["headers"]["x-hotset-prefill"] == f"{restarted.name}:9000"
    assert "Traceback" not in router.log()


def test_a_worker_that_hangs_is_down_until_it_answers(router: Router, idle_workers: list[Stub]) -> None:
    prefills, (hanging, other) = idle_workers[:2], idle_workers[2:]
    pause(hanging.process.pid)
    try:
        assert wait_until(lambda: router.up(*prefills, other))
        assert router.workers()[hanging.url]["last_error"] == "did not answer within 2 s"
    finally:
        hanging.process.send_signal(signal.SIGCONT)
    assert wait_until(lambda: router.up(*idle_workers))


def start_endless_stream(router: Router, stub: Stub) -> Any:
    stub.behave(behaviour="drip")
    return router.stream()


def test_sigterm_lets_streams_finish_and_ends_with_0(cluster: Cluster, prefill: Stub, idle_workers: list[Stub]) -> None:
    router = cluster.router([prefill], [idle_workers[2]])
    with start_endless_stream(router, idle_workers[2]) as stream:
        lines = stream.iter_lines()
        next(lines)
        router.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: plain_http.refuses_connections(router.url))
        idle_workers[2].behave(behaviour="well")
        *_, last = [line for line in lines if line]
    assert last == "data: [DONE]"
    assert router.process.wait(WAIT_SECONDS) == 0
    assert "Traceback" not in router.log()


def test_a_stream_that_outlasts_the_drain_ends_with_an_error_event(
    cluster: Cluster, prefill: Stub, idle_workers: list[Stub]
) -> None:
    router = cluster.router([prefill], [idle_workers[2]], "--drain-seconds", "0.5")
    with start_endless_stream(router, idle_workers[2]) as stream:
        router.process.send_signal(signal.SIGTERM)
        assert plain_http.events_of(stream)[-1]["error"]["code"] == "engine_stopped"
    assert router.process.wait(WAIT_SECONDS) == 0
    assert wait_until(lambda: idle_workers[2].seen()["disconnected"] == 1)


def test_death_of_the_router_leaves_no_worker_computing(
    cluster: Cluster, prefill: Stub, idle_workers: list[Stub]
) -> None:
    router = cluster.router([prefill], [idle_workers[2]])
    with start_endless_stream(router, idle_workers[2]) as stream:
        pieces = stream.iter_raw()
        next(pieces)
        router.process.kill()
        assert wait_until(lambda: idle_workers[2].seen()["disconnected"] == 1)
        with pytest.raises(httpx.RemoteProtocolError):
            list(pieces)
