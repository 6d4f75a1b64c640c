"""Real clients talk to a server of a scripted model: `openai`, `anthropic`, LiteLLM, LangChain, and the replayed
requests of load generators. test_openai_client.py has the tests of `openai` with a model that computes.

scripts/clients runs further clients, which are too large for `make test`.
"""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from clients.replay import REPLAYS, replay
from running_server import RunningServer, serving
from scripted_model import write_scripted_model

SCRIPTS = {
    "weather": ["Let me look.", "\n<tool", "_call>", '\n{"name": "get_', 'weather", "argu', 'ments": {"city": "Par',
                'is"}}', "\n</tool_call>"],
    "cities": ["<tool_call>", '{"name": "get_weather", "arguments": {"city": "Oslo"}}', "</tool_call>\n<tool_call>",
               '{"name": "get_weather", "arguments": {"city": "Rome"}}', "\n\n</tool_call>"],
    "patch": ["<tool_call> ", '{"name": "edit__patch", "arguments": {"input": "* ', 'Begin\\n+new"}}', "</tool_call> "],
    "ponder": ["<think>", "Hm, ", "let me see.", "</think>", "I think so."],
    "capital": ["The capital", " of France", " is", " Paris."],
    "Italy": ["It", " is Rome."],
    "result": ["It is ", "18 degrees", " in Paris."],
    "other": ["Hello", ", world", ". The end", "."* 3],
}  # fmt: skip
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ASK = "What is the weather in Paris?"
MODEL = "scripted"
FUNCTION: Any = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
TOOL: Any = {"name": "get_weather", "description": "The weather of a city.", "input_schema": WEATHER}
GREEDY = {"temperature": 0}
NOT_COMPARED = ("id", "call_id", "parsed", "parsed_arguments", "parsed_output", "stop_details")
ROOT = Path(__file__).resolve().parents[2]
LITELLM_PYTHON = Path(sys.prefix) / "litellm" / "bin" / "python"
QUESTION, NEXT_QUESTION = "What is the capital of France?", "And of Italy?"
CAPITAL = "The capital of France is Paris."
PROMPT = "Go on: <|capital|>"  # the token with which the script begins
FORECAST = {
    "name": "forecast",
    "description": "Returns the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
PATCH: Any = {"type": "namespace", "name": "edit", "description": "", "tools": [{"type": "custom", "name": "patch"}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("agents")
    with serving(folder, write_scripted_model(folder / MODEL, SCRIPTS), "--device", "cpu") as server:
        yield server
        assert "Warning" not in server.log() and "Traceback" not in server.log()


@pytest.fixture(scope="module")
def openai_client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: RunningServer) -> Iterator[Any]:
    """Yields an `anthropic.Anthropic`. Like LangChain, this package is imported late, because that takes seconds."""
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def error_of_anthropic(name: str) -> type[Exception]:
    import anthropic

    error: type[Exception] = getattr(anthropic, name)
    return error


def respond(client: openai.OpenAI, asked: Any = ASK, **fields: Any) -> Any:
    return client.responses.create(model=MODEL, input=asked, **fields)


def message(client: Any, asked: Any = ASK, **fields: Any) -> Any:
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    return client.messages.create(**{"model": MODEL, "max_tokens": 100, "messages": messages, **fields})


def streamed_message(client: Any, asked: str, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": asked}]
    with client.messages.stream(model=MODEL, max_tokens=100, messages=messages, **fields) as stream:
        return stream.get_final_message()


def without_ids(value: Any) -> Any:
    """Returns JSON without ids, which differ from request to request, and without what clients add to a stream."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if isinstance(value, dict):
        return {name: without_ids(item) for name, item in value.items() if name not in NOT_COMPARED}
    return value


def test_a_response_is_the_same_whole_and_streamed(openai_client: openai.OpenAI) -> None:
    whole = respond(openai_client, "Hi", instructions="Be kind.", temperature=0, metadata={"a": "b"}, store=True)
    assert (whole.output_text, whole.status, whole.model) == ("Hello, world. The end...", "completed", MODEL)
    assert (whole.instructions, whole.metadata, whole.store) == ("Be kind.", {"a": "b"}, False)
    assert whole.usage.output_tokens == 5 and whole.usage.total_tokens == whole.usage.input_tokens + 5
    with openai_client.responses.stream(model=MODEL, input="Hi", instructions="Be kind.", temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert without_ids(final.to_dict()["output"]) == without_ids(whole.to_dict()["output"])
    assert final.usage == whole.usage


def test_tools_that_codex_declares_are_ignored_by_name_and_refused_if_they_are_demanded(
    openai_client: openai.OpenAI,
) -> None:
    hosted: list[Any] = [{"type": "web_search", "external_web_access": True}, {"type": "local_shell"}]
    create = openai_client.responses.with_raw_response.create
    raw = create(model=MODEL, input=ASK, tools=[FUNCTION, *hosted], stream=True, **GREEDY)
    assert raw.headers["x-hotset-ignored-tools"] == "local_shell, web_search"
    events: list[Any] = list(raw.parse())
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == '{"city": "Paris"}' and len(deltas) == 3, "arguments are sent while they are written"
    assert "x-hotset-ignored-tools" not in create(model=MODEL, input=ASK, tools=[FUNCTION], **GREEDY).headers
    with pytest.raises(openai.BadRequestError, match="web_search, which this server does not have"):
        create(model=MODEL, input=ASK, tools=[FUNCTION, *hosted], tool_choice={"type": "web_search"})


def test_an_agent_of_responses_calls_a_tool_and_answers_with_its_result(openai_client: openai.OpenAI) -> None:
    first = respond(openai_client, tools=[FUNCTION])
    call = first.output[-1]
    assert (first.output_text.strip(), call.type, call.name) == ("Let me look.", "function_call", "get_weather")
    assert json.loads(call.arguments) == {"city": "Paris"}
    *_, last = events = list(respond(openai_client, tools=[FUNCTION], stream=True))
    assert without_ids(last.response.to_dict()["output"]) == without_ids(first.to_dict()["output"])
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    items = [{"role": "user", "content": ASK}, *first.output, result]
    second = respond(openai_client, items, tools=[FUNCTION])
    assert second.output_text == "It is 18 degrees in Paris."
    assert second.usage.input_tokens_details.cached_tokens > 0, "the turn before is in the prefix cache"


def test_parallel_calls_and_custom_tools_are_items_of_their_own(openai_client: openai.OpenAI) -> None:
    both = respond(openai_client, "Which cities?", tools=[FUNCTION]).output
    assert [json.loads(call.arguments)["city"] for call in both if call.type == "function_call"] == ["Oslo", "Rome"]
    assert len({call.call_id for call in both if call.type == "function_call"}) == 2
    (call,) = [item for item in respond(openai_client, "Please patch", tools=[PATCH]).output if item.type != "message"]
    assert (call.type, call.namespace, call.name) == ("custom_tool_call", "edit", "patch")
    assert call.input == "* Begin\n+new"
    events = list(respond(openai_client, "Please patch", tools=[PATCH], stream=True))
    assert [event.input for event in events if event.type == "response.custom_tool_call_input.done"] == [call.input]


class Verdict(pydantic.BaseModel):
    """A schema with short answers: the scripted model needs many tokens for longer ones."""

    model_config = pydantic.ConfigDict(extra="forbid")
    answer: Literal["yes", "no"]
    sure: bool


def test_answers_are_parsed_by_their_schema(openai_client: openai.OpenAI, claude: Any) -> None:
    parsed = openai_client.responses.parse(model=MODEL, input="Hi", text_format=Verdict, temperature=0)
    assert isinstance(parsed.output_parsed, Verdict)
    asked: Any = [{"role": "user", "content": "Hi"}]
    answer = claude.messages.parse(
        model=MODEL, max_tokens=200, messages=asked, output_format=Verdict, extra_body=GREEDY
    )
    assert isinstance(answer.parsed_output, Verdict)
    with pytest.raises(openai.BadRequestError) as refused:
        respond(openai_client, text={"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}})
    assert refused.value.code == "invalid_structure"
    with pytest.raises(error_of_anthropic("BadRequestError"), match="schema"):
        message(claude, output_config={"format": {"type": "json_schema", "schema": {"type": "nothing"}}})


def test_a_required_call_follows_its_schema(openai_client: openai.OpenAI, claude: Any) -> None:
    schema = Verdict.model_json_schema()
    function: Any = {"type": "function", "name": "judge", "parameters": schema, "strict": True}
    named = {"type": "function", "name": "judge"}
    called = respond(openai_client, "Hi", tools=[FUNCTION, function], tool_choice=named, temperature=0)
    (call,) = called.output
    assert call.name == "judge" and Verdict.model_validate_json(call.arguments)
    tool: Any = {"name": "judge", "input_schema": schema}
    chosen = {"type": "tool", "name": "judge"}
    forced = message(claude, "Hi", tools=[TOOL, tool], tool_choice=chosen, extra_body=GREEDY)
    (use,) = forced.content
    assert (use.name, forced.stop_reason) == ("judge", "tool_use") and Verdict.model_validate(use.input)
    assert {block.type for block in message(claude, tools=[TOOL], tool_choice={"type": "none"}).content} == {"text"}


def test_reasoning_is_an_item_and_can_be_sent_back(openai_client: openai.OpenAI) -> None:
    first = respond(openai_client, "Please ponder", reasoning={"effort": "low"})
    reasoning, text = first.output
    assert (reasoning.content[0].text, text.content[0].text) == ("Hm, let me see.", "I think so.")
    events = list(respond(openai_client, "Please ponder", stream=True))
    assert "".join(each.delta for each in events if each.type == "response.reasoning_text.delta") == "Hm, let me see."
    again = respond(
        openai_client, [{"role": "user", "content": "Please ponder"}, *first.output, {"role": "user", "content": "Hi"}]
    )
    assert again.output_text == "Hello, world. The end..."


def test_unsupported_and_oversized_fields_of_a_response_are_refused_by_name(openai_client: openai.OpenAI) -> None:
    for asked, fields, param in ((ASK, {"background": True}, "background"), ("a" * 140_000, {}, "input")):
        with pytest.raises(openai.BadRequestError) as refused:
            respond(openai_client, asked, **fields)
        assert refused.value.param == param


def test_a_message_is_the_same_whole_and_streamed(claude: Any) -> None:
    whole = message(claude, "Hi", system="Be kind.", metadata={"user_id": "me"})
    assert ([block.text for block in whole.content], whole.stop_reason) == (["Hello, world. The end..."], "end_turn")
    final = streamed_message(claude, "Hi", system="Be kind.", metadata={"user_id": "me"})
    assert without_ids(final.to_dict()) == without_ids(whole.to_dict())
    count = claude.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "Hi"}], system="Be kind.")
    assert count.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert whole._request_id


def test_an_agent_of_messages_calls_a_tool_and_answers_with_its_result(claude: Any) -> None:
    first = message(claude, tools=[TOOL])
    text, call = first.content
    assert (text.text.strip(), first.stop_reason) == ("Let me look.", "tool_use")
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    final = streamed_message(claude, ASK, tools=[TOOL])
    assert without_ids(final.to_dict()["content"]) == without_ids(first.to_dict()["content"])
    assert final.stop_reason == "tool_use"
    result = [{"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"}]
    turns = [
        {"role": "user", "content": ASK},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": result},
    ]
    second = message(claude, turns, tools=[TOOL])
    assert (second.content[0].text, second.stop_reason) == ("It is 18 degrees in Paris.", "end_turn")
    assert second.usage.cache_read_input_tokens > 0, "the turn before is in the prefix cache"


def test_the_anthropic_tool_runner_runs_the_tool(claude: Any) -> None:
    from anthropic import beta_tool

    asked = []

    @beta_tool
    def get_weather(city: str) -> str:
        """Returns the weather of a city.

        Args:
            city: The city.
        """
        asked.append(city)
        return "18 degrees"

    runner = claude.beta.messages.tool_runner(
        model=MODEL, max_tokens=100, tools=[get_weather], messages=[{"role": "user", "content": ASK}]
    )
    *_, last = runner
    assert asked == ["Paris"] and last.content[0].text == "It is 18 degrees in Paris."


def test_thoughts_are_blocks_if_they_are_asked_for(claude: Any) -> None:
    budget: Any = {"type": "enabled", "budget_tokens": 1024}
    thought, text = message(claude, "Please ponder", thinking=budget).content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "Hm, let me see.", "I think so.")
    final = streamed_message(claude, "Please ponder", thinking=budget)
    assert final.content[0].thinking == "Hm, let me see."
    (only,) = message(claude, "Please ponder").content
    assert only.text == "I think so."


def test_a_message_says_why_it_ended(claude: Any) -> None:
    stopped = message(claude, "Hi", stop_sequences=["The", "x"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "The")
    assert stopped.content[0].text == "Hello, world. "
    assert message(claude, "Hi", max_tokens=2).stop_reason == "max_tokens"
    assert message(claude, "Hi", max_tokens=1 << 20).stop_reason == "end_turn", "the context limits the answer, too"


def test_a_billing_line_that_differs_in_every_request_does_not_prevent_reuse_of_the_prefix(claude: Any) -> None:
    kind = {"type": "text", "text": "Be kind. " * 40}
    for hashed in ("abcde", "fghij"):
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={hashed};"}
        answer = message(claude, "Hi", system=[billing, kind])
    assert answer.usage.cache_read_input_tokens >= 256
    asked: Any = [{"role": "user", "content": "Hi"}]
    count = claude.messages.count_tokens(model=MODEL, messages=asked, system=[billing, kind])
    assert count.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"max_tokens": 0}, "BadRequestError", "max_tokens"),
        ({"model": "claude"}, "NotFoundError", "model"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "BadRequestError", "tools[0].type"),
    ],
)
def test_errors_of_messages_have_the_shape_of_anthropic(
    claude: Any, fields: dict[str, Any], error: str, param: str
) -> None:
    with pytest.raises(error_of_anthropic(error)) as refused:
        message(claude, "Hi", **fields)
    body: Any = refused.value.body
    assert body["type"] == "error" and body["request_id"] == refused.value.request_id
    assert body["error"]["type"] in ("invalid_request_error", "not_found_error")
    assert body["error"]["details"]["param"] == param and param in body["error"]["message"]


def test_litellm_chats_streams_calls_a_tool_and_continues_a_prompt(server: RunningServer) -> None:
    assert LITELLM_PYTHON.exists(), f"{LITELLM_PYTHON} does not exist; run `make setup`"
    command = [LITELLM_PYTHON, ROOT / "tests" / "clients" / "litellm_session.py", server.url, MODEL]
    session = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert session.returncode == 0, f"{session.stderr}\nThe server's log:\n{server.log()}"
    answers = json.loads(session.stdout.splitlines()[-1])
    assert answers["first"] == CAPITAL, "the answer of the first turn"
    assert answers["second"] == answers["hosted_vllm"] == "It is Rome.", "the second turn replays the first answer"
    assert (answers["streamed"]["text"], answers["streamed"]["finish_reason"]) == (CAPITAL, "stop")
    assert 3 < answers["streamed"]["completion_tokens"] <= answers["streamed"]["chunks"]
    assert (answers["called"]["finish_reason"], answers["called"]["name"]) == ("tool_calls", "forecast")
    assert json.loads(answers["called"]["arguments"])["city"] in ("Paris", "Rome")
    assert answers["continued"] == {"whole": CAPITAL, "streamed": CAPITAL}


def test_langchain_chats_streams_and_calls_a_tool(server: RunningServer) -> None:
    options: Any = {"model": MODEL, "base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI, OpenAI

    model = ChatOpenAI(**options, temperature=0, max_tokens=200)
    first = model.invoke(QUESTION)
    assert first.text == CAPITAL
    assert model.invoke([HumanMessage(QUESTION), first, HumanMessage(NEXT_QUESTION)]).text == "It is Rome."
    streamed = reduce(add, model.stream(QUESTION, stream_usage=True))
    assert streamed.text == CAPITAL
    assert streamed.usage_metadata == first.usage_metadata and streamed.usage_metadata["output_tokens"] > 3
    assert [answer.text for answer in model.batch([QUESTION, "Hi"], max_tokens=1)] == ["The capital", "Hello"]
    called = model.bind_tools([FORECAST], tool_choice="any", parallel_tool_calls=False).invoke("Will it rain in Rome?")
    (call,) = called.tool_calls
    assert call["name"] == "forecast" and call["args"]["city"] in ("Paris", "Rome")
    assert called.invalid_tool_calls == [] and called.response_metadata["finish_reason"] == "tool_calls"
    texts = OpenAI(**options, temperature=0, max_tokens=8)
    assert texts.batch([PROMPT, "<|Italy|>"]) == [CAPITAL, "It is Rome."]
    assert "".join(texts.stream(PROMPT)) == CAPITAL


@pytest.mark.parametrize("tool", REPLAYS)
def test_the_requests_of_a_benchmark_tool_are_answered(server: RunningServer, tool: str) -> None:
    assert replay(server.url, MODEL, tool) == len(REPLAYS[tool]["requests"])


def test_the_document_names_the_versions_that_the_script_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    clients = importlib.import_module("client_runs").CLIENTS | importlib.import_module("agent_runs").AGENTS
    rows = [line.split(" | ") for line in (ROOT / "docs" / "clients.md").read_text().splitlines() if line[:2] == "| "]
    named = {(row[0].removeprefix("| "), row[1]) for row in rows}
    assert {(name, client.version) for name, client in clients.items()} <= named
