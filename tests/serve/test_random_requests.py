"""The requests of benchmarks/fuzz_requests.py and benchmarks/hostile.py: the benchmarks send thousands of them, and
these tests a few."""

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import plain_http
import pytest
from running_server import RunningServer

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from fuzz_requests import check_endpoints
from hostile import MAKERS, hostile_requests
from random_requests import Case, case_of

CASES = [case_of(2, number) for number in range(20)]
CASES = [case for case in CASES if not case.half and case.leaves_after is None]

PLAIN = {"prompt": "Once upon a time", "max_tokens": 16, "ignore_eos": True, "temperature": 1.0, "seed": 4}
GOOD: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a"}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "boolean"}}},
}


@pytest.mark.slow
def test_random_requests_are_answered_without_an_error_of_the_server(demo_server: RunningServer) -> None:
    def send(case: Case) -> httpx.Response:
        url, timeout = demo_server.url + case.path, 300
        return plain_http.request(case.method, url, headers=case.headers, content=case.body, timeout=timeout)

    with ThreadPoolExecutor(8) as threads:
        responses = list(threads.map(send, CASES))
    assert [case for case, response in zip(CASES, responses, strict=True) if response.status_code >= 500] == []
    assert 2 * sum(response.is_success for response in responses) >= len(CASES)
    assert any(response.status_code == 400 for response in responses)


def test_a_random_request_depends_on_its_numbers_only() -> None:
    assert case_of(2, 7) == case_of(2, 7)
    assert len({case_of(seed, number).body for seed in (1, 2) for number in range(20)}) > 20


@pytest.mark.slow
def test_every_documented_endpoint_gets_random_requests(demo_server: RunningServer) -> None:
    check_endpoints(demo_server.url)  # ends the script otherwise


def post(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    return plain_http.post(f"{server.url}/v1/{path}", json=body, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_hostile_structures_change_nothing_for_others(demo_server: RunningServer, seed: int) -> None:
    """They are refused or followed, and the tokens of other requests are the same."""
    expected = post(demo_server, "completions", PLAIN).json()["choices"][0]["text"]
    bodies = [body | {"max_tokens": 40} for body in hostile_requests(seed, 2 * len(MAKERS))]
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
