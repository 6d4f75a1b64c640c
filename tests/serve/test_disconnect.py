"""When a client disconnects, at any time, its pages are freed at once."""

from typing import Any

import httpx
import pytest
from running_server import API_KEY, RunningServer

ENDLESS = {"max_tokens": 8000, "ignore_eos": True}
TEXT = ("/v1/completions", {"model": "tiny", "prompt": "hello", **ENDLESS})
CHAT = ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **ENDLESS})


def assert_nothing_is_held(server: RunningServer) -> None:
    # Much less time than the full answer would take, so the pages were freed by the disconnect.
    assert server.gauge_becomes("hotset_device_pages_held", lambda pages: pages == 0) == 0
    assert server.gauge("hotset_requests_running") == server.gauge("hotset_requests_waiting") == 0
    assert "Traceback" not in server.log()


@pytest.mark.parametrize("request_", [TEXT, CHAT], ids=["text", "chat"])
def test_disconnecting_from_a_stream_frees_its_pages(
    tiny_server: RunningServer, request_: tuple[str, dict[str, Any]]
) -> None:
    path, body = request_
    with httpx.stream("POST", tiny_server.url + path, json={**body, "stream": True}, timeout=30) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        assert tiny_server.gauge("hotset_device_pages_held") > 0
    assert_nothing_is_held(tiny_server)


@pytest.mark.parametrize("change", [{}, {"n": 3}, {"prompt": ["a", "b", "c"]}], ids=["one", "n", "prompts"])
def test_disconnecting_before_a_full_response_frees_its_pages(
    tiny_server: RunningServer, change: dict[str, Any]
) -> None:
    path, body = TEXT
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(tiny_server.url + path, json={**body, **change}, timeout=1.0)
    assert_nothing_is_held(tiny_server)


def test_disconnecting_while_queued_frees_the_place_in_the_queue(limited_server: RunningServer) -> None:
    body = {**TEXT[1], "model": "renamed", "stream": True}
    headers = {"Authorization": f"Bearer {API_KEY}"}
    with (
        httpx.Client(base_url=limited_server.url, headers=headers, timeout=30) as http,
        http.stream("POST", TEXT[0], json=body) as running,
    ):
        lines = running.iter_lines()
        assert next(lines).startswith("data: ")
        with pytest.raises(httpx.ReadTimeout):
            http.post(TEXT[0], json=body, timeout=0.5)
        assert limited_server.gauge_becomes("hotset_requests_waiting", lambda count: count == 0) == 0
        assert limited_server.gauge("hotset_requests_running") == 1, "the running request must continue"
    assert_nothing_is_held(limited_server)
