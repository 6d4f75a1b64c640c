"""The limit on requests in progress: exact, worded as every other error, and given back when a request ends."""

from contextlib import ExitStack
from pathlib import Path

import httpx
from running_server import RunningServer, serving

TEXT = "/v1/completions"
LONG = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "a", "max_tokens": 1}


def test_one_request_more_than_the_limit_gets_429_until_another_ends(tiny_model: str, tmp_path: Path) -> None:
    flags = ("--load-format", "dummy", "--max-concurrency", "2")
    with serving(tmp_path, tiny_model, *flags) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        with ExitStack() as streams:
            for _ in range(2):
                running = streams.enter_context(http.stream("POST", TEXT, json=LONG))
                assert running.status_code == 200 and next(running.iter_lines()).startswith("data: ")
            refused = http.post(TEXT, json=SHORT)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert (refused.json()["error"]["type"], refused.json()["error"]["code"]) == (
                "rate_limit_error",
                "queue_full",
            )
            assert http.post("/tokenize", json={"prompt": "a"}).status_code == 200
            assert http.get("/v1/models").status_code == http.get("/health").status_code == 200
        assert_all_is_over(server)
        assert [http.post(TEXT, json=body).status_code for body in (SHORT, {"prompt": []}) * 3] == [200, 400] * 3


def assert_all_is_over(server: RunningServer) -> None:
    assert server.gauge_becomes("hotset_requests_running", lambda count: count == 0) == 0
