"""Real clients get the expected answers from a server of the embedded model: `openai`, LiteLLM and LangChain.

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
from typing import Any

import openai
import pytest
from clients.replay import REPLAYS, replay
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI, OpenAI
from running_server import RunningServer, serving

EMBEDDED = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"
NEXT_QUESTION = "And of Italy?"
PROMPT = "The capital of France is"
FORECAST: dict[str, Any] = {
    "name": "forecast",
    "description": "Returns the weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
}
TOOLS: list[Any] = [{"type": "function", "function": FORECAST}, {"type": "function", "function": {"name": "now"}}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
DEADLINE = 240.0

ROOT = Path(__file__).resolve().parents[2]
SESSION = ROOT / "tests" / "clients" / "litellm_session.py"
LITELLM_PYTHON = Path(sys.prefix) / "litellm" / "bin" / "python"


@pytest.fixture(scope="module")
def litellm_process() -> Iterator[subprocess.Popen[str]]:
    """LiteLLM in its own environment. It imports its packages while the server starts."""
    assert LITELLM_PYTHON.exists(), f"{LITELLM_PYTHON} does not exist; run `make setup`"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([LITELLM_PYTHON, SESSION], text=True, **pipes) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, litellm_process: subprocess.Popen[str]) -> Iterator[RunningServer]:
    with serving(tmp_path_factory.mktemp("embedded"), "embedded") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE) as client:
        yield client


@pytest.fixture(scope="module")
def litellm_output(server: RunningServer, litellm_process: subprocess.Popen[str]) -> str:
    """What the session with LiteLLM printed, or why it failed."""
    output, errors = litellm_process.communicate(f"{server.url} {EMBEDDED}\n", timeout=DEADLINE)
    return output if litellm_process.returncode == 0 else f"{errors}\nThe server's log:\n{server.log()}"


def answers_in(litellm_output: str) -> dict[str, Any]:
    last_line = litellm_output.splitlines()[-1]
    assert last_line.startswith("{"), litellm_output
    answers: dict[str, Any] = json.loads(last_line)
    return answers


@pytest.fixture(scope="module")
def first_answer(client: openai.OpenAI) -> Any:
    return ask(client)


@pytest.fixture(scope="module")
def chat_model(server: RunningServer) -> ChatOpenAI:
    return ChatOpenAI(model=EMBEDDED, base_url=f"{server.url}/v1", api_key="none", max_retries=0, **GREEDY)


@pytest.fixture(scope="module")
def first_message(chat_model: ChatOpenAI) -> AIMessage:
    return chat_model.invoke(QUESTION)


def ask(client: openai.OpenAI, **options: Any) -> Any:
    messages = [{"role": "user", "content": QUESTION}]
    return client.chat.completions.create(**{"model": EMBEDDED, "messages": messages, **GREEDY, **options})


def test_openai_is_told_the_capital_of_france(first_answer: Any) -> None:
    assert "Paris" in first_answer.choices[0].message.content
    assert first_answer.choices[0].message.role == "assistant"
    assert first_answer.choices[0].finish_reason == "stop"
    assert first_answer.id.startswith("chatcmpl-") and first_answer.object == "chat.completion"
    assert first_answer.model == EMBEDDED


def test_openai_gets_the_same_text_streamed_as_in_one_response(client: openai.OpenAI, first_answer: Any) -> None:
    chunks = list(ask(client, stream=True))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == first_answer.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks), "usage was not requested"


def test_openai_replays_the_first_answer_in_the_second_turn(client: openai.OpenAI, first_answer: Any) -> None:
    first = first_answer.choices[0].message
    messages = [{"role": "user", "content": QUESTION}, first, {"role": "user", "content": NEXT_QUESTION}]
    assert "Rome" in ask(client, messages=messages).choices[0].message.content


def test_openai_must_call_a_tool_and_sends_back_its_result(client: openai.OpenAI) -> None:
    question = {"role": "user", "content": "Will it rain in Rome?"}
    named = {"type": "function", "function": {"name": "forecast"}}
    options: dict[str, Any] = {"messages": [question], "tools": TOOLS, "tool_choice": named, "max_tokens": 64}
    choice = ask(client, **options, parallel_tool_calls=False).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "forecast"
    assert json.loads(call.function.arguments).get("city") in ("Paris", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    answered = ask(client, messages=[question, choice.message, result], tools=TOOLS, tool_choice="none").choices[0]
    assert answered.message.content and answered.message.tool_calls is None


def test_a_required_tool_whose_schema_cannot_be_compiled_is_refused(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "pattern": "("}}}
    tools = [{"type": "function", "function": {"name": "forecast", "parameters": schema}}]
    with pytest.raises(openai.BadRequestError, match="cannot be compiled") as refused:
        ask(client, tools=tools, tool_choice="required")
    body: Any = refused.value.body
    assert body["param"] == "tools"


def test_openai_gets_required_calls_streamed(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 256, "stream": True}
    chunks = list(ask(client, **options, temperature=1, seed=1, parallel_tool_calls=False))
    parts = [part for chunk in chunks for choice in chunk.choices for part in choice.delta.tool_calls or ()]
    assert parts[0].id is not None and parts[0].function.name in ("forecast", "now")
    json.loads("".join(part.function.arguments for part in parts))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_openai_lists_and_finds_the_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [EMBEDDED]
    assert client.models.retrieve(EMBEDDED).model_extra["max_model_len"] == 8192
    assert ask(client, model="embedded", max_tokens=1).model == EMBEDDED
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("some/other")


def test_litellm_replays_the_first_answer_in_the_second_turn(litellm_output: str) -> None:
    answers = answers_in(litellm_output)
    assert "Paris" in answers["first"]
    assert "Rome" in answers["second"]
    assert answers["hosted_vllm"] == answers["second"]


def test_litellm_gets_the_same_text_streamed_as_in_one_response(litellm_output: str) -> None:
    answers = answers_in(litellm_output)
    assert answers["streamed"]["text"] == answers["first"]
    assert answers["streamed"]["finish_reason"] == "stop"
    assert 3 < answers["streamed"]["completion_tokens"] <= answers["streamed"]["chunks"]


def test_litellm_must_call_a_tool(litellm_output: str) -> None:
    called = answers_in(litellm_output)["called"]
    assert called["finish_reason"] == "tool_calls" and called["name"] == "forecast"
    assert json.loads(called["arguments"])["city"] in ("Paris", "Rome")


def test_litellm_continues_a_prompt(litellm_output: str) -> None:
    continued = answers_in(litellm_output)["continued"]
    assert continued["whole"].startswith(" Paris")
    assert continued["streamed"] == continued["whole"]


def test_langchain_must_call_a_tool(chat_model: ChatOpenAI) -> None:
    bound = chat_model.bind_tools([FORECAST], tool_choice="any", parallel_tool_calls=False)
    message = bound.invoke("Will it rain in Rome?", max_tokens=64)
    (call,) = message.tool_calls
    assert call["name"] == "forecast" and call["args"]["city"] in ("Paris", "Rome")
    assert message.invalid_tool_calls == [] and message.response_metadata["finish_reason"] == "tool_calls"


def test_langchain_replays_the_first_answer_in_the_second_turn(
    chat_model: ChatOpenAI, first_message: AIMessage
) -> None:
    assert "Paris" in first_message.text
    second = chat_model.invoke([HumanMessage(QUESTION), first_message, HumanMessage(NEXT_QUESTION)])
    assert "Rome" in second.text


def test_langchain_gets_the_same_text_and_usage_streamed_as_in_one_response(
    chat_model: ChatOpenAI, first_message: AIMessage
) -> None:
    streamed = reduce(add, chat_model.stream(QUESTION, stream_usage=True))
    assert streamed.text == first_message.text
    assert streamed.usage_metadata == first_message.usage_metadata and streamed.usage_metadata["output_tokens"] > 3


def test_langchain_gets_the_answers_of_a_batch_in_order(chat_model: ChatOpenAI, first_message: AIMessage) -> None:
    answers = [answer.text for answer in chat_model.batch([QUESTION, "Hello"], max_tokens=2)]
    assert answers[0] and first_message.text.startswith(answers[0])
    assert answers[1].startswith("Hello")


def test_langchain_continues_prompts(server: RunningServer) -> None:
    greedy = GREEDY | {"max_tokens": 3}
    model = OpenAI(model=EMBEDDED, base_url=f"{server.url}/v1", api_key="none", max_retries=0, **greedy)
    texts = model.batch([PROMPT, "1, 2, 3, 4,"])
    assert texts[0].startswith(" Paris") and texts[1].startswith(" 5,")
    assert "".join(model.stream(PROMPT)) == texts[0]


@pytest.mark.parametrize("tool", REPLAYS)
def test_the_requests_of_a_benchmark_tool_are_answered(server: RunningServer, tool: str) -> None:
    assert replay(server.url, EMBEDDED, tool) == len(REPLAYS[tool]["requests"])


def test_the_document_names_the_versions_that_the_script_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    clients = importlib.import_module("client_runs").CLIENTS | importlib.import_module("agent_runs").AGENTS
    rows = [line.split(" | ") for line in (ROOT / "docs" / "clients.md").read_text().splitlines() if line[:2] == "| "]
    named = {(row[0].removeprefix("| "), row[1]) for row in rows}
    assert {(name, client.version) for name, client in clients.items()} <= named
