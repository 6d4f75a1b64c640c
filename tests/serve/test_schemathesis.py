"""Schemathesis tests the server against its OpenAPI document: no 5xx, and no undocumented response."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from running_server import RunningServer
from schemathesis import Case, GenerationMode
from schemathesis.checks import positive_data_acceptance
from schemathesis.schemas import BaseSchema

BOUNDED = settings(
    max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
GENERATING = ("/v1/chat/completions", "/v1/completions")
POSTS = (*GENERATING, "/tokenize", "/detokenize")
GETS = ("/v1/models", "/v1/models/{model_id}", "/health", "/handoff", "/metrics")
VOCABULARY = 257
# Valid types may hold values outside the ranges of sampling parameters; they are clamped to these ranges.
SAMPLING_RANGES = {
    "temperature": (0.0, 10.0),
    "top_p": (0.01, 1.0),
    "top_k": (0, 1 << 20),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "max_completion_tokens": (1, 2),
    "min_tokens": (0, 2),
    "n": (1, 2),
}


@pytest.fixture(scope="module")
def schema(tiny_server: RunningServer) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{tiny_server.url}/openapi.json")


def in_vocabulary(value: Any) -> Any:
    if isinstance(value, list):
        return [in_vocabulary(item) for item in value]
    return value % VOCABULARY if isinstance(value, int) else value or "text"


def make_acceptable(path: str, body: Any) -> None:
    """Corrects what a JSON schema cannot express: names, vocabulary, ranges, and mutually exclusive fields."""
    if "model" in body:
        body["model"] = "tiny"
    if "tokens" in body:
        body["tokens"] = in_vocabulary(body["tokens"])
    if path not in GENERATING:
        return
    if "prompt" in body:
        body["prompt"] = in_vocabulary(body["prompt"])
    for name, (low, high) in SAMPLING_RANGES.items():
        if body.get(name) is not None:
            body[name] = min(max(body[name], low), high)
    body["max_tokens"] = None if body.get("max_completion_tokens") else 2
    if not body.get("stream"):
        body.pop("stream_options", None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    body["stop_token_ids"] = in_vocabulary(body.get("stop_token_ids") or [])
    body["logit_bias"] = {
        token[-2:]: min(max(bias, -100), 100) for token, bias in (body.get("logit_bias") or {}).items()
    }


def keep_short(path: str, body: Any) -> None:
    """Limits the length of the answer, in case an invalid body is accepted by mistake."""
    if path in GENERATING and isinstance(body, dict) and body.get("max_completion_tokens") is None:
        body.setdefault("max_tokens", 2)


def test_every_documented_operation_is_tested(schema: BaseSchema) -> None:
    documented = {(found.ok().method.upper(), found.ok().path) for found in schema.get_all_operations()}
    assert documented == {("POST", path) for path in POSTS} | {("GET", path) for path in GETS}


@pytest.mark.parametrize("path", [*POSTS, *GETS])
def test_valid_requests_get_documented_answers(schema: BaseSchema, path: str) -> None:
    statuses = []

    @BOUNDED
    @given(case=schema[path]["POST" if path in POSTS else "GET"].as_strategy())
    def answer_is_documented(case: Case) -> None:
        if path in POSTS:
            make_acceptable(path, case.body)
        # Acceptance is checked below: the document cannot express some rules, like either prompt or messages.
        answer = case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=30)
        statuses.append(answer.status_code)

    answer_is_documented()
    assert set(statuses) <= {200, 400, 404}
    if path in POSTS:
        assert statuses.count(200) >= len(statuses) // 3


@pytest.mark.parametrize("path", POSTS)
def test_requests_that_violate_the_document_are_rejected(schema: BaseSchema, path: str) -> None:
    @BOUNDED
    @given(case=schema[path]["POST"].as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def is_rejected(case: Case) -> None:
        keep_short(path, case.body)
        assert case.call_and_validate(timeout=30).status_code == 400

    is_rejected()
