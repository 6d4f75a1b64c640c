"""The requests of benchmarks/fuzz_requests.py: the benchmark sends thousands of them, and this test a few."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import plain_http
from running_server import RunningServer

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from fuzz_requests import check_endpoints
from random_requests import Case, case_of

CASES = [case_of(2, number) for number in range(20)]
CASES = [case for case in CASES if not case.half and case.leaves_after is None]


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


def test_every_documented_endpoint_gets_random_requests(demo_server: RunningServer) -> None:
    check_endpoints(demo_server.url)  # ends the script otherwise
