"""The table of fields that are not implemented: complete, and applied as it says."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from pydantic import BaseModel

from hotset.base.errors import UnsupportedField
from hotset.serve.fields import IGNORED, LIST, UNSUPPORTED, UNSUPPORTED_IN_MESSAGES, Unsupported, implemented_fields
from hotset.serve.messages_api.request import CountTokensRequest, MessagesRequest
from hotset.serve.protocol import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
)
from hotset.serve.responses_api.request import ResponsesRequest

DOCS = Path(__file__).resolve().parents[2] / "docs"
FORMS = ("CompletionCreateParamsNonStreaming", "CompletionCreateParamsStreaming")
# What the packages `openai` and `anthropic` send. They are imported when a test runs, because that takes seconds.
SENT = {
    ChatRequest: [f"openai.types.chat.completion_create_params:{name}" for name in FORMS],
    CompletionRequest: [f"openai.types.completion_create_params:{name}" for name in FORMS],
    ResponsesRequest: ["openai.types.responses.response_create_params:ResponseCreateParamsBase"],
    MessagesRequest: [
        "anthropic.types.message_create_params:MessageCreateParamsBase",
        "anthropic.types.beta.message_create_params:MessageCreateParamsBase",
    ],
    CountTokensRequest: ["anthropic.types:MessageCountTokensParams"],
}
STREAM_OPTIONS = "openai.types.chat.chat_completion_stream_options_param:ChatCompletionStreamOptionsParam"
DESCRIBED_IN_API = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, StreamOptions, ChatMessage)
OTHER = object()  # equal to no JSON value


@pytest.mark.parametrize(("body", "types"), SENT.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_every_field_of_a_client_is_implemented_or_in_the_table(body: type[BaseModel], types: Sequence[str]) -> None:
    headers = {"betas"}
    sent = {name for kind in types for name in resolve_name(kind).__annotations__} - headers
    assert "model" in sent and len(sent) > 4
    missing = sent - {*body.model_fields, *IGNORED, *UNSUPPORTED}
    assert not missing, f"the client sends {missing}: implement them, or add them to hotset/serve/fields.py"


def test_every_option_of_a_stream_is_implemented() -> None:
    assert set(resolve_name(STREAM_OPTIONS).__annotations__) <= set(StreamOptions.model_fields)


def test_a_field_is_in_one_part_of_the_table_only() -> None:
    assert not IGNORED.keys() & UNSUPPORTED.keys()
    everywhere = ChatRequest.model_fields.keys() & CompletionRequest.model_fields.keys()
    assert not everywhere & {*IGNORED, *UNSUPPORTED}, "an implemented field needs no entry"


@pytest.mark.parametrize("value", [None, "me", 3, [], {"a": 1}, False])
def test_hints_are_dropped_whatever_their_value(value: Any) -> None:
    assert implemented_fields({"prompt": "a", **dict.fromkeys(IGNORED, value)}, {"prompt"}) == {"prompt": "a"}


def test_neutral_values_are_dropped_and_others_are_refused_with_advice() -> None:
    for name, entry in UNSUPPORTED.items():
        for value in (None, *entry.values):
            assert implemented_fields({name: value}, ()) == {}
        with pytest.raises(UnsupportedField, match=re.escape(name)) as refused:
            implemented_fields({name: OTHER}, ())
        assert refused.value.param == name and entry.advice in str(refused.value)


def test_true_is_not_one_and_false_is_not_zero() -> None:
    for name, value in (("mirostat", False), ("best_of", True), ("echo", 0), ("do_sample", 1)):
        with pytest.raises(UnsupportedField, match=name):
            implemented_fields({name: value}, ())
    assert implemented_fields({"length_penalty": 1}, ()) == {}, "1 and 1.0 are the same number"


def test_null_means_not_sent_for_every_name() -> None:
    assert implemented_fields({"prompt": None, "tools": None, "unheard_of": None}, {"prompt"}) == {}


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("temprature", "temperature"),
        ("Temperature", "temperature"),
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("top-p", "top_p"),
        ("stop_words", "stop_token_ids"),
        ("presense_penalty", "presence_penalty"),
        ("response_fromat", "response_format"),
    ],
)
def test_a_misspelt_field_is_refused_with_the_nearest_one(misspelt: str, meant: str) -> None:
    with pytest.raises(UnsupportedField, match=re.escape(f"did you mean {meant}?")) as refused:
        ChatRequest.model_validate({"messages": [], misspelt: 1})
    assert refused.value.param == misspelt


@pytest.mark.parametrize("name", ["zzzz", "", "temperature" * 1000, "\ud800"], ids=lambda name: repr(name[:12]))
def test_a_name_unlike_every_field_is_refused_with_a_link_to_the_list(name: str) -> None:
    with pytest.raises(UnsupportedField, match=re.escape(LIST)):
        implemented_fields({name: 1}, ChatRequest.model_fields)


@pytest.mark.parametrize("name", UNSUPPORTED_IN_MESSAGES)
def test_keys_of_messages_that_would_change_the_answer_are_refused_unless_their_values_are_neutral(name: str) -> None:
    entry = UNSUPPORTED_IN_MESSAGES[name]
    for value in (None, *entry.values):
        ChatMessage.model_validate({"role": "assistant", "content": "a", name: value})
    with pytest.raises(ValueError, match=f"{name} is not supported.*{entry.advice}"):
        ChatMessage.model_validate({"role": "assistant", "content": "a", name: {"id": "x"}})


def rows(fields: dict[str, str]) -> list[str]:
    """Returns the rows of a table in the document: the fields that have the same remaining columns share a row."""
    names: dict[str, list[str]] = {}
    for name, columns in fields.items():
        names.setdefault(columns, []).append(f"`{name}`")
    return [f"| {', '.join(names[columns])} | {columns} |" for columns in names]


def ignored_rows() -> list[str]:
    return rows(dict(IGNORED))


def unsupported_rows() -> list[str]:
    def columns(entry: Unsupported) -> str:
        values = ", ".join(f"`{json.dumps(value)}`" for value in entry.values)
        return f"{values or 'none'} | {entry.advice}"

    return rows({name: columns(entry) for name, entry in UNSUPPORTED.items()})


def test_the_document_has_the_rows_of_the_table() -> None:
    """If this fails, replace the rows in docs/api.md by the results of the two functions above."""
    document = (DOCS / "api.md").read_text()
    for heading, expected in (
        ("| field | why |\n|---|---|\n", ignored_rows()),
        ("| field | values | instead |\n|---|---|---|\n", unsupported_rows()),
    ):
        _, _, rest = document.partition(heading)
        assert rest.partition("\n\n")[0].splitlines() == expected


@pytest.mark.parametrize(
    ("body", "page"),
    [
        *((body, "api") for body in DESCRIBED_IN_API),
        (ResponsesRequest, "responses"),
        (MessagesRequest, "messages"),
    ],
)
def test_a_page_names_every_implemented_field(body: type[BaseModel], page: str) -> None:
    missing = set(body.model_fields) - set(re.findall(r"`(\w+)", (DOCS / f"{page}.md").read_text()))
    assert not missing, f"describe {missing} in docs/{page}.md"
