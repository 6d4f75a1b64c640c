"""Requests to /v1/responses and /v1/messages become the conversations that chat templates expect."""

from typing import Any

import pytest
from pydantic import ValidationError

from hotset.base.errors import RequestError, UnsupportedField
from hotset.base.structure import Structure
from hotset.serve.messages_api.request import MessagesRequest
from hotset.serve.responses_api.request import ResponsesRequest, messages_of
from hotset.serve.responses_api.tools import custom_input, declared_tools, tool_use
from hotset.serve.tools.calls import NamedTool

FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}, "description": "Looks."}
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}


def responses(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": "hi", **fields})


def messages(*given: dict[str, Any], **fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate({"max_tokens": 1, "messages": list(given), **fields})


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_items_of_one_turn_become_one_message_and_results_messages_of_their_own() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": '{"at": 1}', "id": "fc_1"}
    items = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "input_text", "text": text} for text in ("Look ", "twice.")]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        call,
        {**call, "call_id": "b", "namespace": "eyes"},
        {"type": "function_call_output", "call_id": "a", "output": "a cat"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "a dog"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "xyz"},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'say "hi"'},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
    ]  # fmt: skip
    assert messages_of(responses(input=items, instructions="Be kind.")) == [
        {"role": "system", "content": "Be kind."},
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": "Look twice."},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}},
                {"id": "b", "type": "function", "function": {"name": "eyes__look", "arguments": '{"at": 1}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "a cat"},
        {"role": "tool", "tool_call_id": "b", "content": "a dog"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "patch", "arguments": '{"input": "say \\"hi\\""}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "done"},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
    ]


def test_functions_custom_tools_and_namespaces_are_functions_for_the_model() -> None:
    custom = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "a: b"}}
    namespace = {"type": "namespace", "name": "eyes", "tools": [FUNCTION]}
    tools = declared_tools(responses(tools=[FUNCTION, custom, namespace, {"type": "web_search"}]).tools or ())
    assert list(tools) == ["look", "patch", "eyes__look"]
    assert tools["look"].spec.parameters == {"type": "object"} and tools["look"].spec.description == "Looks."
    assert tools["patch"].is_custom and "a: b" in (tools["patch"].spec.description or "")
    assert (tools["eyes__look"].name, tools["eyes__look"].namespace) == ("look", "eyes")
    assert custom_input('{"input": "a\\nb"}') == "a\nb"
    assert custom_input('{"input": 3}') == '{"input": 3}' and custom_input("half {") == "half {"


def test_a_response_repeats_tools_and_choices_as_they_were_sent() -> None:
    tools = [FUNCTION, {"type": "namespace", "name": "eyes", "tools": [FUNCTION]}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}
    sent = responses(tools=tools, tool_choice=choice).model_dump(exclude_none=True, include={"tools", "tool_choice"})
    assert sent == {"tools": tools, "tool_choice": choice}


@pytest.mark.parametrize(
    ("choice", "expected", "offered"),
    [
        ("none", "none", ["look", "hear"]),
        ("required", "required", ["look", "hear"]),
        ({"type": "function", "name": "hear"}, NamedTool("hear"), ["look", "hear"]),
        ({"type": "allowed_tools", "mode": "required", "tools": [FUNCTION]}, "required", ["look"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}, FUNCTION]}, "auto", ["look"]),
    ],
)
def test_tool_choices_of_responses(choice: Any, expected: Any, offered: list[str]) -> None:
    body = responses(tools=[FUNCTION, {**FUNCTION, "name": "hear"}], tool_choice=choice, parallel_tool_calls=False)
    use = tool_use(declared_tools(body.tools or ()), body.tool_choice, parallel=False)
    assert (use.choice, [tool.name for tool in use.tools], use.parallel) == (expected, offered, False)


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ([FUNCTION, FUNCTION], "auto"),
        ([FUNCTION], {"type": "function", "name": "hear"}),
        ([FUNCTION], {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "hear"}]}),
        ([], "required"),
        ([{"type": "web_search"}], "required"),
        ([FUNCTION, {"type": "web_search"}], {"type": "web_search"}),
        ([FUNCTION], {"type": "allowed_tools", "mode": "required", "tools": [{"type": "local_shell"}]}),
    ],
)
def test_tools_that_are_ambiguous_and_choices_of_unknown_tools_are_refused(tools: list[Any], choice: Any) -> None:
    body = responses(tools=tools, tool_choice=choice)
    with pytest.raises(RequestError, match="tool"):
        tool_use(declared_tools(body.tools or ()), body.tool_choice, parallel=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "file_search", "vector_store_ids": []}]},
        {"tools": [{"type": "function", "name": "a b"}]},
        {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "web_search"}]}]},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": []},
        {"text": {"format": {"type": "json_schema", "name": "a"}}},
        {"include": ["message.output_text.logprobs"]},
        {"tool_choice": {"type": "file_search"}},
        {"max_output_tokens": 0},
    ],
)
def test_unsupported_items_and_values_of_responses_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        responses(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("background", True),
        ("truncation", "auto"),
        ("prompt", {"id": "pmpt_1"}),
        ("top_logprobs", 3),
    ],
)
def test_fields_of_responses_that_need_a_store_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedField, match=field):
        responses(**{field: value})


def test_formats_become_structures() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    formats = [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "name": "a", "schema": schema}]
    found = [responses(text={"format": form}).text.format.structure() for form in formats]  # type: ignore[union-attr]
    expected = Structure("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
    assert found == [None, Structure("json_object"), expected]
    asked = messages(user("hi"), output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}})
    assert asked.structure() == expected
    assert messages(user("hi")).structure() is None


def test_blocks_of_messages_become_messages() -> None:
    marked = {"cache_control": {"type": "ephemeral"}}
    body = messages(
        user([{"type": "text", "text": "Look", **marked}, {"type": "text", "text": "now."}]),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "xyz"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "a", "name": "look", "input": {"at": "é"}},
                {"type": "tool_use", "id": "b", "name": "look", "input": {}},
            ],
        },
        user(
            [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "a cat"}]},
                {"type": "tool_result", "tool_use_id": "b", "is_error": True},
                {"type": "text", "text": "And?"},
            ]
        ),
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=abcde;"},
            {"type": "text", "text": "Be kind.", **marked},
            {"type": "text", "text": "Be short."},
        ],
        tools=[{**TOOL, **marked}],
    )
    conversation = body.conversation()
    assert list(conversation.messages) == [
        {"role": "system", "content": "Be kind.\n\nBe short."},
        {"role": "user", "content": "Look\n\nnow."},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}},
                {"id": "b", "type": "function", "function": {"name": "look", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "a cat"},
        {"role": "tool", "tool_call_id": "b", "content": ""},
        {"role": "user", "content": "And?"},
    ]
    assert [tool.name for tool in conversation.tool_use.tools] == ["look"]
    assert not conversation.options.continue_final_message


def test_a_last_message_of_the_assistant_is_continued() -> None:
    begun = messages(user("hi"), {"role": "assistant", "content": "The answer is"})
    assert begun.conversation().options.continue_final_message


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "look"}, NamedTool("look"), True),
    ],
)
def test_tool_choices_of_messages(choice: Any, expected: Any, parallel: bool) -> None:
    use = messages(user("hi"), tools=[TOOL], tool_choice=choice).conversation().tool_use
    assert (use.choice, use.parallel) == (expected, parallel)


def test_the_model_thinks_only_if_it_is_asked_to() -> None:
    def kwargs(**fields: Any) -> Any:
        return messages(user("hi"), **fields).conversation().options.template_kwargs

    assert kwargs()["enable_thinking"] is False
    assert kwargs(thinking={"type": "enabled", "budget_tokens": 2000})["enable_thinking"] is True
    assert kwargs(thinking={"type": "adaptive"}) == {}, "the template decides"
    assert kwargs(chat_template_kwargs={"enable_thinking": True})["enable_thinking"] is True
    assert messages(user("hi"), thinking={"type": "adaptive"}).shows_thinking
    assert not messages(user("hi"), thinking={"type": "adaptive", "display": "omitted"}).shows_thinking


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        ([{"type": "image", "source": {}}], {}),
        ([{"type": "tool_use", "id": "a", "name": "look", "input": {}}], {}),
        ([{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}], {}),
        ("hi", {"max_tokens": 0}),
        ("hi", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("hi", {"tools": [TOOL], "tool_choice": {"type": "tool"}}),
        ("hi", {"thinking": {"type": "between_tools"}}),
        ("hi", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
        ("hi", {"tools": [{**TOOL, "input_schema": {"a": float("nan")}}]}),
        ("hi", {"stop_sequences": [""]}),
    ],
)
def test_unsupported_blocks_and_values_of_messages_are_refused(content: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        messages(user(content), **fields)


def test_fields_that_agents_send_although_they_change_nothing_are_accepted() -> None:
    messages(
        user("hi"),
        metadata={"user_id": "user_1_session_2"},
        cache_control={"type": "ephemeral"},
        service_tier="auto",
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        speed="standard",
    )
    responses(
        store=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="a",
        background=False,
        previous_response_id=None,
        client_metadata={"a": "b"},
        text={"verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"},
        truncation="disabled",
        stream_options={"include_obfuscation": False},
    )
