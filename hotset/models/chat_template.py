"""Chat templates: Jinja programs that come with a model and turn messages into its prompt format.

Templates run as in the `transformers` library (block trimming, loop controls, `raise_exception`, `strftime_now`, a
plain `tojson`, the `generation` tag), and in a sandbox, because they are untrusted.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hotset.base.errors import CheckpointError, RequestError


class ChatTemplate:
    """A compiled template with the special tokens that it may use. Raises `CheckpointError` if it does not compile."""

    def __init__(self, template: str, special_tokens: Mapping[str, str], source: str) -> None:
        extensions: list[str | type[Extension]] = ["jinja2.ext.loopcontrols", _GenerationTag]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(template)
        except TemplateSyntaxError as error:
            raise CheckpointError(f"{source}: the chat template is broken: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """Renders the prompt. Raises `RequestError` if the template refuses the messages or fails on them."""
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:
            # The template is untrusted and runs on a user's values, so all its errors are errors of the request.
            reason = error.message if isinstance(error, TemplateError) and error.message else str(error)
            raise RequestError(f"the chat template refuses these messages: {reason}", param="messages") from error


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training. Here the tag renders its body unchanged."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a mutable set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Implements `tojson`. Unlike Jinja's own filter, it does not escape <, > and &, because prompts are not HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
