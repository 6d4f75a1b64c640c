"""Hostile structures are refused or followed, and other requests notice nothing: their tokens are the same."""

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import plain_http
import pytest
from running_server import RunningServer

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from hostile import MAKERS, hostile_requests

SLOW = pytest.mark.slow
PLAIN = {"prompt": "Once upon a time", "max_tokens": 16, "ignore_eos": True, "temperature": 1.0, "seed": 4}
GOOD: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a"}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "boolean"}}},
}


def post(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    return plain_http.post(f"{server.url}/v1/{path}", json=body, timeout=300)


@pytest.mark.parametrize(
    ("seed", "tokens", "with_tools"), [(1, 4, False), *(pytest.param(n, 40, True, marks=SLOW) for n in range(2, 8))]
)
def test_hostile_structures_change_nothing_for_others(
    demo_server: RunningServer, seed: int, tokens: int, with_tools: bool
) -> None:
    expected = post(demo_server, "completions", PLAIN).json()["choices"][0]["text"]
    bodies = [body | {"max_tokens": tokens} for body in hostile_requests(seed, 2 * len(MAKERS))]
    bodies = [body for body in bodies if with_tools or "tools" not in body]  # tools make long prompts
    with ThreadPoolExecutor(6) as threads:
        answers = [threads.submit(post, demo_server, "chat/completions", body) for body in bodies]
        for number in itertools.count():
            assert post(demo_server, "completions", PLAIN).json()["choices"][0]["text"] == expected
            assert plain_http.get(f"{demo_server.url}/health", timeout=60).status_code == 200
            if all(answer.done() for answer in answers):
                break
            assert number < 10_000
    for answer in answers:
        response = answer.result()
        assert response.status_code in (200, 400), response.text[:300]
        if response.status_code == 400:
            error = response.json()["error"]
            assert error["message"] and error["code"], error
    good = post(demo_server, "chat/completions", GOOD)
    assert good.json()["choices"][0]["message"]["content"] in ("true", "false")
