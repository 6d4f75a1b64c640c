"""The `openai` package gets the expected answers from a server of the demo model.

test_clients.py has the tests with a scripted model.
"""

import asyncio
import json
import random
import re
import secrets
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import httpx
import openai
import plain_http
import pytest
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel, ConfigDict, Field
from running_server import RunningServer

from hotset.lab.bench.benchmark import Benchmark, BenchReport
from hotset.lab.bench.config import BenchConfig

MODEL = "demo-dsa"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
DESCRIBE: list[Any] = [{"role": "user", "content": "Describe Ada Lovelace."}]
CAPITAL = "The capital of France is"
COUNTING = "1, 2, 3, 4,"
PAGE_ROWS = 64


@pytest.fixture(scope="module")
def client(demo_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def http(demo_server: RunningServer) -> Iterator[httpx.Client]:
    with plain_http.Client(base_url=demo_server.url, timeout=60) as http:
        yield http


def ask(client: openai.OpenAI, **options: Any) -> Any:
    values = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 16, **options}
    return client.chat.completions.create(**values)


def complete(client: openai.OpenAI, **options: Any) -> Any:
    values = {"model": MODEL, "prompt": CAPITAL, "temperature": 0, "max_tokens": 6, **options}
    return client.completions.create(**values)


def completed_ids(client: openai.OpenAI, **options: Any) -> list[int]:
    choice = complete(client, extra_body={"return_token_ids": True}, **options).choices[0]
    token_ids: list[int] = choice.model_extra["token_ids"]
    return token_ids


def streamed_text(chunks: Iterable[ChatCompletionChunk]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def tokenize(http: httpx.Client, body: dict[str, Any]) -> list[int]:
    answer = http.post("/tokenize", json=body).raise_for_status().json()
    assert answer["count"] == len(answer["tokens"])
    tokens: list[int] = answer["tokens"]
    return tokens


def test_usage_counts_prompt_and_completion_tokens(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = ask(client, extra_body={"return_token_ids": True})
    prompt = tokenize(http, {"messages": QUESTION})
    choice = answer.choices[0].model_extra
    assert choice["prompt_token_ids"] == prompt
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(choice["token_ids"])
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    *_, last = ask(client, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage == answer.usage


def reusable(prompt_tokens: int) -> int:
    """Returns how many tokens of a known prompt are reused: whole pages, and never the last token."""
    return (prompt_tokens - 1) // PAGE_ROWS * PAGE_ROWS


def cached(answer: Any) -> int:
    tokens: int = answer.usage.prompt_tokens_details.cached_tokens
    return tokens


def random_prompt(tokens: int) -> list[int]:
    """Returns the same prompt in every run. After other prompts, two logits could be so close that rounding decides."""
    return random.Random(tokens).choices(range(300, 400), k=tokens)


@pytest.fixture
def salt() -> str:
    """Returns a new salt, so that the test finds no pages of earlier runs in the cache."""
    return secrets.token_hex(8)


def wait_until_idle(server: RunningServer) -> None:
    """Waits until the requests of earlier tests have ended, also those whose client has disconnected."""
    for state in ("running", "waiting", "parked"):
        server.wait_for_gauge(f"hotset_requests_{state}", 0)


def test_a_known_prompt_with_the_same_salt_is_not_computed_again_and_usage_and_metrics_say_so(
    demo_server: RunningServer, client: openai.OpenAI, salt: str
) -> None:
    prompt = random_prompt(2 * PAGE_ROWS + 7)
    options = {"return_token_ids": True, "ignore_eos": True}
    fields, salted = (
        {"prompt": prompt, "extra_body": {**options, "cache_salt": f"{salt} {tenant}"}} for tenant in range(2)
    )
    wait_until_idle(demo_server)
    names = ("prefix_cache_tokens_queried", "prefix_cache_tokens_reused", "tokens_prefilled")
    before = [demo_server.gauge(f"hotset_{name}_total") for name in names]
    answers = [complete(client, **each) for each in (fields, fields, salted, salted)]
    after = [demo_server.gauge(f"hotset_{name}_total") for name in names]
    known = reusable(len(prompt))
    assert [cached(answer) for answer in answers] == [0, known, 0, known]
    assert len({tuple(answer.choices[0].model_extra["token_ids"]) for answer in answers}) == 1
    queried, reused, prefilled = (now - then for now, then in zip(after, before, strict=True))
    assert (queried, reused, prefilled) == (4 * len(prompt), 2 * known, 4 * len(prompt) - 2 * known)
    demo_server.wait_for_gauge("hotset_host_pages_held", 0)  # pages that only the cache has are not held


def test_the_next_turn_of_a_conversation_reuses_the_one_before_streamed_or_not(
    client: openai.OpenAI, salt: str
) -> None:
    question = " ".join(random.Random(0).choices(["red", "green", "blue", "tall", "old", "seven"], k=PAGE_ROWS))
    messages = [{"role": "user", "content": question}]
    options = {"max_tokens": 4, "extra_body": {"cache_salt": salt}}
    first = ask(client, messages=messages, **options)
    messages += [first.choices[0].message, {"role": "user", "content": "And why?"}]
    *chunks, last = ask(
        client,
        messages=messages,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        **options,
    )
    assert cached(first) == 0 and first.usage.prompt_tokens > PAGE_ROWS
    assert cached(last) >= reusable(first.usage.prompt_tokens)
    assert {cached(chunk) for chunk in chunks} == {cached(last)}
    again = ask(client, messages=messages, **options)
    assert cached(again) == reusable(again.usage.prompt_tokens)
    assert again.choices[0].message.content == streamed_text(chunks)


def test_a_prompt_counts_once_however_many_choices_share_it(client: openai.OpenAI, salt: str) -> None:
    prompts = [random_prompt(PAGE_ROWS + 2), random_prompt(2 * PAGE_ROWS + 2)]
    fields = {"prompt": prompts, "n": 2, "max_tokens": 1, "extra_body": {"cache_salt": salt}}
    first, again = complete(client, **fields), complete(client, **fields)
    assert first.usage.prompt_tokens == again.usage.prompt_tokens == 3 * PAGE_ROWS + 4
    assert (cached(first), cached(again)) == (0, 3 * PAGE_ROWS)


def test_stop_string_ends_the_answer_and_is_hidden_unless_requested(client: openai.OpenAI) -> None:
    # The stop string ends inside a token, whose remaining text must not appear.
    full = ask(client, stop=["Go"]).choices[0]
    assert (full.message.content, full.finish_reason) == (" \n No ", "stop")
    assert streamed_text(ask(client, stop=["Go"], stream=True)) == full.message.content
    kept = ask(client, stop="Go", extra_body={"include_stop_str_in_output": True}).choices[0]
    assert kept.message.content == " \n No Go"
    assert ask(client).choices[0].message.content.startswith(" \n No God"), (
        "'Go' must end inside a token, or this test checks less than it should"
    )


def test_n_returns_that_many_different_choices(client: openai.OpenAI) -> None:
    hot = {"temperature": 1.5, "max_tokens": 6, "seed": 7}
    choices = ask(client, n=3, **hot).choices
    texts = [choice.message.content for choice in choices]
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts[0] == ask(client, **hot).choices[0].message.content, "the first choice must not depend on n"
    streamed = dict.fromkeys(range(3), "")
    for chunk in ask(client, n=3, stream=True, **hot):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == texts


def test_chat_logprobs_rank_the_alternatives(client: openai.OpenAI) -> None:
    choice = ask(client, logprobs=True, top_logprobs=3, max_tokens=5).choices[0]
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == choice.message.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == choice.message.content
    for entry in entries:
        values = [candidate.logprob for candidate in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert entry.logprob == values[0] <= 0, "a greedy token is the most likely one"
    streamed = [
        entry
        for chunk in ask(client, logprobs=True, top_logprobs=3, max_tokens=5, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    assert ask(client, max_tokens=1).choices[0].logprobs is None


def test_echo_returns_the_prompt_and_its_log_probabilities_before_the_answer(client: openai.OpenAI) -> None:
    plain, full = complete(client).choices[0], complete(client, echo=True, logprobs=1)
    echoed = full.choices[0]
    assert echoed.text == CAPITAL + plain.text
    columns = echoed.logprobs
    assert columns.token_logprobs[0] is columns.top_logprobs[0] is None
    for token, offset in zip(columns.tokens, columns.text_offset, strict=True):
        assert echoed.text[offset:].startswith(token)
    for logprob, top in zip(columns.token_logprobs[1:], columns.top_logprobs[1:], strict=True):
        assert logprob in top.values() and len(top) == 1 + (logprob < max(top.values()))
    chunks = [chunk.choices[0] for chunk in complete(client, echo=True, logprobs=1, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == echoed.text and chunks[0].text.startswith(CAPITAL)
    assert [token for chunk in chunks for token in chunk.logprobs.tokens] == columns.tokens
    scored = complete(client, echo=True, logprobs=1, max_tokens=0, stop="France", extra_body={"prompt_logprobs": 1})
    (choice,), prompt_tokens = scored.choices, full.usage.prompt_tokens
    assert (choice.text, choice.finish_reason, scored.usage.completion_tokens) == (CAPITAL, "length", 0)
    assert choice.logprobs.tokens == columns.tokens[:prompt_tokens]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(columns.token_logprobs[1:prompt_tokens], abs=1e-4)
    first, *others = choice.model_extra["prompt_logprobs"]
    assert (
        first is None
        and [next(iter(entry.values()))["logprob"] for entry in others] == choice.logprobs.token_logprobs[1:]
    )


def test_a_conversation_is_truncated_and_has_log_probabilities(client: openai.OpenAI) -> None:
    options = {"truncate_prompt_tokens": 5, "prompt_logprobs": 0, "return_token_ids": True}
    answer = ask(client, max_tokens=0, extra_body=options)
    assert (answer.usage.prompt_tokens, answer.choices[0].message.content) == (5, "")
    prompt_ids = [str(token) for token in answer.choices[0].model_extra["prompt_token_ids"]]
    assert [list(entry or ()) for entry in answer.model_extra["prompt_logprobs"]] == [
        [],
        *([token] for token in prompt_ids[1:]),
    ]


def test_logit_bias_forces_and_forbids_tokens(client: openai.OpenAI, http: httpx.Client) -> None:
    (one,) = tokenize(http, {"prompt": " one"})
    assert complete(client, logit_bias={str(one): 100}, max_tokens=2).choices[0].text == " one one"
    plain = completed_ids(client)
    with_bias = completed_ids(client, logit_bias={str(plain[0]): -100})
    assert plain[0] not in with_bias


def test_all_forms_of_a_prompt_get_the_same_answer(client: openai.OpenAI, http: httpx.Client) -> None:
    ids = tokenize(http, {"prompt": CAPITAL})
    expected = complete(client).choices[0].text
    for prompt in (CAPITAL, [CAPITAL], ids, [ids]):
        assert [choice.text for choice in complete(client, prompt=prompt).choices] == [expected]
    counting = complete(client, prompt=COUNTING).choices[0].text
    both = complete(client, prompt=[CAPITAL, COUNTING], n=2, extra_body={"return_token_ids": True})
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in both.choices] == [expected, expected, counting, counting]
    assert expected != counting
    assert [choice.model_extra["prompt_token_ids"] == ids for choice in both.choices] == [True, True, False, False]
    assert both.usage.completion_tokens == sum(len(choice.model_extra["token_ids"]) for choice in both.choices)


def test_max_tokens_and_its_default_limit_the_answer(client: openai.OpenAI) -> None:
    short = ask(client, max_tokens=openai.omit, max_completion_tokens=3)
    assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (3, "length")
    forced = ask(client, extra_body={"ignore_eos": True}, max_tokens=12)
    assert (forced.usage.completion_tokens, forced.choices[0].finish_reason) == (12, "length")
    assert complete(client, max_tokens=openai.omit).usage.completion_tokens == 16, "16 is the default of the API"


def test_stop_token_ids_end_the_answer_and_special_tokens_can_be_shown(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    first = completed_ids(client)[0]
    stopped = complete(client, extra_body={"stop_token_ids": [first]}).choices[0]
    assert (stopped.text, stopped.finish_reason, stopped.model_extra["stop_reason"]) == ("", "stop", first)
    (end,) = tokenize(http, {"prompt": "<|end|>"})
    ends = {"max_tokens": 2, "logit_bias": {str(end): 100}}
    hidden, shown = (
        ask(client, extra_body={"skip_special_tokens": skip, "ignore_eos": True}, **ends) for skip in (True, False)
    )
    assert (hidden.choices[0].message.content, shown.choices[0].message.content) == ("", "<|end|><|end|>")


def test_the_model_is_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).model_extra["max_model_len"] == 16384
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("some/other")


def test_the_message_of_an_answer_can_be_sent_back_and_answers_have_the_id_of_their_request(
    client: openai.OpenAI,
) -> None:
    first = ask(client, extra_headers={"X-Request-Id": "first-turn"})
    assert first._request_id == "first-turn"
    assert first.system_fingerprint is not None
    turns = [*QUESTION, first.choices[0].message, {"role": "user", "content": "And of Spain?"}]
    second = ask(client, messages=turns)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + 1
    whole = first.choices[0].message.model_dump()  # with every null
    assert ask(client, messages=[QUESTION[0], whole, turns[-1]]).choices == second.choices


def test_detokenize_undoes_tokenize(http: httpx.Client) -> None:
    for text in (CAPITAL, "naïve café 🦊", "<|end|>user\n"):
        tokens = tokenize(http, {"prompt": text})
        assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


def test_simultaneous_requests_get_their_own_answers(demo_server: RunningServer, client: openai.OpenAI) -> None:
    async def all_at_once(prompts: list[str]) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0) as client:
            request = {"model": MODEL, "temperature": 0, "max_tokens": 6}
            answers = await asyncio.gather(*(client.completions.create(prompt=p, **request) for p in prompts))
            return [answer.choices[0].text for answer in answers]

    prompts = [CAPITAL, COUNTING, "The opposite of hot is"]
    one_by_one = [complete(client, prompt=prompt).choices[0].text for prompt in prompts]
    assert len(set(one_by_one)) == 3
    assert asyncio.run(all_at_once(prompts * 2)) == one_by_one * 2


class Pet(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    name: str = Field(max_length=8)


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=130)
    pets: list[Pet] = Field(max_length=1)


def test_parse_returns_objects_of_a_pydantic_model(client: openai.OpenAI) -> None:
    completion = client.chat.completions.parse(
        model=MODEL, messages=DESCRIBE, response_format=Person, temperature=1, seed=1, n=2, max_tokens=1000
    )
    for choice in completion.choices:
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Person)


def test_a_stream_is_the_same_json_in_pieces(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": DESCRIBE, "seed": 5, "temperature": 1}
    options |= {"response_format": Person, "max_tokens": 1000}
    whole = client.chat.completions.parse(**options).choices[0].message
    with client.chat.completions.stream(**options) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.content == whole.content and streamed.parsed == whole.parsed


def test_regex_choice_grammar_and_json_of_vllm(client: openai.OpenAI) -> None:
    def structured(**structure: Any) -> str:
        options = {"temperature": 1, "seed": 3, "max_tokens": 500, "extra_body": {"structured_outputs": structure}}
        answer = complete(client, prompt="Answer: ", **options).choices[0]
        assert answer.finish_reason == "stop"
        text: str = answer.text
        return text

    assert re.fullmatch(r"[0-9]{3}-[a-z]{2}", structured(regex=r"^[0-9]{3}-[a-z]{2}$"))
    assert structured(choice=["positive", "negative"]) in ("positive", "negative")
    assert structured(grammar='root ::= "SELECT " [a-z] " FROM t"')[:7] == "SELECT "
    assert 0 <= json.loads(structured(json={"type": "integer", "minimum": 0, "maximum": 9})) <= 9


def test_an_answer_that_becomes_too_complex_ends_its_stream_with_an_error(client: openai.OpenAI) -> None:
    bomb = {"structured_outputs": {"regex": "((a{1,1000}){1,1000}){1,1000}"}, "logit_bias": {"1": -100}}
    with pytest.raises(openai.APIError, match="cannot be completed"):
        client.completions.create(model=MODEL, prompt="a", max_tokens=400, temperature=0, extra_body=bomb)


@pytest.mark.parametrize("prompts", [{"prompt_format": "ids"}, {"endpoint": "chat"}])
def test_hotset_bench_counts_what_the_server_counts_and_measures_no_shorter_times(
    demo_server: RunningServer, prompts: dict[str, Any]
) -> None:
    """The server's own metrics are the oracle: exact numbers of tokens, and lower bounds of the times."""
    before: dict[str, float] = {}
    wait_until_idle(demo_server)
    config = BenchConfig(concurrency="3", num_requests=4, input_tokens="40", output_tokens="5", warmup=0, **prompts)

    async def measure() -> BenchReport:
        async with Benchmark(demo_server.url, config, asyncio.Event()) as benchmark:
            before.update(bench_metrics(demo_server))  # after the requests of the probe
            return await benchmark.run()

    [result] = asyncio.run(measure()).results
    counted = [(record.input_tokens, record.cached_tokens, record.output_tokens) for record in result.completed]
    assert counted == [(40, 0, 5)] * 4
    after = bench_metrics(demo_server)
    difference = {name: after[name] - before[name] for name in after}
    assert difference["hotset_tokens_prefilled_total"] == 4 * 40
    assert difference["hotset_tokens_generated_total"] == 4 * 5
    assert difference["hotset_time_to_first_token_seconds_count"] == 4
    assert difference["hotset_time_to_first_token_seconds_sum"] <= sum(
        record.ttft or record.e2e for record in result.completed
    )


def bench_metrics(server: RunningServer) -> dict[str, float]:
    tokens = ("hotset_tokens_prefilled_total", "hotset_tokens_generated_total")
    times = ("hotset_time_to_first_token_seconds_count", "hotset_time_to_first_token_seconds_sum")
    return {name: server.gauge(name) for name in (*tokens, *times)}
