"""The built-in message formats: expected prompts are written by hand, from the published descriptions."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from examples import examples
from harness import tiny_directory
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from hotset.base.config import EngineConfig
from hotset.base.errors import CheckpointError, ConfigError, RequestError
from hotset.engine.frontend import load_frontend
from hotset.models.answer_parser import PlainParser, ThinkParser
from hotset.models.chat_formats import built_in_template
from hotset.models.chat_prompt import MAX_KWARGS_CHARACTERS, ChatFormat, ChatOptions
from hotset.models.checkpoint.files import ModelFiles, find_model
from hotset.models.tokenizer import ChatSettings, Tokenizer, TokenizerParts

SPECIAL_TOKENS = {"bos_token": "<s>"}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def developer(text: str) -> dict[str, Any]:
    return {"role": "developer", "content": text}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, reasoning: str | None = None, *calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"call-{name}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for name, arguments in calls
        ]
    return message


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": "call-1"}


def with_parsed_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a copy of the messages in which the arguments of tool calls are objects."""
    parsed: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in parsed:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return parsed


CALLS = (("weather", {"city": "Genève", "days": 2, "units": ["C", "m/s"]}), ("now", {}))
DEEPSEEK_CALLS = (
    "\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Genève</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="units" string="false">["C", "m/s"]</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="now">\n'
    "\n"
    "</｜DSML｜invoke>\n"
    "</｜DSML｜function_calls>"
)
TOOL_TURN = [user("Weather?"), assistant(None, "Ask.", *CALLS), tool("rain"), tool("noon")]
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
THINKING = {"thinking": True}
DEEPSEEK = [
    ("one question", {}, [user("Hi")], "<｜User｜>Hi<｜Assistant｜></think>"),
    ("a question to think about", THINKING, [user("Hi")], "<｜User｜>Hi<｜Assistant｜><think>"),
    ("the same under its other name", {"enable_thinking": True}, [user("Hi")], "<｜User｜>Hi<｜Assistant｜><think>"),
    (
        "a system message and earlier turns",
        {},
        [system("Be brief."), user("Hi"), assistant("Hello."), user("Bye")],
        f"Be brief.<｜User｜>Hi<｜Assistant｜></think>Hello.{EOS}<｜User｜>Bye<｜Assistant｜></think>",
    ),
    (
        "earlier reasoning is dropped",
        THINKING,
        [user("Hi"), assistant("Hello.", "A greeting."), user("Bye")],
        f"<｜User｜>Hi<｜Assistant｜></think>Hello.{EOS}<｜User｜>Bye<｜Assistant｜><think>",
    ),
    (
        "results of tools",
        {},
        TOOL_TURN,
        f"<｜User｜>Weather?<｜Assistant｜></think>{DEEPSEEK_CALLS}{EOS}"
        "\n\n<function_results>\n<result>rain</result>\n<result>noon</result>\n</function_results>\n\n</think>",
    ),
    (
        "reasoning after the last question is kept",
        THINKING,
        [system("Be brief."), *TOOL_TURN],
        f"Be brief.<｜User｜>Weather?<｜Assistant｜><think>Ask.</think>{DEEPSEEK_CALLS}{EOS}"
        "\n\n<function_results>\n<result>rain</result>\n<result>noon</result>\n</function_results>\n\n<think>",
    ),
    (
        "a finished tool turn before the last question",
        THINKING,
        [*TOOL_TURN, assistant("It rains.", "Rain."), user("Thanks")],
        f"<｜User｜>Weather?<｜Assistant｜></think>{DEEPSEEK_CALLS}{EOS}"
        "\n\n<function_results>\n<result>rain</result>\n<result>noon</result>\n</function_results>\n\n</think>"
        f"It rains.{EOS}<｜User｜>Thanks<｜Assistant｜><think>",
    ),
    (
        "a developer's question",
        THINKING,
        [system("Search."), developer("Who?")],
        "Search.<｜User｜>\n\n# The user's message is: Who?<｜Assistant｜><think>",
    ),
    (
        "a developer's instruction",
        THINKING,
        [developer("Be brief."), user("Who?")],
        "Be brief.<｜User｜>Who?<｜Assistant｜><think>",
    ),
    ("a system message alone", {}, [system("Tell a joke.")], "Tell a joke.<｜Assistant｜></think>"),
    (
        "a second answer",
        {},
        [user("Hi"), assistant("Hello.")],
        f"<｜User｜>Hi<｜Assistant｜></think>Hello.{EOS}<｜Assistant｜></think>",
    ),
]
GLM_CALLS = (
    "<tool_call>weather<arg_key>city</arg_key><arg_value>Genève</arg_value><arg_key>days</arg_key>"
    '<arg_value>2</arg_value><arg_key>units</arg_key><arg_value>["C", "m/s"]</arg_value></tool_call>'
    "<tool_call>now</tool_call>"
)
OFF = {"enable_thinking": False}
GLM = [
    ("one question", {}, [user("Hi")], "<|user|>Hi<|assistant|><think>"),
    ("a question not to think about", OFF, [user("Hi")], "<|user|>Hi<|assistant|></think>"),
    (
        "a system message and earlier turns",
        {},
        [system("Be brief."), user("Hi"), assistant(" Hello.\n", "A greeting."), user("Bye")],
        "<|system|>Be brief.<|user|>Hi<|assistant|></think>Hello.<|user|>Bye<|assistant|><think>",
    ),
    (
        "earlier reasoning is kept on request",
        {"clear_thinking": False},
        [user("Hi"), assistant("Hello.", " A greeting. "), user("Bye")],
        "<|user|>Hi<|assistant|><think>A greeting.</think>Hello.<|user|>Bye<|assistant|><think>",
    ),
    (
        "reasoning within the content",
        {"clear_thinking": False},
        [user("Hi"), assistant("<think>\nA greeting.\n</think>\nHello."), user("Bye")],
        "<|user|>Hi<|assistant|><think>A greeting.</think>Hello.<|user|>Bye<|assistant|><think>",
    ),
    (
        "results of tools",
        {},
        TOOL_TURN,
        f"<|user|>Weather?<|assistant|><think>Ask.</think>{GLM_CALLS}"
        "<|observation|><tool_response>rain</tool_response><tool_response>noon</tool_response><|assistant|><think>",
    ),
    (
        "a developer's instruction",
        {},
        [developer("Be brief."), user("Who?")],
        "<|system|>Be brief.<|user|>Who?<|assistant|><think>",
    ),
]
GOLDEN = [
    pytest.param(architecture, kwargs, messages, start + expected, id=f"{architecture}: {name}")
    for architecture, start, cases in (("deepseek_v32", BOS, DEEPSEEK), ("glm_moe_dsa", "[gMASK]<sop>", GLM))
    for name, kwargs, messages, expected in cases
]


@pytest.fixture(scope="module")
def formats() -> Iterator[dict[str, ChatFormat]]:
    built_in = {
        name: ChatFormat(built_in_template(name) or "", SPECIAL_TOKENS, name)
        for name in ("deepseek_v32", "glm_moe_dsa")
    }
    yield built_in
    for chat_format in built_in.values():
        chat_format.close()


@pytest.mark.parametrize(("architecture", "kwargs", "messages", "expected"), GOLDEN)
def test_a_conversation_becomes_the_published_prompt_as_in_transformers(
    formats: dict[str, ChatFormat],
    architecture: str,
    kwargs: dict[str, Any],
    messages: list[dict[str, Any]],
    expected: str,
) -> None:
    chat_format = formats[architecture]
    assert chat_format.render(messages, ChatOptions(template_kwargs=kwargs)) == expected
    without = chat_format.render(messages, ChatOptions(add_generation_prompt=False, template_kwargs=kwargs))
    assert expected.startswith(without) and not without.endswith("think>")
    parsed = with_parsed_arguments(messages)
    for message in parsed:
        if architecture == "glm_moe_dsa" and message["role"] == "developer":
            message["role"] = "system"
    template = built_in_template(architecture)
    rendered, _ = render_jinja_template([parsed], chat_template=template, add_generation_prompt=True, **kwargs)
    assert rendered == [expected]


# Texts without markers. A text with markers makes the prompt ambiguous: nothing in a prompt tells who wrote a marker.
TEXTS = st.text(st.characters(exclude_characters="<", exclude_categories=("Cs",)), max_size=12)


def test_what_a_format_cannot_express_is_refused(formats: dict[str, ChatFormat]) -> None:
    for messages, reason in [
        ([user("Hi"), tool("rain")], "a tool message must follow an assistant message with tool_calls"),
        (
            [user("Hi"), {**assistant(None), "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}],
            "of the tool call f",
        ),
        ([{"role": "critic", "content": "Hi"}], "there is no role critic"),
    ]:
        with pytest.raises(RequestError, match=reason) as refusal:
            formats["deepseek_v32"].render(messages, ChatOptions())
        assert refusal.value.param == "messages"


def test_the_last_message_is_continued_where_its_text_ends(formats: dict[str, ChatFormat]) -> None:
    options = ChatOptions(continue_final_message=True)
    deepseek, glm = formats["deepseek_v32"], formats["glm_moe_dsa"]
    assert deepseek.render([user("Hi"), assistant("Hel ")], options) == f"{BOS}<｜User｜>Hi<｜Assistant｜></think>Hel "
    assert deepseek.render([user("Hi"), user("Hel")], options).endswith("<｜Assistant｜></think><｜User｜>Hel")
    thinking = ChatOptions(continue_final_message=True, template_kwargs=THINKING)
    assert deepseek.render([user("Hi"), assistant("Hel", "Greet.")], thinking).endswith("<think>Greet.</think>Hel")
    # The template trims the answer, so the prompt ends with the trimmed text.
    assert glm.render([user("Hi"), assistant("Hel ")], options) == "[gMASK]<sop><|user|>Hi<|assistant|></think>Hel"


CONTINUED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}{{ messages[0].content }}"
TRIMMED = CONTINUED.replace("m.content", "m.content.strip()")


@examples(20)
@given(text=TEXTS.filter(str.strip), trims=st.booleans())
def test_a_continued_prompt_equals_that_of_transformers(continued: list[ChatFormat], text: str, trims: bool) -> None:
    messages = [user("Hi"), assistant(text)]
    ours = continued[trims].render(messages, ChatOptions(continue_final_message=True))
    theirs, _ = render_jinja_template(
        [messages], chat_template=[CONTINUED, TRIMMED][trims], continue_final_message=True
    )
    assert [ours] == theirs
    assert trims or ours.endswith(f"<assistant>{text}")


@pytest.fixture(scope="module")
def continued() -> Iterator[list[ChatFormat]]:
    with closing(ChatFormat(CONTINUED, {}, "plain")) as plain, closing(ChatFormat(TRIMMED, {}, "trimmed")) as trimmed:
        yield [plain, trimmed]


def test_a_message_that_cannot_be_continued_is_refused(continued: list[ChatFormat]) -> None:
    with pytest.raises(RequestError, match="set only one of them to true"):
        ChatOptions(add_generation_prompt=True, continue_final_message=True)
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(RequestError, match="needs text in the last message"):
        continued[0].render([user("Hi"), assistant(None)], options)
    with closing(ChatFormat("{{ messages[-1].content | replace('Hi', 'Ho') }}", {}, "changed")) as changed:
        assert changed.render([user("Hey")], options) == "Hey"
        with pytest.raises(RequestError, match="does not render the last message as it is") as refusal:
            changed.render([user("Hi")], options)
        assert refusal.value.param == "continue_final_message"


def test_a_message_without_content_has_an_empty_text_in_a_template() -> None:
    with closing(ChatFormat("{% for m in messages %}[{{ m.content }}]{% endfor %}", {}, "empty")) as chat_format:
        assert chat_format.render([assistant(None), {"role": "assistant"}, user("Hi")], ChatOptions()) == "[][][Hi]"


def test_variables_of_a_template_come_from_the_request_then_from_the_server() -> None:
    template = "{{ bos_token }}{{ tone }}{{ add_generation_prompt }}{{ self is defined }}"
    with closing(ChatFormat(template, SPECIAL_TOKENS, "variables", {"tone": "calm"})) as variables:
        assert variables.render([user("Hi")], ChatOptions()) == "<s>calmTrueTrue"
        own = ChatOptions(template_kwargs={"tone": "loud", "self": 1}, add_generation_prompt=False)
        assert variables.render([user("Hi")], own) == "<s>loudFalseTrue"


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"messages": []}, "may not set 'messages', which is a field of the request"),
        ({"tools": []}, "may not set 'tools', which is a field of the request"),
        ({"bos_token": "<s>"}, "may not set 'bos_token', which the model defines"),
        ({"tone": "x" * MAX_KWARGS_CHARACTERS}, f"the limit is {MAX_KWARGS_CHARACTERS}"),
        ({"tone": object()}, "must consist of JSON values"),
    ],
)
def test_variables_that_a_request_may_not_set_are_refused(kwargs: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as refusal:
        ChatOptions(template_kwargs=kwargs)
    assert refusal.value.param == "chat_template_kwargs"
    with pytest.raises(ConfigError, match="--default-chat-template-kwargs: .*" + reason):
        ChatFormat("", {}, "the model", kwargs)


# A template of our own with the features of Jinja that the published templates of GLM-5 to 5.3 use: macros, namespaces,
# loop controls, ranges, tests for types, methods of strings and objects, members by number, the previous message, and
# `tojson` with its argument.


@pytest.fixture
def bare_model(tmp_path: Path) -> ModelFiles:
    """A model whose directory has a tokenizer, but no chat template."""
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    return ModelFiles(tmp_path, replace(find_model(tiny_directory(tmp_path)).spec, architecture="deepseek_v32"))


def rendered(files: ModelFiles, chat: ChatSettings | None = None) -> str:
    tokenizer = Tokenizer.load(files, None, chat)
    assert tokenizer is not None
    with closing(tokenizer):
        return tokenizer.render_chat([user("Hi")])


def test_a_chat_template_file_precedes_the_models_and_the_built_in_one(bare_model: ModelFiles, tmp_path: Path) -> None:
    assert rendered(bare_model) == f"{BOS}<｜User｜>Hi<｜Assistant｜></think>"
    glm = replace(bare_model, spec=replace(bare_model.spec, architecture="glm_moe_dsa"))
    assert rendered(glm) == "[gMASK]<sop><|user|>Hi<|assistant|><think>"
    assert rendered(glm, ChatSettings(template_kwargs=OFF)) == "[gMASK]<sop><|user|>Hi<|assistant|></think>"
    with pytest.raises(RequestError, match="has no chat template"):
        rendered(replace(bare_model, spec=replace(bare_model.spec, architecture="llama")))
    (tmp_path / "chat_template.jinja").write_text("own: {{ messages[0].content }}")
    assert rendered(bare_model) == "own: Hi"
    with pytest.raises(CheckpointError, match=r"missing\.jinja cannot be read"):
        rendered(bare_model, ChatSettings(template_file=str(tmp_path / "missing.jinja")))


def test_the_settings_of_the_command_line_reach_the_tokenizer(bare_model: ModelFiles, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("own: {{ messages[0].content }}")
    file = tmp_path / "mine.jinja"
    file.write_text("{{ tone }}: {{ messages[0].content }}")
    settings = {"chat_template": str(file), "default_chat_template_kwargs": '{"tone": "calm"}'}
    front = load_frontend(EngineConfig(model=str(tmp_path), reasoning_parser="think", **settings))
    assert front.tokenizer is not None
    with closing(front.tokenizer) as tokenizer:
        assert tokenizer.render_chat([user("Hi")]) == "calm: Hi"
        assert isinstance(tokenizer.answer_parser(in_reasoning=True), ThinkParser)
    for text in ("[1]", "thinking", "1"):
        with pytest.raises(ConfigError, match="--default-chat-template-kwargs must be a JSON object, got '"):
            EngineConfig(default_chat_template_kwargs=text)


@pytest.mark.parametrize(("choice", "kinds"), [("auto", (PlainParser, ThinkParser)), ("none", (PlainParser,) * 2)])
def test_answers_are_divided_if_the_tokenizer_has_both_markers(choice: Any, kinds: tuple[type, type]) -> None:
    for markers, kind in zip((["<think>"], ["<think>", "</think>"]), kinds, strict=True):
        backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
        backend.add_tokens(markers)
        parts = TokenizerParts(backend, {}, False, (), None, "test")
        tokenizer = Tokenizer(parts, ChatSettings(reasoning_parser=choice))
        assert type(tokenizer.answer_parser(in_reasoning=False)) is kind
