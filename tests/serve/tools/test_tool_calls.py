"""Tools in chat completions, as the `openai` client sees them: an engine plays back the answers of a model.

Each format has a template that renders tools, calls and results like the published templates.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessage
from scripted_engine import ScriptedClient, byte_tokenizer
from starlette.applications import Starlette
from test_parsers import OPENERS, WRITERS

from hotset.base.sampling import SamplingParams
from hotset.base.serve_config import ServeConfig
from hotset.models.answer_parser import TOOL_MARKERS, PlainParser
from hotset.models.chat_formats import built_in_template
from hotset.serve.app import create_app
from hotset.serve.conversation import AnswerReader, ConversationPrompt
from hotset.serve.tools.calls import MAX_TOOL_CHARACTERS, MAX_TOOLS, ToolSpec, ToolUse
from hotset.serve.tools.formats import FORMATS, format_for

LOOP = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
END = "<end>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
TOOLS_HERE = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
# Like Qwen3's template: arguments are a text or an object.
QWEN3 = (
    TOOLS_HERE + LOOP + "{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{{ '}\n</tool_call>' }}{% endfor %}" + END
)
# Like Qwen3-Coder's template, which iterates over the arguments.
CODER = (
    TOOLS_HERE + LOOP + "{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    "{{ '<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{% for key, value in call.function.arguments.items() %}"
    "{{ '<parameter=' + key + '>\n' }}{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}"
    "{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}" + END
)
# Like Llama 3.1's template, which accepts one call in each message.
LLAMA3 = (
    TOOLS_HERE + LOOP + "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}{% set call = m.tool_calls[0].function %}"
    '{{ \'<|python_tag|>{"name": "\' + call.name + \'", "parameters": \' }}{{ call.arguments | tojson }}{{ "}" }}'
    "{% endif %}" + END
)
NO_TOOLS = LOOP + END
TEMPLATES = {
    "deepseek_v32": built_in_template("deepseek_v32"),
    "glm": built_in_template("glm_moe_dsa"),
    "qwen3_coder": CODER,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "none": NO_TOOLS,
}
SPECIAL = {"deepseek_v32": ["｜DSML｜"], "llama3": ["<|python_tag|>"]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The forecast of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS: list[Any] = [WEATHER, NOW]
QUESTION: list[Any] = [{"role": "user", "content": "Will it rain?"}]
CALLS = [("weather", {"city": "Genève <b>", "days": 2}), ("now", {})]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ScriptedClient]]:
    """Engines by the format of their model. The markers of the format are special tokens."""
    made: dict[str, ScriptedClient] = {}
    with ExitStack() as tokenizers:

        def engine(name: str) -> ScriptedClient:
            if name not in made:
                directory: Path = tmp_path_factory.mktemp(name)
                special = SPECIAL.get(name, ["<tool_call>", "</tool_call>"])
                tokenizer = byte_tokenizer(directory, TEMPLATES[name] or "", special)
                made[name] = ScriptedClient(tokenizers.enter_context(closing(tokenizer)))
            return made[name]

        yield engine


@cache
def app_of(engine: Any, tool_format: Any) -> Starlette:
    return create_app(engine, ServeConfig(tool_format=tool_format))


def talk(engine: Any, conversation: Callable[[openai.AsyncOpenAI], Awaitable[Any]], **settings: Any) -> Any:
    """Runs a conversation of the `openai` client with a server over the engine."""

    async def run() -> Any:
        transport = httpx.ASGITransport(app=app_of(engine, settings.get("tool_format", "auto")))
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://test", verify=False) as http,
            openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", max_retries=0, http_client=http) as client,
        ):
            return await conversation(client)

    return asyncio.run(run())


def ask(engine: ScriptedClient, *answers: str, end: str = "<end>", **fields: Any) -> Any:
    engine.say(*(answer + end for answer in answers))
    settings = fields.pop("settings", {})
    body = {"model": "scripted", "messages": QUESTION, "tools": TOOLS, **fields}
    return talk(engine, lambda client: client.chat.completions.create(**body), **settings)


def stream(engine: ScriptedClient, answer: str, end: str = "<end>", **fields: Any) -> list[Any]:
    engine.say(answer + end)
    body = {"model": "scripted", "messages": QUESTION, "tools": TOOLS, "stream": True, **fields}

    async def chunks(client: openai.AsyncOpenAI) -> list[Any]:
        return [chunk async for chunk in await client.chat.completions.create(**body)]

    result: list[Any] = talk(engine, chunks)
    return result


def calls_of(message: ChatCompletionMessage) -> list[tuple[str, Any]]:
    calls: list[Any] = list(message.tool_calls or [])
    assert all(call.type == "function" and call.id.startswith("call_") for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def last_prompt(engine: ScriptedClient) -> str:
    return engine.tokenizer.decode(engine.prompts[-1], skip_special=False)


every_format = pytest.mark.parametrize("name", [each.name for each in FORMATS])


@every_format
def test_an_agent_gets_calls_and_sends_back_their_results(engines: Any, name: str) -> None:
    engine, made = engines(name), CALLS[:1] if name == "llama3" else CALLS
    answer = WRITERS[name](made)
    first = ask(engine, f"Let me see.\n\n{answer}").choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.content == "Let me see." and calls_of(first.message) == made
    for tool in TOOLS:
        assert json.dumps(tool["function"]["name"]) in last_prompt(engine), "the model sees the tools"
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result {number}"}
        for number, call in enumerate(first.message.tool_calls)
    ]
    second = ask(engine, "It rains.", messages=[*QUESTION, first.message, *results]).choices[0]
    assert (second.message.content, second.finish_reason) == ("It rains.", "stop")
    assert second.message.tool_calls is None
    prompt = last_prompt(engine)
    written = answer if name != "glm" else "".join(answer.split("\n"))
    assert written in prompt, "the model sees its own calls as it wrote them"
    assert all(result["content"] in prompt for result in results)


@every_format
def test_a_streamed_answer_adds_up_to_the_whole_one(engines: Any, name: str) -> None:
    chunks = stream(engines(name), f"Let me see. {WRITERS[name](CALLS)}")
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    calls: dict[int, tuple[str, str]] = {}
    for part in parts:
        if part.id is not None:
            assert part.index == len(calls) and part.type == "function" and part.id.startswith("call_")
            calls[part.index] = (part.function.name, "")
        else:
            assert part.function.name is None, "a name is sent once"
        calls[part.index] = (calls[part.index][0], calls[part.index][1] + part.function.arguments)
    assert [(name, json.loads(arguments)) for name, arguments in calls.values()] == CALLS
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"
    assert deltas[0].role == "assistant"


@every_format
def test_no_chunk_shows_a_part_of_a_marker_and_a_malformed_call_is_text(engines: Any, name: str) -> None:
    opener = OPENERS.get(name, "<tool_call>")
    for text in (f"a {opener[:-1]} b", f"a {opener}x y</tool_call> b"):
        chunks = stream(engines(name), text)
        shown = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "".join(shown) == text and not any(chunk.choices[0].delta.tool_calls for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_without_tools_a_marker_is_text(engines: Any) -> None:
    engine, answer = engines("qwen3"), WRITERS["qwen3"](CALLS)
    for fields in ({"tool_choice": "none"}, {"tools": openai.omit}, {"tools": []}):
        choice = ask(engine, answer, **fields).choices[0]
        assert (choice.message.content, choice.message.tool_calls) == (answer, None)
        assert choice.finish_reason == "stop" and "weather" not in last_prompt(engine)


def test_each_choice_has_calls_of_its_own(engines: Any) -> None:
    answers = [WRITERS["qwen3"](CALLS[:1]), "It rains.", WRITERS["qwen3"](CALLS)]
    choices = ask(engines("qwen3"), *answers, n=3).choices
    assert [calls_of(choice.message) for choice in choices] == [CALLS[:1], [], CALLS]
    assert [choice.finish_reason for choice in choices] == ["tool_calls", "stop", "tool_calls"]
    assert [choice.message.content for choice in choices] == [None, "It rains.", None]


def test_a_call_that_the_limit_cuts_off_is_text(engines: Any) -> None:
    choice = ask(engines("qwen3"), WRITERS["qwen3"](CALLS)[:-3], end="").choices[0]
    assert choice.finish_reason == "length" and calls_of(choice.message) == CALLS[:1]
    assert choice.message.content.strip() == WRITERS["qwen3"](CALLS[1:])[:-3], "what was written is not lost"


def test_a_streamed_call_that_the_limit_cuts_off_has_arguments_that_are_not_json(engines: Any) -> None:
    written = WRITERS["qwen3"](CALLS[:1])[:-14]  # the arguments are there, the end of the call is not
    choices = [chunk.choices[0] for chunk in stream(engines("qwen3"), written, end="")]
    parts = [part for choice in choices for part in choice.delta.tool_calls or ()]
    arguments = "".join(part.function.arguments for part in parts)
    assert parts[0].function.name == "weather" and len(parts) > 10, "it was streamed"
    assert arguments + "}" == json.dumps(CALLS[0][1], ensure_ascii=False)
    assert "".join(choice.delta.content or "" for choice in choices) == "}", "the rest is text"
    assert choices[-1].finish_reason == "length"


def test_one_call_at_a_time_is_the_first_that_is_complete(engines: Any) -> None:
    broken = '<tool_call>{"name": "now", "arguments": {"a": nan}}</tool_call>'
    good = WRITERS["qwen3"](CALLS[:1])
    answer = f"{broken}{good}{broken}{good}"
    message = ask(engines("qwen3"), answer, parallel_tool_calls=False).choices[0].message
    assert calls_of(message) == CALLS[:1] and message.content == broken + broken
    chunks = stream(engines("qwen3"), answer, parallel_tool_calls=False)
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert [part.function.name for part in parts if part.id] == ["now", "weather"]
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert content == "an}}</tool_call>" + broken
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_template_without_tools_describes_them_in_the_system_message(engines: Any) -> None:
    engine = engines("none")
    first = ask(engine, WRITERS["qwen3"](CALLS[:1])).choices[0].message
    assert calls_of(first) == CALLS[:1]
    assert "<|system|>" in last_prompt(engine) and '"weather"' in last_prompt(engine)
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
    ask(engine, "Yes.", messages=[{"role": "system", "content": "Be brief."}, *QUESTION, first, result])
    prompt = last_prompt(engine)
    assert prompt.count("<|system|>") == 1 and prompt.startswith("<|system|>Be brief.\n\n")
    assert WRITERS["qwen3"](CALLS[:1]) in prompt
    assert prompt.endswith("<|user|><tool_response>\nrain\n</tool_response><end><|assistant|>")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_required_call_is_constrained(engines: Any, choice: Any) -> None:
    engine = engines("qwen3")
    message = ask(engine, WRITERS["qwen3"](CALLS[1:]), tool_choice=choice).choices[0].message
    assert calls_of(message) == CALLS[1:]
    structure = engine.params[-1].structure
    assert structure is not None and "now" in structure.value
    assert ("weather" in structure.value) == (choice == "required")
    ask(engine, "No.", tool_choice="auto")
    assert engine.params[-1].structure is None


def test_a_required_call_may_follow_reasoning_that_the_prompt_opens() -> None:
    structure = FORMATS[0].structure(ToolUse((ToolSpec("now"),), "required"), {})
    prompt = ConversationPrompt([], lambda: AnswerReader(PlainParser()), begins_in_reasoning=True, structure=structure)
    constrained = prompt.constrained(SamplingParams()).structure
    assert constrained is not None and (constrained.value, constrained.after) == (structure.value, "</think>")


def function(**fields: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "a", **fields}}]


PATTERN = {"type": "object", "properties": {"b": {"type": "string", "pattern": "("}}}
LARGE = function(description="x" * MAX_TOOL_CHARACTERS)
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "later"}}}, "tool_choice", "'later'"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "'required'"),
    ({"tools": TOOLS, "tool_choice": 1}, "tool_choice", "must be 'none'"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "allowed_tools"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "required"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type", "'custom'"),
    ({"tools": function(name="")}, "tools", "1 to 128"),
    ({"tools": function(name="get weather")}, "tools", "'get weather'"),
    ({"tools": function(name="a" * 129)}, "tools", "1 to 128"),
    ({"tools": TOOLS + TOOLS}, "tools", "two tools with the name 'weather'"),
    ({"tools": function() * (MAX_TOOLS + 1)}, "tools", str(MAX_TOOLS)),
    ({"tools": LARGE}, "tools", str(MAX_TOOL_CHARACTERS)),
    ({"tools": function(parameters=[])}, "tools[0].function.parameters", "dictionary"),
    ({"tools": function(parameters={"type": "string"})}, "tools", 'type object, got "string"'),
    ({"tools": function(parameters={"properties": []})}, "tools", "properties must be an object"),
    ({"tools": function(parameters={"properties": {"b": 1}})}, "tools", "a schema must be an object"),
    ({"tools": function(parameters={"properties": {"b": {"type": "text"}}})}, "tools", 'no type "text"'),
    ({"tools": function(parameters=PATTERN), "tool_choice": "required"}, "tools", "cannot be compiled"),
    ({"tools": function(parameters={"required": "b"})}, "tools", "list of names"),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", "one of"),
]


@pytest.mark.parametrize(("fields", "param", "reason"), REFUSED, ids=lambda value: str(value)[:40])
def test_unusable_tools_are_refused_with_the_reason(
    engines: Any, fields: dict[str, Any], param: str, reason: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(engines("qwen3"), "No.", **({"tools": openai.omit} | fields))
    body: Any = refused.value.body
    assert (body["param"], reason in body["message"]) == (param, True), body


def test_the_format_can_be_chosen_and_tools_can_be_refused(engines: Any) -> None:
    engine = engines("qwen3")
    message = ask(engine, WRITERS["glm"](CALLS), settings={"tool_format": "glm"}).choices[0].message
    assert calls_of(message) == CALLS
    with pytest.raises(openai.BadRequestError, match="--tool-format none"):
        ask(engine, "No.", settings={"tool_format": "none"})


def test_the_template_shows_the_format() -> None:
    for name, template in TEMPLATES.items():
        found = format_for(template, "auto")
        assert found is not None and found.name == (name if name != "none" else "qwen3")
    assert format_for(None, "none") is None
    names = get_args(get_type_hints(ServeConfig)["tool_format"])
    assert set(names) == {"auto", "none", *(each.name for each in FORMATS)}
    assert all(any(marker in OPENERS.get(each.name, "<tool_call>") for marker in TOOL_MARKERS) for each in FORMATS)
