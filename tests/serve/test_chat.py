"""Chat completions of a model that thinks: prompts, reasoning and answers, with an engine that plays back answers."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from running_server import error_of
from scripted_engine import ScriptedClient, byte_tokenizer
from starlette.applications import Starlette

from hotset.base.serve_config import ServeConfig
from hotset.serve.app import create_app

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
TEMPLATE = (
    "{{ bos_token }}"
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content or '' }}{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if thinking %}<think>{% endif %}{% endif %}"
)
QUESTION = [{"role": "user", "content": "1 + 1?"}]
PROMPT = "<bos>user: 1 + 1?<end>assistant: "
ANSWER = "I add.</think>2"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedClient]:
    """An engine whose tokenizer has the 256 bytes, BOS, an end token, and special tokens that mark reasoning."""
    directory = tmp_path_factory.mktemp("thinking")
    tokenizer = byte_tokenizer(directory, TEMPLATE, ["<think>", "</think>"])
    with closing(tokenizer):
        yield ScriptedClient(tokenizer)


@pytest.fixture(scope="module")
def app(engine: Any) -> Starlette:
    return create_app(engine, ServeConfig())


def send(app: Starlette, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    async def exchange() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", verify=False) as http:
            return await (http.get(path) if body is None else http.post(path, json=body))

    return asyncio.run(exchange())


def ask(app: Starlette, **fields: Any) -> ChatCompletion:
    answer = send(app, CHAT, {"model": "scripted", "messages": QUESTION, **fields})
    assert answer.status_code == 200, answer.text
    return ChatCompletion.model_validate(answer.json(), strict=True)


def stream(app: Starlette, **fields: Any) -> list[ChatCompletionChunk]:
    answer = send(app, CHAT, {"model": "scripted", "messages": QUESTION, "stream": True, **fields})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [ChatCompletionChunk.model_validate_json(line) for line in lines[:-1]]


def prompt_of(app: Starlette, engine: ScriptedClient, **fields: Any) -> str:
    """Returns the prompt that the engine gets for a chat request. /tokenize must return the same prompt."""
    engine.say("2<end>")
    ask(app, **fields)
    counted = send(app, TOKENIZE, {"messages": QUESTION, **fields})
    assert counted.json()["tokens"] == engine.prompts[-1]
    return engine.tokenizer.decode(engine.prompts[-1], skip_special=False)


def reasoning_of(message: Any) -> str | None:
    text: str | None = (message.model_extra or {}).get("reasoning_content")
    return text


THINKING = {"chat_template_kwargs": {"thinking": True}}


def test_reasoning_is_separate_from_the_answer(app: Starlette, engine: ScriptedClient) -> None:
    engine.say(ANSWER + "<end>", "2</think>!<end>")
    answer = ask(app, **THINKING, n=2, logprobs=True, return_token_ids=True)
    assert [(reasoning_of(c.message), c.message.content) for c in answer.choices] == [("I add.", "2"), ("2", "!")]
    for choice, tokens in zip(answer.choices, engine.answers, strict=True):
        assert (choice.model_extra or {})["token_ids"] == tokens, "token ids stay whole"
        assert choice.logprobs is not None and len(choice.logprobs.content or ()) == len(tokens)
    assert answer.usage is not None and answer.usage.completion_tokens == sum(map(len, engine.answers))


def test_each_choice_of_a_stream_has_its_own_reasoning(app: Starlette, engine: ScriptedClient) -> None:
    engine.say(ANSWER + "<end>", "2</think>!<end>")
    chunks = [chunk.choices[0] for chunk in stream(app, **THINKING, n=2)]
    for index, (reasoning, content) in enumerate([("I add.", "2"), ("2", "!")]):
        deltas = [chunk.delta for chunk in chunks if chunk.index == index]
        assert "".join(reasoning_of(delta) or "" for delta in deltas) == reasoning
        assert "".join(delta.content or "" for delta in deltas) == content


ANSWERS = st.lists(st.sampled_from(["<think>", "</think>", "<", "/think>", "é", " "])).map("".join)


@settings(deadline=None, max_examples=30)
@given(answers=st.tuples(ANSWERS, ANSWERS), thinking=st.booleans())
def test_a_stream_adds_up_to_the_answer_as_a_whole(
    app: Starlette, engine: ScriptedClient, answers: tuple[str, str], thinking: bool
) -> None:
    engine.say(*(answer + "<end>" for answer in answers))
    fields = {"chat_template_kwargs": {"thinking": thinking}, "n": 2}
    whole = ask(app, **fields)
    chunks = [chunk.choices[0] for chunk in stream(app, **fields)]
    for choice in whole.choices:
        deltas = [chunk.delta for chunk in chunks if chunk.index == choice.index]
        assert "".join(delta.content or "" for delta in deltas) == (choice.message.content or "")
        assert "".join(reasoning_of(delta) or "" for delta in deltas) == (reasoning_of(choice.message) or "")
        assert all(delta.content or reasoning_of(delta) for delta in deltas[1:-1]), "no chunk is empty"


def test_an_answer_that_ends_within_its_reasoning_has_no_content(app: Starlette, engine: ScriptedClient) -> None:
    engine.say("I add </thi")
    (choice,) = ask(app, **THINKING).choices
    assert (choice.finish_reason, choice.message.content) == ("length", None)
    assert reasoning_of(choice.message) == "I add </thi"
    chunks = [chunk.choices[0].delta for chunk in stream(app, **THINKING)]
    assert "".join(reasoning_of(delta) or "" for delta in chunks) == "I add </thi"
    engine.say("<end>")
    assert ask(app).choices[0].message.content == "", "an empty answer without reasoning is an empty text"


def test_reasoning_can_be_left_out(app: Starlette, engine: ScriptedClient) -> None:
    engine.say(ANSWER + "<end>")
    (choice,) = ask(app, **THINKING, include_reasoning=False).choices
    assert (reasoning_of(choice.message), choice.message.content) == (None, "2")
    chunks = stream(app, **THINKING, include_reasoning=False)
    assert [reasoning_of(chunk.choices[0].delta) for chunk in chunks] == [None] * len(chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "2"


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, PROMPT),
        (THINKING, PROMPT + "<think>"),
        ({"reasoning_effort": "high"}, PROMPT + "<think>"),
        ({"reasoning_effort": "none"}, PROMPT),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"thinking": False}}, PROMPT),
        ({"reasoning_effort": None, "chat_template_kwargs": None, "continue_final_message": None}, PROMPT),
        ({"add_generation_prompt": False}, "<bos>user: 1 + 1?<end>"),
        ({"add_special_tokens": True}, "<bos>" + PROMPT),
        (
            {"messages": [*QUESTION, {"role": "assistant", "content": "It is"}], "continue_final_message": True},
            PROMPT + "It is",
        ),
        (
            {"messages": [*QUESTION, {"role": "assistant", "reasoning_content": "I add.", "content": "2"}]},
            PROMPT + "I add.2<end>assistant: ",
        ),
        ({"messages": [{"role": "developer", "content": "Hi"}]}, "<bos>system: Hi<end>assistant: "),
    ],
)
def test_the_fields_of_a_request_determine_the_prompt(
    app: Starlette, engine: ScriptedClient, fields: dict[str, Any], prompt: str
) -> None:
    assert prompt_of(app, engine, **fields) == prompt


def test_a_message_that_is_continued_within_its_reasoning_begins_with_reasoning(
    app: Starlette, engine: ScriptedClient
) -> None:
    engine.say("dd.</think>2<end>")
    messages = [*QUESTION, {"role": "assistant", "content": "<think>I a"}]
    (choice,) = ask(app, messages=messages, continue_final_message=True).choices
    assert (reasoning_of(choice.message), choice.message.content) == ("dd.", "2")


@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "only one of them"),
        (
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
            "'messages', which is a field of the request",
        ),
        ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs", "'eos_token', which the model defines"),
        ({"chat_template_kwargs": {"x": "y" * 17000}}, "chat_template_kwargs", "the limit is 16384"),
        ({"chat_template": "{{ messages }}"}, "chat_template", "chat_template"),
    ],
)
def test_a_prompt_that_cannot_be_made_is_refused(
    app: Starlette, path: str, fields: dict[str, Any], param: str, reason: str
) -> None:
    error = error_of(send(app, path, {"model": "scripted", "messages": QUESTION, **fields}), 400)
    assert error["param"] == param and reason in error["message"]
    assert error["code"] == ("unsupported_field" if param == "chat_template" else "invalid_value")


def test_a_prompt_is_tokenized_with_and_without_special_tokens(app: Starlette, engine: ScriptedClient) -> None:
    for added, text in ((None, "<bos>a"), (True, "<bos>a"), (False, "a")):
        tokens = send(app, TOKENIZE, {"prompt": "a", "add_special_tokens": added}).json()["tokens"]
        assert engine.tokenizer.decode(tokens, skip_special=False) == text


def test_the_tokenizer_is_described(app: Starlette) -> None:
    assert send(app, "/tokenizer_info").json() == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": 260,
        "model_max_length": 4096,
        "add_bos_token": True,
        "chat_template": TEMPLATE,
        "bos_token": "<bos>",
        "eos_token": "<end>",
    }
