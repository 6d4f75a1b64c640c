"""Invalid input gets a clear error in OpenAI's format, and leaves no state behind."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from running_server import API_KEY, ORIGIN, RunningServer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
VALID = {
    CHAT: {"model": "tiny", "messages": MESSAGES, "max_tokens": 2},
    TEXT: {"model": "tiny", "prompt": "hello", "max_tokens": 2},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1]},
}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def tiny(tiny_server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_server.url, timeout=30) as http:
        yield http


@pytest.fixture(scope="module")
def limited(limited_server: RunningServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    with httpx.Client(base_url=limited_server.url, timeout=60, headers=headers) as http:
        yield http


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and "Traceback" not in answer.text
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize("path", VALID)
def test_the_requests_that_are_invalidated_below_are_valid(tiny: httpx.Client, path: str) -> None:
    assert tiny.post(path, json=VALID[path]).status_code == 200


INVALID: list[tuple[str, dict[str, Any], str, str]] = [
    # Fields that are not implemented are rejected by name.
    *[(CHAT, {field: value}, "unsupported_field", field) for field, value in [
        ("tools", []), ("tool_choice", "auto"), ("functions", []), ("response_format", {"type": "json_object"}),
        ("user", "me"), ("audio", {}), ("modalities", ["text"]), ("parallel_tool_calls", True), ("store", False),
        ("metadata", {}), ("prediction", None), ("unheard_of", 1),
    ]],
    *[(TEXT, {field: value}, "unsupported_field", field) for field, value in [
        ("echo", True), ("suffix", "!"), ("best_of", 2), ("user", "me"),
    ]],
    (CHAT, {"messages": [{"role": "user", "content": "a", "name": "me"}]}, "unsupported_field", "messages[0].name"),
    (CHAT, {"stream": True, "stream_options": {"x": 1}}, "unsupported_field", "stream_options.x"),
    # Conversations.
    (CHAT, {"messages": []}, "invalid_value", "messages"),
    (CHAT, {"messages": "hello"}, "invalid_value", "messages"),
    (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "invalid_value", "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "missing_field", "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "invalid_value", "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "invalid_value", "messages[0].content[0].type"),
    # Prompts.
    (TEXT, {"prompt": []}, "invalid_value", "prompt"),
    (TEXT, {"prompt": [[]]}, "invalid_value", "prompt[0]"),
    (TEXT, {"prompt": ""}, "empty_prompt", "prompt"),
    (TEXT, {"prompt": None}, "invalid_value", "prompt"),
    (TEXT, {"prompt": [1, "a"]}, "invalid_value", "prompt[1]"),
    (TEXT, {"prompt": [1.5]}, "invalid_value", "prompt[0]"),
    (TEXT, {"prompt": [257]}, "invalid_token_id", "prompt"),
    (TEXT, {"prompt": [-1]}, "invalid_token_id", "prompt"),
    (TEXT, {"prompt": ["a"] * 100, "n": 128}, "invalid_value", "n"),
    ("/detokenize", {"tokens": [257]}, "invalid_token_id", "tokens"),
    ("/tokenize", {"messages": MESSAGES}, "invalid_value", None),
    # Sampling.
    *[(TEXT, {field: value}, "invalid_value", field) for field, value in [
        ("temperature", -0.1), ("temperature", 11), ("temperature", "1"), ("temperature", True), ("top_p", 0),
        ("top_p", 1.1), ("top_k", -1), ("min_p", 2), ("repetition_penalty", 0), ("presence_penalty", 3),
        ("frequency_penalty", -3), ("n", 0), ("n", 129), ("n", 1.5), ("max_tokens", 0), ("max_tokens", "4"),
        ("min_tokens", 3), ("logprobs", 21), ("logprobs", True), ("seed", 1 << 63), ("seed", 0.5),
        ("stop", ["a"] * 17), ("stop", 5), ("stream", "yes"), ("ignore_eos", 1),
    ]],
    (TEXT, {"stop": ["a", ""]}, "invalid_value", "stop[1]"),
    (TEXT, {"logit_bias": {"a": 1}}, "invalid_value", "logit_bias.a"),
    (TEXT, {"logit_bias": {"1": 101}}, "invalid_value", "logit_bias"),
    (TEXT, {"logit_bias": {"257": 1}}, "invalid_token_id", "logit_bias"),
    (TEXT, {"stop_token_ids": [257]}, "invalid_token_id", "stop_token_ids"),
    (TEXT, {"temperature": 10**400}, "invalid_value", "temperature"),
    (CHAT, {"max_completion_tokens": 2}, "invalid_value", None),
    (CHAT, {"top_logprobs": 2}, "invalid_value", None),
    (CHAT, {"logprobs": 2}, "invalid_value", "logprobs"),
    (CHAT, {"stream_options": {"include_usage": True}}, "invalid_value", None),
]  # fmt: skip


@pytest.mark.parametrize(("path", "change", "code", "param"), INVALID, ids=lambda value: str(value)[:40])
def test_the_error_names_the_invalid_field(
    tiny: httpx.Client, path: str, change: dict[str, Any], code: str, param: str | None
) -> None:
    error = error_of(tiny.post(path, json={**VALID[path], **change}), 400)
    assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")
    if param is not None:
        assert param in error["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "max_tokens", "seed"])
def test_numbers_that_are_not_finite_are_rejected(tiny: httpx.Client, field: str, number: str) -> None:
    body = f'{{"model": "tiny", "prompt": "a", "{field}": {number}}}'
    assert error_of(tiny.post(TEXT, content=body, headers=JSON), 400)["param"] == field


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"hello",
        b"[1]",
        b"null",
        b'"text"',
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"prompt": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: body[:12].decode("latin-1"),
)
def test_malformed_bodies_are_rejected(tiny: httpx.Client, body: bytes) -> None:
    assert error_of(tiny.post(TEXT, content=body, headers=JSON), 400)["code"] == "invalid_json"


def test_a_body_of_another_content_type_is_rejected_with_a_hint(tiny: httpx.Client) -> None:
    answer = tiny.post(TEXT, data={"model": "tiny"})
    assert "application/json" in error_of(answer, 400)["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, r'{"model": "tiny", "prompt": "\ud800"}'),
        (TEXT, r'{"model": "tiny", "prompt": ["a", "\udfff"]}'),
        (TEXT, r'{"model": "tiny", "prompt": "a", "stop": "\ud800"}'),
        (TEXT, r'{"model": "tiny", "prompt": "a", "\ud800": 1}'),
        (TEXT, r'{"model": "tiny", "prompt": "a", "logit_bias": {"\ud800": 1}}'),
        (CHAT, r'{"model": "tiny", "messages": [{"role": "user", "content": "\ud800"}]}'),
        ("/tokenize", r'{"prompt": "\ud800"}'),
    ],
)
def test_lone_surrogates_are_rejected(tiny: httpx.Client, path: str, body: str) -> None:
    error_of(tiny.post(path, content=body, headers=JSON), 400)


def test_an_unknown_model_is_not_found_even_with_odd_characters_in_its_name(tiny: httpx.Client) -> None:
    for path in VALID:
        error = error_of(tiny.post(path, json={**VALID[path], "model": "gpt-5"}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "gpt-5" in error["message"] and "tiny" in error["message"]
    error_of(tiny.post(TEXT, content=r'{"model": "\ud800", "prompt": "a"}', headers=JSON), 404)
    error_of(tiny.get("/v1/models/a/b%0Ac"), 404)


def test_the_error_for_a_prompt_longer_than_the_context_names_both_lengths(tiny: httpx.Client) -> None:
    for path, change, needed in (
        (TEXT, {"prompt": "a" * 9000}, 9002),
        (TEXT, {"prompt": [1] * 9000, "max_tokens": None}, 9001),
        (TEXT, {"max_tokens": 8190}, 8195),
        (TEXT, {"prompt": [1] * 8190, "max_tokens": 3, "stream": True}, 8193),
    ):
        error = error_of(tiny.post(path, json={**VALID[path], **change}), 400)
        assert error["code"] == "context_length_exceeded"
        assert "8192" in error["message"] and str(needed) in error["message"]
    long_chat = {**VALID[CHAT], "messages": [{"role": "user", "content": "a" * 9000}]}
    error = error_of(tiny.post(CHAT, json=long_chat), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_unknown_paths_and_wrong_methods_have_the_same_format(tiny: httpx.Client) -> None:
    assert error_of(tiny.get("/v1/nothing"), 404)["code"] == "not_found"
    wrong = tiny.get(CHAT)
    assert error_of(wrong, 405)["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"


def test_the_root_leads_to_the_documentation(tiny: httpx.Client) -> None:
    assert tiny.get("/", follow_redirects=True).url.path == "/docs"


def test_without_the_right_key_only_health_and_metrics_are_accessible(limited: httpx.Client) -> None:
    body = {**VALID[TEXT], "model": "renamed"}
    for authorization in (
        None,
        "Bearer wrong",
        f"Basic {API_KEY}",
        API_KEY,
        "Bearer",
        f"Bearer {API_KEY}x",
        "Bearer \xff",
    ):
        headers = {} if authorization is None else {"Authorization": authorization.encode("latin-1")}
        with httpx.Client(base_url=limited.base_url, headers=headers) as stranger:
            for answer in (stranger.post(TEXT, json=body), stranger.get("/v1/models"), stranger.post("/tokenize")):
                assert error_of(answer, 401)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
            assert stranger.get("/health").status_code == stranger.get("/metrics").status_code == 200
    assert limited.post(TEXT, json=body).status_code == 200
    assert [model["id"] for model in limited.get("/v1/models").json()["data"]] == ["renamed"]


def test_a_body_over_the_limit_is_rejected_with_and_without_a_declared_length(limited: httpx.Client) -> None:
    body = json.dumps({"model": "renamed", "prompt": "a" * 20_000}).encode()
    assert error_of(limited.post(TEXT, content=body, headers=JSON), 413)["code"] == "request_too_large"
    in_chunks = (body[at : at + 1000] for at in range(0, len(body), 1000))
    assert error_of(limited.post(TEXT, content=in_chunks, headers=JSON), 413)["code"] == "request_too_large"
    assert limited.get("/health").status_code == 200, "the connection must remain usable"


def test_browsers_of_the_configured_origin_may_call(limited: httpx.Client, tiny: httpx.Client) -> None:
    preflight = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    with httpx.Client(base_url=limited.base_url) as browser:
        allowed = browser.options(CHAT, headers=preflight)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, ORIGIN)
        assert browser.options(CHAT, headers={**preflight, "Origin": "http://other.example"}).status_code == 400
    assert "access-control-allow-origin" not in tiny.get("/health", headers={"Origin": ORIGIN}).headers


def test_a_full_queue_answers_429_and_waiting_requests_still_finish(
    limited: httpx.Client, limited_server: RunningServer
) -> None:
    long = {"model": "renamed", "prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    short = {"model": "renamed", "prompt": "a", "max_tokens": 1}
    waiting: list[httpx.Response] = []
    with limited.stream("POST", TEXT, json=long) as running:
        lines = running.iter_lines()
        assert next(lines).startswith("data: ")
        waiter = threading.Thread(target=lambda: waiting.append(limited.post(TEXT, json=short)))
        waiter.start()
        assert limited_server.gauge_becomes("hotset_requests_waiting", lambda count: count == 1) == 1
        refused = limited.post(TEXT, json=short)
        assert error_of(refused, 429)["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
    waiter.join(30)
    assert [answer.status_code for answer in waiting] == [200]
    assert limited.post(TEXT, json=short).status_code == 200


def test_min_tokens_may_exceed_the_default_max_tokens(tiny: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "hello", "min_tokens": 20}
    assert tiny.post(TEXT, json=body).json()["usage"]["completion_tokens"] == 20
    error = error_of(tiny.post(TEXT, json={**body, "min_tokens": 9000}), 400)
    assert error["code"] == "context_length_exceeded", (
        "the error must not mention max_tokens, which the client did not send"
    )


def test_rejected_requests_hold_no_pages(tiny_server: RunningServer, tiny: httpx.Client) -> None:
    for path, change, _, _ in INVALID:
        tiny.post(path, json={**VALID[path], **change})
    assert tiny_server.gauge("hotset_device_pages_held") == 0
    assert tiny_server.gauge("hotset_requests_waiting") == 0
    assert "Traceback" not in tiny_server.log()
