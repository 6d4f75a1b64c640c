"""The messages of a conversation: what clients send and send back, and what a chat template gets."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from hotset.serve.protocol import ChatMessage, Messages

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_a_template_gets_role_and_content_alone_unless_the_client_sent_more(role: str) -> None:
    message = ChatMessage.model_validate({"role": role, "content": "hello"})
    assert message.for_template() == {"role": role, "content": "hello"}


def test_a_template_gets_names_reasoning_tool_calls_and_their_results() -> None:
    sent: list[dict[str, Any]] = [
        {"role": "user", "content": "1 + 1?", "name": "ann"},
        {"role": "assistant", "content": None, "reasoning_content": "I add.", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "call_1"},
    ]
    assert [message.for_template() for message in TypeAdapter(Messages).validate_python(sent)] == sent


def test_keys_that_other_servers_put_into_messages_are_ignored() -> None:
    replayed = {
        "role": "assistant", "content": "Paris", "refusal": None, "audio": None, "function_call": None,
        "annotations": [], "tool_calls": None, "provider_specific_fields": {"a": 1}, "thinking_blocks": None,
    }  # fmt: skip
    assert ChatMessage.model_validate(replayed).for_template() == {"role": "assistant", "content": "Paris"}
    part = {"type": "text", "text": "Paris", "cache_control": {"type": "ephemeral"}, "annotations": []}
    call = {**CALL, "index": 0, "provider": "x"}
    message = ChatMessage.model_validate({"role": "assistant", "content": [part], "tool_calls": [call]})
    assert message.for_template() == {"role": "assistant", "content": "Paris", "tool_calls": [CALL]}


def test_text_and_refusal_parts_are_joined() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "input_text", "text": "b"},
        {"type": "output_text", "text": "c"},
        {"type": "refusal", "refusal": "d"},
    ]
    assert ChatMessage.model_validate({"role": "assistant", "content": parts}).text == "abcd"
    assert ChatMessage.model_validate({"role": "assistant", "content": []}).text == ""


def test_an_assistant_without_content_said_nothing_or_refused() -> None:
    assert ChatMessage.model_validate({"role": "assistant"}).text == ""
    assert ChatMessage.model_validate({"role": "assistant", "content": None, "refusal": "no"}).text == "no"


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
@pytest.mark.parametrize("content", [{}, {"content": None}], ids=["missing", "null"])
def test_every_other_role_needs_content(role: str, content: dict[str, None]) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatMessage.model_validate({"role": role, **content})
    (finding,) = caught.value.errors()
    assert (finding["type"], finding["loc"]) == ("missing", ("content",))


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "file", "video_url"])
def test_parts_that_are_not_text_are_refused_by_their_type(kind: str) -> None:
    with pytest.raises(ValidationError, match=f"is '{kind}', but the model reads text only"):
        ChatMessage.model_validate({"role": "user", "content": [{"type": kind, kind: {"url": "x"}}]})


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "\ud800"},
        {"reasoning_content": "\ud800"},
        {"tool_calls": [{"function": {"name": "f", "arguments": "\ud800"}}]},
        {"tool_calls": [{"function": {"name": 3}}]},
        {"tool_calls": [{}]},
    ],
)
def test_members_that_a_template_would_get_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ChatMessage.model_validate({"role": "assistant", "content": "a", **wrong})
