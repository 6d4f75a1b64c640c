"""One server answers valid requests as its OpenAPI document says, rejects invalid requests, and reports metrics.

These tests are in one file because they share one server.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import plain_http
import pytest
import schemathesis
from examples import times
from hypothesis import HealthCheck, Phase, assume, given, settings
from listening import listening
from processes import children_of, descendants_of, resident_mib
from running_server import ORIGIN, RunningServer, error_of, metrics_of, serving
from schemathesis import Case, GenerationMode
from schemathesis.checks import positive_data_acceptance
from schemathesis.schemas import BaseSchema

import hotset
from hotset.base.sampling import PARAMETERS

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
ALL_TOKENS: list[dict[str, int]] = [{}, {"top_k": 0}, {"top_k": -1}]
METRICS = {  # every scrape contains these metrics
    "hotset_engine_up",
    "hotset_requests_running",
    "hotset_requests_waiting",
    "hotset_device_pages_held",
    "hotset_device_pages_total",
    "hotset_tokens_generated_total",
    "hotset_tokens_prefilled_total",
    "hotset_recomputes_total",
    "hotset_rows_mirrored_total",
    "hotset_handoff_retries_total",
    "hotset_prompts_handed_off_total",
    "hotset_steps_total",
    "hotset_prefix_cache_tokens_queried_total",
    "hotset_prefix_cache_tokens_reused_total",
    "hotset_prefix_cache_pages_evicted_total",
    "hotset_time_to_first_token_seconds_count",
    "hotset_inter_token_seconds_count",
}
ANSWERED = f"hotset_http_requests_total/{TEXT}/%s"
BOUNDED = settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # smaller examples would take minutes to find
    suppress_health_check=list(HealthCheck),
)
GENERATING = (CHAT, TEXT)
AGENTS = ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens")
POSTS = (*GENERATING, *AGENTS, "/tokenize", "/detokenize")
# Messages take long to generate.
EXAMPLES = {
    "/tokenize": 10,
    "/v1/responses": times(10),
    "/v1/messages": times(8),
    "/v1/messages/count_tokens": times(3),
}
GETS = (
    "/v1/models",
    "/v1/models/{model_id}",
    "/tokenizer_info",
    "/health",
    "/ping",
    "/version",
    "/handoff",
    "/metrics",
)
VOCABULARY = 257
MAX_REPR = 1 << 19  # characters of a body in Python; JSON has at most 12 bytes for each, below the limit of 8 MiB
# Generated values are clamped to these ranges: the document does not declare all limits, and answers must be short.
SAMPLING_RANGES = {
    name: (parameter.low, parameter.high)
    for name, parameter in PARAMETERS.items()
    if parameter.fields is not None and parameter.high is not None
} | {"top_p": (0.01, 1.0), "top_k": (0, 1 << 20), "max_completion_tokens": (1, 2), "min_tokens": (0, 2), "n": (1, 2)}


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(tmp_path_factory.mktemp("tiny"), tiny_model, "--load-format", "dummy") as server:
        yield server


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with plain_http.Client(base_url=server.url, timeout=30) as http:
        yield http


@pytest.fixture(scope="module")
def schema(server: RunningServer) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize("path", VALID)
def test_the_requests_that_other_tests_make_invalid_are_valid(http: httpx.Client, path: str) -> None:
    assert http.post(path, json=VALID[path]).status_code == 200


INVALID: list[tuple[str, dict[str, Any], str, str]] = [
    # Fields that would change the answer and are not implemented are rejected by name; test_fields.py tests the others.
    *[(CHAT, {field: value}, "unsupported_field", field) for field, value in [
        ("functions", [{"name": "a"}]), ("audio", {}),
        ("function_call", {"name": "a"}), ("best_of", 2), ("unheard_of", 1), ("temprature", 1), ("prompt", "a"),
    ]],
    *[(TEXT, {field: value}, "unsupported_field", field) for field, value in [
        ("suffix", "!"), ("use_beam_search", True), ("guided_json", {}), ("messages", MESSAGES), ("n" * 9000, 1),
        ("extra_key", "a"),
    ]],
    ("/tokenize", {"promt": "a"}, "unsupported_field", "promt"),
    ("/detokenize", {"token": [1]}, "unsupported_field", "token"),
    (CHAT, {"stream": True, "stream_options": {"x": 1}}, "unsupported_field", "stream_options.x"),
    # Structures.
    (CHAT, {"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "invalid_value", "response_format"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}},
     "invalid_structure", None),
    (CHAT, {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
     "invalid_value", "structured_outputs"),
    (TEXT, {"structured_outputs": {}}, "invalid_value", "structured_outputs"),
    (TEXT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "invalid_value", "structured_outputs"),
    (TEXT, {"structured_outputs": {"structural_tag": "a"}}, "unsupported_field", "structured_outputs.structural_tag"),
    (TEXT, {"structured_outputs": {"regex": "(?=a)b"}}, "invalid_structure", None),
    (TEXT, {"structured_outputs": {"regex": "[^\\s\\S]"}}, "invalid_structure", None),
    (TEXT, {"structured_outputs": {"grammar": 'start: "a" start'}}, "invalid_structure", None),
    (TEXT, {"structured_outputs": {"json": '{"multipleOf": 999983}'}}, "invalid_structure", None),
    (TEXT, {"structured_outputs": {"json": "{"}}, "invalid_structure", None),
    (TEXT, {"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "invalid_value", "ignore_eos"),
    # Conversations.
    (CHAT, {"messages": []}, "invalid_value", "messages"),
    (CHAT, {"messages": "hello"}, "invalid_value", "messages"),
    (CHAT, {"messages": [{"role": "function", "content": "a"}]}, "invalid_value", "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "missing_field", "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "invalid_value", "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "invalid_value", "messages[0].content[0].type"),
    # Prompts.
    (TEXT, {"prompt": []}, "invalid_value", "prompt"),
    (TEXT, {"prompt": [[]]}, "invalid_value", "prompt[0]"),
    (TEXT, {"prompt": ""}, "empty_prompt", "prompt"),
    (TEXT, {"prompt": None}, "missing_field", "prompt"),
    (TEXT, {"prompt": [1, "a"]}, "invalid_value", "prompt[1]"),
    (TEXT, {"prompt": [1.5]}, "invalid_value", "prompt[0]"),
    (TEXT, {"prompt": [257]}, "invalid_token_id", "prompt"),
    (TEXT, {"prompt": [-1]}, "invalid_token_id", "prompt"),
    (TEXT, {"prompt": ["a"] * 100, "n": 128}, "invalid_value", "n"),
    ("/detokenize", {"tokens": [257]}, "invalid_token_id", "tokens"),
    ("/tokenize", {"messages": MESSAGES}, "invalid_value", None),
    # Lists.
    (CHAT, {"messages": MESSAGES * 4097}, "invalid_value", "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}]}, "invalid_value",
     "messages[0].content"),
    (TEXT, {"stop_token_ids": [1] * 257}, "invalid_value", "stop_token_ids"),
    (TEXT, {"stop": ["a" * 1025]}, "invalid_value", "stop[0]"),
    (TEXT, {"prompt": ["a"] * 1025}, "invalid_value", "prompt"),
    (TEXT, {"prompt": [[1] * 8000] * 140}, "invalid_value", "prompt"),
    ("/detokenize", {"tokens": [1] * 262_145}, "invalid_value", "tokens"),
    (TEXT, {"logit_bias": {str(token): 0 for token in range(1025)}}, "invalid_value", "logit_bias"),
    (TEXT, {f"field{number}": 0 for number in range(2048)}, "invalid_value", None),
    # Sampling.
    *[(TEXT, {field: value}, "invalid_value", field) for field, value in [
        ("temperature", -0.1), ("temperature", 11), ("temperature", "1"), ("temperature", True), ("top_p", 0),
        ("top_p", 1.1), ("top_k", -2), ("min_p", 2), ("best_of", 2), ("repetition_penalty", 0), ("presence_penalty", 3),
        ("frequency_penalty", -3), ("n", 0), ("n", 129), ("n", 1.5), ("max_tokens", 0), ("max_tokens", "4"),
        ("min_tokens", 3), ("logprobs", 21), ("logprobs", True), ("seed", 1 << 63), ("seed", 0.5),
        ("max_tokens", -1), ("prompt_logprobs", 21), ("prompt_logprobs", -1), ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2), ("echo", "yes"), ("add_special_tokens", 1),
        ("stop", ["a"] * 17), ("stop", 5), ("stream", "yes"), ("ignore_eos", 1),
        ("cache_salt", ""), ("cache_salt", "x" * 257), ("cache_salt", 5), ("cache_salt", ["a"]),
    ]],
    (TEXT, {"stop": ["a", ""]}, "invalid_value", "stop[1]"),
    (TEXT, {"logit_bias": {"a": 1}}, "invalid_value", "logit_bias.a"),
    (TEXT, {"logit_bias": {"1": 101}}, "invalid_value", "logit_bias"),
    (TEXT, {"logit_bias": {"257": 1}}, "invalid_token_id", "logit_bias"),
    (TEXT, {"stop_token_ids": [257]}, "invalid_token_id", "stop_token_ids"),
    (TEXT, {"temperature": 10**400}, "invalid_value", "temperature"),
    (CHAT, {"max_completion_tokens": 3}, "invalid_value", "max_completion_tokens"),
    (TEXT, {"best_of": 1, "n": 2}, "invalid_value", "best_of"),
    (CHAT, {"top_logprobs": 2}, "invalid_value", None),
    (CHAT, {"logprobs": 2}, "invalid_value", "logprobs"),
    (CHAT, {"messages": [{"role": "assistant", "content": "a", "prefix": True}]}, "invalid_value", "messages[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "change", "code", "param"), INVALID, ids=lambda value: str(value)[:40])
def test_the_error_names_the_invalid_field(
    http: httpx.Client, path: str, change: dict[str, Any], code: str, param: str | None
) -> None:
    error = error_of(http.post(path, json={**VALID[path], **change}), 400)
    assert (error["code"], error["type"]) == (code, "invalid_request_error")
    assert error["param"] == (param if param is None or len(param) <= 500 else param[:500] + "...")
    if param is not None:
        assert param[:64] in error["message"]


# Fields that clients send although they change nothing. The bodies of benchmarks are taken from their sources.
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"user": "me", "metadata": {}, "store": False, "service_tier": "auto", "parallel_tool_calls": True,
            "reasoning_effort": "low", "verbosity": "low", "safety_identifier": "x", "prompt_cache_key": "x"}),
    (CHAT, {"tools": [], "tool_choice": "none", "functions": None, "function_call": None, "modalities": ["text"],
            "response_format": {"type": "text"}, "audio": None, "prediction": None, "web_search_options": None,
            "structured_outputs": None}),
    (CHAT, dict.fromkeys(["temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream", "logprobs", "unheard_of",
                          "top_logprobs", "stream_options", "max_completion_tokens"])),
    (CHAT, {"max_tokens": 2, "max_completion_tokens": 2, "top_logprobs": 0, "logprobs": False}),
    (CHAT, {"stream_options": {"include_usage": True, "include_obfuscation": False}}),
    (CHAT, {"model": None, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "use_beam_search": False,
            "length_penalty": 1, "skip_special_tokens": True, "guided_json": None, "priority": 0}),  # vLLM
    (CHAT, {"messages": [{"role": "developer", "content": "a"}, {"role": "user", "content": "b", "name": "me"},
                         {"role": "assistant", "content": "c", "refusal": None, "annotations": [], "audio": None,
                          "function_call": None, "tool_calls": None, "provider_specific_fields": {}}]}),  # LiteLLM
    (CHAT, {"max_tokens": None, "max_completion_tokens": 2, "temperature": 0.0, "ignore_eos": False}),  # SGLang
    (TEXT, {"best_of": 1, "temperature": 0.0, "ignore_eos": True}),  # sglang.bench_serving
    (TEXT, {"best_of": 2, "n": 2, "suffix": "", "echo": False, "user": "me"}),
    (TEXT, {"repetition_penalty": 1.0, "logprobs": None, "stop": None, "bad_words": []}),  # vllm bench
    ("/tokenize", {"model": None, "messages": None}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "change"), ACCEPTED, ids=lambda value: str(value)[:40])
def test_hints_nulls_and_defaults_are_accepted(http: httpx.Client, path: str, change: dict[str, Any]) -> None:
    answer = http.post(path, json={**VALID[path], **change})
    assert answer.status_code == 200, answer.text


def test_top_k_of_minus_one_and_zero_mean_all_tokens(http: httpx.Client) -> None:
    sampled = {**VALID[TEXT], "max_tokens": 8, "temperature": 1.0, "seed": 7}
    texts = {http.post(TEXT, json={**sampled, **top_k}).json()["choices"][0]["text"] for top_k in ALL_TOKENS}
    assert len(texts) == 1


DEEP = [(201, b"[", b"]"), (20_000, b"[", b"]"), (3000, b'{"a": ', b"}")]
MALFORMED: list[tuple[bytes, str]] = [
    *[(body, "") for body in (b"", b"{", b"hello", b"[1]", b"null", b'"text"', b"\xff\xfe{}")],
    (b'{"prompt": ' + b"9" * 5000 + b"}", ""),
    # Some versions of Python parse thousands of levels, and others do not.
    *[(b'{"tools": ' + opened * n + b"1" + closed * n + b"}", "nested more than 200") for n, opened, closed in DEEP],
]


@pytest.mark.parametrize(("body", "message"), MALFORMED, ids=lambda value: str(value[:16]))
def test_malformed_bodies_are_rejected(http: httpx.Client, body: bytes, message: str) -> None:
    error = error_of(http.post(TEXT, content=body, headers=JSON), 400)
    assert error["code"] == "invalid_json" and message in error["message"]


@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "max_tokens", "seed"])
def test_numbers_that_are_not_finite_are_rejected(http: httpx.Client, field: str) -> None:
    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        body = f'{{"model": "tiny", "prompt": "a", "{field}": {number}}}'
        assert error_of(http.post(TEXT, content=body, headers=JSON), 400)["param"] == field


def test_json_is_accepted_whatever_its_content_type(http: httpx.Client) -> None:
    for headers in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "image/png"}, {"Content-Type": "x"}):
        assert http.post(TEXT, content=json.dumps(VALID[TEXT]), headers=headers).status_code == 200
        assert error_of(http.post(TEXT, content=b"model=tiny", headers=headers), 400)["code"] == "invalid_json"


@pytest.mark.parametrize("origin", [ORIGIN, "null"])
def test_a_web_page_of_another_origin_cannot_send_what_browsers_send_without_asking(
    http: httpx.Client, origin: str
) -> None:
    body = json.dumps(VALID[TEXT]).encode()
    for content_type in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
        error = error_of(http.post(TEXT, content=body, headers={"Origin": origin, **content_type}), 403)
        assert error["code"] == "not_allowed" and origin in error["message"]
    preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    assert http.request("OPTIONS", TEXT, headers=preflight).status_code == 405, "browsers ask before they send JSON"
    assert http.post(TEXT, content=body, headers={**JSON, "Origin": origin}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/health", "/ping", "/version", "/metrics", "/docs"])
def test_head_answers_like_get_without_a_body(http: httpx.Client, path: str) -> None:
    head, get = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"") == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert int(head.headers["content-length"]) > 0


def test_paths_may_end_with_slashes(server: RunningServer, http: httpx.Client) -> None:
    before = metrics_of(server.url)[ANSWERED % 200]
    for path in ("/v1/models/", "/v1/models/tiny/", "/health/", "/version//", "/docs/"):
        assert http.get(path).status_code == 200
    for path in VALID:
        assert http.post(f"{path}/", json=VALID[path]).status_code == 200
    assert metrics_of(server.url)[ANSWERED % 200] == before + 1, "metrics count both forms as one endpoint"


def test_the_id_of_a_request_is_returned_and_logged_and_an_invalid_one_is_replaced(
    server: RunningServer, http: httpx.Client
) -> None:
    for path, sent in (("/version", "id-of-mine"), ("/v1/nothing", "id-of-an-error"), (CHAT, "id-of-a-refusal")):
        answer = http.get(path, headers={"X-Request-Id": sent})
        assert answer.headers.get_list("x-request-id") == [sent]
        server.wait_for_log(sent)
    for invalid in ("", "two words of mine", "x" * 129):
        (created,) = http.get("/version", headers={"X-Request-Id": invalid}).headers.get_list("x-request-id")
        assert created not in ("", invalid)
        server.wait_for_log(f"/version 200 .*{created}")
        assert not invalid or invalid not in server.log()
    with http.stream("POST", TEXT, json={**VALID[TEXT], "stream": True}) as stream:
        server.wait_for_log(stream.headers["x-request-id"])


def test_version_and_ping_answer(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": hotset.__version__}
    assert http.get("/ping").json()["status"] == "ok"


def test_answers_and_chunks_have_the_same_fingerprint(http: httpx.Client) -> None:
    prints = {http.post(path, json=VALID[path]).json()["system_fingerprint"] for path in GENERATING}
    for path in GENERATING:
        with http.stream("POST", path, json={**VALID[path], "stream": True}) as stream:
            chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
        prints |= {chunk["system_fingerprint"] for chunk in chunks}
    assert len(prints) == 1 and prints.pop().startswith("fp_")


SURROGATES: list[tuple[str, dict[str, Any]]] = [
    *[(TEXT, change) for change in (
        {"prompt": "\ud800"}, {"prompt": ["a", "\udfff"]}, {"stop": "\ud800"}, {"cache_salt": "\ud800"}, {"\ud800": 1},
        {"logit_bias": {"\ud800": 1}},
    )],
    *[(CHAT, change) for change in (
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": [{"type": "\ud800", "text": "a"}]}]},
        {"tools": [{"type": "\ud800", "function": {}}]},
        {"tools": [], "tool_choice": {"type": "\ud800"}},
    )],
    ("/tokenize", {"prompt": "\ud800"}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "change"), SURROGATES, ids=lambda value: ascii(value)[:40])
def test_lone_surrogates_are_rejected(http: httpx.Client, path: str, change: dict[str, Any]) -> None:
    error_of(http.post(path, content=json.dumps({**VALID[path], **change}), headers=JSON), 400)


def test_an_unknown_model_is_not_found_even_with_odd_characters_in_its_name(http: httpx.Client) -> None:
    for path in VALID:
        error = error_of(http.post(path, json={**VALID[path], "model": "gpt-5"}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "gpt-5" in error["message"] and "tiny" in error["message"]
    error_of(http.post(TEXT, content=r'{"model": "\ud800", "prompt": "a"}', headers=JSON), 404)
    error_of(http.get("/v1/models/a/b%0Ac"), 404)


def test_the_error_for_a_prompt_longer_than_the_context_names_both_lengths(http: httpx.Client) -> None:
    for path, change, needed in (
        (TEXT, {"prompt": "a" * 9000}, 9002),
        (TEXT, {"prompt": [1] * 9000, "max_tokens": None}, 9001),
        (TEXT, {"max_tokens": 8190}, 8195),
        (TEXT, {"prompt": [1] * 8190, "max_tokens": 3, "stream": True}, 8193),
    ):
        error = error_of(http.post(path, json={**VALID[path], **change}), 400)
        assert error["code"] == "context_length_exceeded"
        assert "8192" in error["message"] and str(needed) in error["message"]
    long_chat = {**VALID[CHAT], "messages": [{"role": "user", "content": "a" * 9000}]}
    error = error_of(http.post(CHAT, json=long_chat), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def memory_of(server: RunningServer) -> float:
    """Returns the resident memory, in MiB, of the server's process and of its children. Here these have no children."""
    return sum(map(resident_mib, (server.process.pid, *children_of(server.process.pid))))


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of all threads of a process."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def longest_health_delay(server: RunningServer, http: httpx.Client, requests: "list[Future[Any]]") -> float:
    """Requests /health again and again until all requests are answered, and returns the longest delay.

    A delay is the CPU time that the server's process used from the request to the answer. On an idle machine, an
    answer takes no longer than this. Unlike wall time, it does not grow if other processes use the CPUs.
    """
    longest = 0.0
    while not all(request.done() for request in requests):
        before = cpu_seconds(server.process.pid)
        assert http.get("/health").status_code == 200
        longest = max(longest, cpu_seconds(server.process.pid) - before)
        time.sleep(0.02)
    return longest


def test_ten_texts_of_7_mib_are_refused_with_little_memory_while_health_answers(
    server: RunningServer, http: httpx.Client
) -> None:
    http.post(TEXT, json=VALID[TEXT])
    text = "longer than the context " * ((7 << 20) // 24)
    body = json.dumps({**VALID[TEXT], "prompt": text}).encode()
    before = memory_of(server)
    with ThreadPoolExecutor(10) as clients:
        post = partial(plain_http.post, server.url + TEXT, content=body, headers=JSON, timeout=120)
        requests = [clients.submit(post) for _ in range(10)]
        assert longest_health_delay(server, http, requests) < 1.0
    for request in requests:
        error = error_of(request.result(), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert "8192 tokens" in error["message"] and str(len(text)) in error["message"]
    assert memory_of(server) - before < 300
    assert http.post(TEXT, json=VALID[TEXT]).status_code == 200


def test_texts_and_conversations_far_beyond_the_limits_are_refused_by_name(http: httpx.Client) -> None:
    text = "far too long " * 100_000
    messages = [{"role": "user", "content": text}]
    for path, change, limit, param in (
        (CHAT, {"messages": messages}, "8192 tokens", "messages"),
        (TEXT, {"prompt": ["short", text]}, "8192 tokens", "prompt"),
        ("/tokenize", {"prompt": text}, "262144 tokens", "prompt"),
        ("/tokenize", {"prompt": None, "messages": messages}, "262144 tokens", "messages"),
    ):
        error = error_of(http.post(path, json={**VALID[path], **change}), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert limit in error["message"]
    assert http.post("/tokenize", json={"prompt": text[:200_000]}).json()["count"] == 200_000, (
        "/tokenize must count the tokens of texts that are longer than the context"
    )


def test_a_template_that_grows_without_end_gets_400_while_health_answers_and_the_next_request_is_served(
    server: RunningServer, http: httpx.Client
) -> None:
    body = {**VALID[CHAT], "messages": [{"role": "user", "content": "grow without end"}]}
    with ThreadPoolExecutor(1) as client:
        request = client.submit(plain_http.post, server.url + CHAT, json=body, timeout=120)
        assert longest_health_delay(server, http, [request]) < 1.0
    error = error_of(request.result(), 400)
    assert (error["code"], error["param"]) == ("chat_template_failed", "messages")
    assert http.post(CHAT, json=VALID[CHAT]).status_code == 200


def test_unknown_paths_and_wrong_methods_get_errors_in_the_same_format(http: httpx.Client) -> None:
    assert error_of(http.get("/v1/nothing"), 404)["code"] == "not_found"
    wrong = http.get(CHAT)
    assert error_of(wrong, 405)["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"
    assert (http.head(TEXT).status_code, http.head("/v1/nothing").status_code) == (405, 404)


def test_the_root_is_the_live_page_with_a_link_to_the_documentation(http: httpx.Client) -> None:
    assert '<a href="/docs">' in http.get("/").text


def test_without_a_configured_origin_no_origin_is_allowed(http: httpx.Client) -> None:
    assert "access-control-allow-origin" not in http.get("/health", headers={"Origin": ORIGIN}).headers


def test_min_tokens_may_exceed_the_default_max_tokens(http: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "hello", "min_tokens": 20}
    assert http.post(TEXT, json=body).json()["usage"]["completion_tokens"] == 20
    error = error_of(http.post(TEXT, json={**body, "min_tokens": 9000}), 400)
    assert error["code"] == "context_length_exceeded", (
        "the error must not mention max_tokens, which the client did not send"
    )


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("include", [True, False, None])
def test_continuous_usage_needs_include_usage_and_counts_the_tokens_of_each_choice_so_far(
    http: httpx.Client, path: str, include: bool | None
) -> None:
    body = {**VALID[path], "n": 2, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
    if path == TEXT:
        body["prompt"] = ["hello", "a longer prompt"]
    usage = http.post(path, json=body).json()["usage"]
    options = {"include_usage": include, "continuous_usage_stats": True}
    events = http.post(path, json={**body, "stream": True, "stream_options": options}).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    if not include:
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks), "vLLM ignores the option, too"
        return
    *chunks, last = chunks
    assert last["choices"] == [] and last["usage"] == usage, "the last chunk has the usage of the whole request"
    counted: dict[int, dict[str, int]] = {}
    generated: Counter[int] = Counter()
    for chunk in chunks:
        (choice,) = chunk["choices"]
        index, counts = choice["index"], chunk["usage"]
        generated[index] += len(choice.get("token_ids", ()))
        assert counts["completion_tokens"] == generated[index]
        assert counts["total_tokens"] == counts["prompt_tokens"] + generated[index]
        counted[index] = counts
    assert set(generated.values()) == {5} and len(counted) == (4 if path == TEXT else 2)
    n = body["n"]
    assert sum(counts["prompt_tokens"] for counts in counted.values()) == n * usage["prompt_tokens"]
    assert sum(counts["completion_tokens"] for counts in counted.values()) == usage["completion_tokens"]


def test_rejected_requests_hold_no_pages(server: RunningServer, http: httpx.Client) -> None:
    for path, change, _, _ in INVALID[::5]:
        http.post(path, json={**VALID[path], **change})
    assert server.gauge("hotset_device_pages_held") == server.gauge("hotset_requests_waiting") == 0
    assert "Traceback" not in server.log()


def test_a_server_without_a_role_rejects_handoffs(server: RunningServer, http: httpx.Client) -> None:
    refused = http.post(TEXT, json=VALID[TEXT], headers={"x-hotset-prefill": "127.0.0.1:1"})
    assert error_of(refused, 409)["code"] == "wrong_role"
    assert error_of(http.post(TEXT, json={**VALID[TEXT], "landing": "host"}), 400)["param"] == "landing"
    state = http.get("/handoff").json()
    assert (state["role"], state["control"]) == ("both", None)
    (listener,) = listening({server.process.pid} | descendants_of(server.process.pid))
    assert server.url == f"http://{listener.host}:{listener.port}", "a server without peers needs one port"


def test_metrics_count_requests_and_tokens(server: RunningServer) -> None:
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True, "n": 2}
    plain_http.post(f"{server.url}/v1/completions", json=body, timeout=30).raise_for_status()
    before = metrics_of(server.url)
    plain_http.post(f"{server.url}/v1/completions", json=body, timeout=30).raise_for_status()
    plain_http.post(f"{server.url}/v1/completions", json={}, timeout=30)
    after = metrics_of(server.url)
    increase = {name: after[name] - before.get(name, 0) for name in after}
    assert before.keys() >= METRICS
    assert increase["hotset_tokens_generated_total"] == 10
    assert increase["hotset_requests_finished_total/length"] == 2
    assert increase["hotset_time_to_first_token_seconds_count"] == 1
    assert increase["hotset_inter_token_seconds_count"] == 8
    assert increase["hotset_request_seconds_count"] == 2
    assert increase["hotset_request_prompt_tokens_sum"] == 6 and increase["hotset_request_generation_tokens_sum"] == 10
    assert increase["vllm:generation_tokens_total/0/tiny"] == 10 and increase["vllm:prompt_tokens_total/0/tiny"] == 6
    assert increase["vllm:request_generation_tokens_sum/0/tiny"] == 10
    assert increase[ANSWERED % 200] == increase[ANSWERED % 400] == 1
    assert after["hotset_device_pages_held"] == 0 and after["hotset_device_pages_total"] > 0


def in_vocabulary(value: Any) -> Any:
    if isinstance(value, list):
        return [in_vocabulary(item) for item in value]
    return value % VOCABULARY if isinstance(value, int) else value or "text"


def make_acceptable(path: str, body: Any) -> None:
    """Makes a generated body obey rules that the document does not declare: the model's name, the vocabulary, some
    ranges, mutually exclusive fields, and that only an assistant's message may have no content."""
    for message in body.get("messages") or []:
        if message.get("content") is None:
            message["content"] = "text"
    if "model" in body:
        body["model"] = "tiny"
    if "tokens" in body:
        body["tokens"] = in_vocabulary(body["tokens"])
    if path in AGENTS:
        make_agent_acceptable(path, body)
    if path == "/tokenize" and (body.get("prompt") is None) == (body.get("messages") is None):
        body.update(prompt="text", messages=None)
    if path not in GENERATING:
        return
    if "prompt" in body:
        body["prompt"] = in_vocabulary(body["prompt"])
    for name, (low, high) in SAMPLING_RANGES.items():
        if body.get(name) is not None:
            body[name] = min(max(body[name], low), high)
    body["max_tokens"] = None if body.get("max_completion_tokens") else 2
    body.pop("best_of", None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    body["stop_token_ids"] = in_vocabulary(body.get("stop_token_ids") or [])
    body["logit_bias"] = {
        token[-2:]: min(max(bias, -100), 100) for token, bias in (body.get("logit_bias") or {}).items()
    }


def make_agent_acceptable(path: str, body: Any) -> None:
    """Shortens the answer, and drops what random values can hardly make acceptable: schemas, and the tools to which
    other fields refer."""
    for name, (low, high) in SAMPLING_RANGES.items():
        if body.get(name) is not None:
            body[name] = min(max(body[name], low), high)
    for name in ("tools", "tool_choice", "text", "output_config", "chat_template_kwargs"):
        body.pop(name, None)
    for message in body.get("messages") or []:
        if isinstance(message["content"], list):
            blocks = ("text", "tool_use", "thinking") if message["role"] == "assistant" else ("text", "tool_result")
            message["content"] = [block for block in message["content"] if block["type"] in blocks]
    if "messages" in body:
        body["messages"].append({"role": "user", "content": "text"})
    if path != "/v1/messages/count_tokens":
        body["max_tokens" if path == "/v1/messages" else "max_output_tokens"] = 2


def name_the_model(body: Any) -> None:
    """Replaces the name of the model: a request for another model gets 404, whatever else is wrong with it."""
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = "tiny"


def keep_short(path: str, body: Any) -> None:
    """Limits the length of the answer, in case an invalid body is accepted by mistake."""
    if path == "/v1/responses" and isinstance(body, dict):
        body.setdefault("max_output_tokens", 2)
    if path in GENERATING and isinstance(body, dict) and body.get("max_completion_tokens") is None:
        body.setdefault("max_tokens", 2)


def test_every_documented_operation_is_tested(schema: BaseSchema) -> None:
    documented = {(found.ok().method.upper(), found.ok().path) for found in schema.get_all_operations()}
    assert documented == {("POST", path) for path in POSTS} | {("GET", path) for path in GETS}


@pytest.mark.parametrize("path", [*POSTS, *GETS])
def test_valid_requests_get_documented_answers(schema: BaseSchema, path: str) -> None:
    statuses = []

    @settings(BOUNDED, max_examples=EXAMPLES.get(path, BOUNDED.max_examples))
    @given(case=schema[path]["POST" if path in POSTS else "GET"].as_strategy())
    def answer_is_documented(case: Case) -> None:
        if path in POSTS:
            make_acceptable(path, case.body)
        # The document cannot express some rules, such as that a request has either prompt or messages. Therefore a
        # valid case may be rejected; the last assertion checks that enough cases are accepted.
        answer = case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=30)
        statuses.append(answer.status_code)

    answer_is_documented()
    assert set(statuses) <= {200, 400, 404}
    if path in POSTS:
        assert statuses.count(200) >= len(statuses) // 3


@pytest.mark.parametrize("path", POSTS)
def test_requests_that_violate_the_document_are_rejected(schema: BaseSchema, path: str) -> None:
    @settings(BOUNDED, max_examples=EXAMPLES.get(path, BOUNDED.max_examples))
    @given(case=schema[path]["POST"].as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def is_rejected(case: Case) -> None:
        assume(len(repr(case.body)) < MAX_REPR)  # a large body is answered with 413 without being read
        name_the_model(case.body)
        keep_short(path, case.body)
        assert case.call_and_validate(timeout=30).status_code == 400

    is_rejected()
