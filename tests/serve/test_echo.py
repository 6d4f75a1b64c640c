"""Echoed prompts, log-probabilities of prompts and truncated prompts, as HTTP clients see them.

test_openai_client.py has the short tests of these fields.
"""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import plain_http
import pytest
import torch
from models.tiny_deepseek import oracle_logprobs, save_random_deepseek
from running_server import RunningServer, error_of, serving

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
CAPITAL = "The capital of France is Paris, and"
VOCAB = 257  # bytes, and one end token
TOLERANCE = 1e-4

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny DSA model with the tokenizer of `tiny_model`: its directory, and the model of transformers."""
    directory = tmp_path_factory.mktemp("models") / "tiny-dsa"
    oracle = save_random_deepseek(directory, VOCAB, 8192, eos=256)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(tiny_model) / name, directory / name)
    return directory, oracle


@pytest.fixture(scope="module")
def server(model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Steps of 20 tokens divide most prompts into chunks, and rows are tiered."""
    settings = ("--dtype", "float32", "--max-num-batched-tokens", "20", "--tiers", "always")
    with serving(tmp_path_factory.mktemp("server"), str(model[0]), *settings) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with plain_http.Client(base_url=server.url, timeout=120) as http:
        yield http


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny-dsa", "prompt": CAPITAL, "temperature": 0, "max_tokens": 3, "ignore_eos": True, **fields}
    answer = http.post(TEXT, json={name: value for name, value in body.items() if value is not None})
    assert answer.status_code == 200, answer.text
    completion: dict[str, Any] = answer.json()
    return completion


def tokenize(http: httpx.Client, text: str) -> list[int]:
    tokens: list[int] = http.post("/tokenize", json={"prompt": text}).raise_for_status().json()["tokens"]
    return tokens


def test_echoed_log_probabilities_of_twenty_prompts_equal_those_of_transformers(
    model: tuple[Path, Any], http: httpx.Client
) -> None:
    """The request is the one that lm-eval's `local-completions` sends. As lm-eval does, this compares the
    log-probability of every token of the prompt, and whether it is the most likely one.

    At most one prompt may differ after a near tie in a selection of the indexer, which rounding can reverse.
    """
    rng = random.Random(2)
    prompts = [[rng.randrange(VOCAB) for _ in range(2 + 5 * number)] for number in range(20)]
    body = {"model": "tiny-dsa", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    choices = http.post(TEXT, json={**body, "echo": True}).raise_for_status().json()["choices"]
    worst, differing = 0.0, 0
    for prompt, choice in zip(prompts, choices, strict=True):
        expected, near_tie = oracle_logprobs(model[1], prompt)
        token_logprobs, top_logprobs = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
        assert token_logprobs[0] is None and top_logprobs[0] is None and len(token_logprobs) == len(prompt) + 1
        of_prompt, next_ids = torch.tensor(token_logprobs[1:-1]), torch.tensor(prompt[1:])
        difference = (of_prompt - expected[:-1].gather(1, next_ids[:, None])[:, 0]).abs()
        is_best = torch.tensor([max(top.values()) for top in top_logprobs[1:-1]]) == of_prompt
        wrong = ((difference > TOLERANCE) | (is_best != (expected[:-1].argmax(-1) == next_ids))).nonzero()
        if len(wrong):
            differing += 1
            assert near_tie[wrong[0]]
        else:
            worst = max(worst, float(difference.max()))
    print(f"largest difference: {worst:.1e}; {differing} prompts differ after a near tie")
    assert differing <= 1


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
    body = {"model": "tiny-dsa", "temperature": 0, "ignore_eos": True, **fields, "stream": True}
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
    body = {"model": "tiny-dsa", "messages": messages, "prompt_logprobs": 0, "max_tokens": 0, "return_token_ids": True}
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
    body = {"model": "tiny-dsa", "prompt": long, "max_tokens": 2, "truncate_prompt_tokens": 5}
    assert http.post(TEXT, json=body).json()["usage"]["prompt_tokens"] == 5
    messages = [{"role": "user", "content": long}]
    chat = {"model": "tiny-dsa", "messages": messages, "max_tokens": 2, "truncate_prompt_tokens": 7}
    assert http.post(CHAT, json=chat).json()["usage"]["prompt_tokens"] == 7
    for kept in (0, -2):
        assert (
            error_of(http.post(TEXT, json={**body, "truncate_prompt_tokens": kept}), 400)["param"]
            == "truncate_prompt_tokens"
        )


def test_too_many_log_probabilities_are_refused_with_their_number(http: httpx.Client) -> None:
    body = {"model": "tiny-dsa", "prompt": [[1] * 8000] * 12, "max_tokens": 1, "prompt_logprobs": 20}
    error = error_of(http.post(TEXT, json=body), 400)
    assert error["param"] == "prompt_logprobs" and str(96_000 * 21) in error["message"]
