"""Structured output through HTTP, with the `openai` package and a server of the demo model."""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from running_server import RunningServer

QUESTION: list[Any] = [{"role": "user", "content": "Describe Ada Lovelace."}]


class Pet(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    name: str = Field(max_length=8)


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=130)
    pets: list[Pet] = Field(max_length=1)


@pytest.fixture(scope="module")
def client(demo_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_parse_returns_objects_of_a_pydantic_model(client: openai.OpenAI) -> None:
    completion = client.chat.completions.parse(
        model="demo-dsa", messages=QUESTION, response_format=Person, temperature=1, seed=1, n=2, max_tokens=1000
    )
    for choice in completion.choices:
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Person)


def test_a_stream_is_the_same_json_in_pieces(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo-dsa", "messages": QUESTION, "seed": 5, "temperature": 1}
    options |= {"response_format": Person, "max_tokens": 1000}
    whole = client.chat.completions.parse(**options).choices[0].message
    with client.chat.completions.stream(**options) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.content == whole.content and streamed.parsed == whole.parsed


def test_regex_choice_grammar_and_json_of_vllm(client: openai.OpenAI) -> None:
    def complete(**structure: Any) -> str:
        options = {"structured_outputs": structure}
        answer = client.completions.create(
            model="demo-dsa", prompt="Answer: ", temperature=1, seed=3, max_tokens=500, extra_body=options
        ).choices[0]
        assert answer.finish_reason == "stop"
        return answer.text

    assert re.fullmatch(r"[0-9]{3}-[a-z]{2}", complete(regex=r"^[0-9]{3}-[a-z]{2}$"))
    assert complete(choice=["positive", "negative"]) in ("positive", "negative")
    assert complete(grammar='root ::= "SELECT " [a-z] " FROM t"')[:7] == "SELECT "
    assert 0 <= json.loads(complete(json={"type": "integer", "minimum": 0, "maximum": 9})) <= 9


def test_json_object_cannot_end_before_it_is_complete(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo-dsa",
        messages=QUESTION,
        temperature=0,
        max_tokens=60,
        response_format={"type": "json_object"},
        logit_bias={"1": 100},
    ).choices[0]
    assert answer.message.content is not None and answer.message.content.lstrip().startswith("{")
    assert answer.finish_reason == "length" or isinstance(json.loads(answer.message.content), dict)


def test_a_schema_that_cannot_be_compiled_is_refused_with_the_reason(client: openai.OpenAI) -> None:
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="Invalid type: strin") as caught:
            client.chat.completions.create(
                model="demo-dsa", messages=QUESTION, response_format=response_format, stream=stream
            )
        assert caught.value.code == "invalid_structure"


def test_a_schema_of_endless_values_is_refused_with_its_path_also_as_the_arguments_of_a_tool(
    client: openai.OpenAI,
) -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
    schema = {"type": "object", "properties": {"list": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}}
    tools: Any = [{"type": "function", "function": {"name": "a", "parameters": schema}}]
    fields: Any
    for fields, param in (
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}, None),
        ({"tools": tools, "tool_choice": "required"}, "tools"),
    ):
        with pytest.raises(openai.BadRequestError, match=r"no finite value .* at #/.*next") as caught:
            client.chat.completions.create(model="demo-dsa", messages=QUESTION, **fields)
        assert (caught.value.code, caught.value.param) == ("invalid_structure", param)


def test_an_answer_that_becomes_too_complex_ends_its_stream_with_an_error(client: openai.OpenAI) -> None:
    bomb = {"structured_outputs": {"regex": "((a{1,1000}){1,1000}){1,1000}"}, "logit_bias": {"1": -100}}
    with pytest.raises(openai.APIError, match="cannot be completed"):
        client.completions.create(model="demo-dsa", prompt="a", max_tokens=400, temperature=0, extra_body=bomb)
