"""Echoed prompts, log-probabilities of prompts and truncated prompts, as HTTP clients see them.

test_openai_client.py has the short tests of these fields, and tests/engine/test_prompt_logprobs.py compares the numbers
with those of transformers.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import plain_http
import pytest
from running_server import RunningServer, error_of

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
CAPITAL = "The capital of France is Paris, and"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def http(tiny_server: RunningServer) -> Iterator[httpx.Client]:
    with plain_http.Client(base_url=tiny_server.url, timeout=120) as http:
        yield http


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": CAPITAL, "temperature": 0, "max_tokens": 3, "ignore_eos": True, **fields}
    answer = http.post(TEXT, json={name: value for name, value in body.items() if value is not None})
    assert answer.status_code == 200, answer.text
    completion: dict[str, Any] = answer.json()
    return completion


def tokenize(http: httpx.Client, text: str) -> list[int]:
    tokens: list[int] = http.post("/tokenize", json={"prompt": text}).raise_for_status().json()["tokens"]
    return tokens


def test_echo_returns_the_text_of_the_prompt_before_the_answer(http: httpx.Client) -> None:
    (x,) = tokenize(http, "x")
    always_x = {"logit_bias": {str(x): 100}, "echo": True}
    for prompt in (CAPITAL, tokenize(http, CAPITAL)):
        assert complete(http, prompt=prompt, **always_x)["choices"][0]["text"] == CAPITAL + "xxx"
    several = complete(http, prompt=[CAPITAL, "One, two,"], n=2, return_token_ids=True, **always_x)["choices"]
    for choice, start in zip(several, [CAPITAL, CAPITAL, "One, two,", "One, two,"], strict=True):
        assert choice["text"] == start + "xxx"
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (tokenize(http, start), [x, x, x])
    stopped = complete(http, stop=["Paris", "xx"], **always_x)["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (CAPITAL, "stop"), "stop strings do not apply to the prompt"


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_an_echoed_stream_equals_the_full_response(http: httpx.Client, logprobs: int | None, max_tokens: int) -> None:
    fields: dict[str, Any] = {
        "prompt": [CAPITAL, "One, two,"],
        "echo": True,
        "logprobs": logprobs,
        "max_tokens": max_tokens,
        "n": 2,
    }
    full = complete(http, **fields)
    assert full["usage"]["completion_tokens"] == 4 * max_tokens
    body = {"model": "tiny", "temperature": 0, "ignore_eos": True, **fields, "stream": True}
    lines = http.post(TEXT, json=body).raise_for_status().text.split("\n\n")
    chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    for choice in full["choices"]:
        pieces = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert pieces[0]["text"].startswith(fields["prompt"][choice["index"] // 2])
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"] == "length"
        if logprobs is None:
            assert choice["logprobs"] is None
            continue
        for column, values in choice["logprobs"].items():
            joined = [value for piece in pieces for value in piece["logprobs"][column]]
            assert joined == (pytest.approx(values, abs=1e-4) if column == "token_logprobs" else joined)
            assert len(joined) == len(values)
        prompt = fields["prompt"][choice["index"] // 2]
        assert choice["logprobs"]["tokens"][: len(prompt)] == list(prompt)
        assert choice["logprobs"]["text_offset"][: len(prompt) + 1] == list(range(len(prompt) + (max_tokens > 0)))


def test_prompt_logprobs_have_the_shape_of_vllm_in_both_endpoints(http: httpx.Client) -> None:
    ids = tokenize(http, CAPITAL)
    answer = complete(http, prompt_logprobs=2, max_tokens=0, logprobs=1, echo=True)
    usage = {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)}
    assert answer["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    (choice,) = answer["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == len(ids) - 1
    for token, entry, top in zip(ids[1:], others, choice["logprobs"]["top_logprobs"][1:], strict=True):
        assert next(iter(entry)) == str(token) and set(range(1, 3)) <= {value["rank"] for value in entry.values()}
        assert len(entry) == 2 + (entry[str(token)]["rank"] > 2)
        best = next(value for value in entry.values() if value["rank"] == 1)
        assert max(top.values()) == best["logprob"]
        assert len(top) == 1 + (entry[str(token)]["rank"] > 1), "logprobs: 1 shows fewer than prompt_logprobs: 2"
    decoded = [entry[str(token)]["decoded_token"] for token, entry in zip(ids[1:], others, strict=True)]
    assert "".join(decoded) == CAPITAL[1:]
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": "tiny", "messages": messages, "prompt_logprobs": 0, "max_tokens": 0, "return_token_ids": True}
    chat = http.post(CHAT, json=body).raise_for_status().json()
    assert chat["choices"][0]["message"]["content"] == "" and chat["choices"][0]["finish_reason"] == "length"
    assert [list(entry or {}) for entry in chat["prompt_logprobs"]] == [
        [],
        *([str(token)] for token in chat["choices"][0]["prompt_token_ids"][1:]),
    ]
    streamed = http.post(CHAT, json={**body, "max_tokens": 2, "stream": True}).raise_for_status().text
    assert streamed.count('"prompt_logprobs"') == 1


def test_truncate_prompt_tokens_keeps_the_end_of_a_prompt(http: httpx.Client) -> None:
    ids = tokenize(http, CAPITAL)
    for kept in (1, 4, len(ids), 1000):
        short = complete(http, truncate_prompt_tokens=kept, return_token_ids=True)
        assert short["choices"][0]["prompt_token_ids"] == ids[-kept:]
        assert short["usage"]["prompt_tokens"] == min(kept, len(ids))
    long = "one two " * 25_000  # a text that is longer than the context, and so long that its tokens are counted first
    body = {"model": "tiny", "prompt": long, "max_tokens": 2, "truncate_prompt_tokens": 5}
    assert http.post(TEXT, json=body).json()["usage"]["prompt_tokens"] == 5
    messages = [{"role": "user", "content": long}]
    chat = {"model": "tiny", "messages": messages, "max_tokens": 2, "truncate_prompt_tokens": 7}
    assert http.post(CHAT, json=chat).json()["usage"]["prompt_tokens"] == 7
    for kept in (0, -2):
        assert (
            error_of(http.post(TEXT, json={**body, "truncate_prompt_tokens": kept}), 400)["param"]
            == "truncate_prompt_tokens"
        )


def test_too_many_log_probabilities_are_refused_with_their_number(http: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": [[1] * 8000] * 12, "max_tokens": 1, "prompt_logprobs": 20}
    error = error_of(http.post(TEXT, json=body), 400)
    assert error["param"] == "prompt_logprobs" and str(96_000 * 21) in error["message"]
