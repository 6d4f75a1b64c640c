"""Chat templates: Jinja programs that come with a model and turn messages into its prompt format.

Templates run as in the `transformers` library (block trimming, loop controls, `raise_exception`, `strftime_now`, a
plain `tojson`, the `generation` tag), and in a sandbox, because they are untrusted. The sandbox limits neither time nor
memory, so this module runs in worker processes (`chat_prompt.ChatFormat`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hotset.base.errors import RequestError
from hotset.base.fork_server import JobFailed

MAX_RENDERED_CHARACTERS = 8 << 20
MAX_REASON_CHARACTERS = 1000


class ChatTemplate:
    """A compiled template with the special tokens that it may use. Raises RequestError if it does not compile."""

    def __init__(self, template: str, special_tokens: Mapping[str, str]) -> None:
        extensions: list[str | type[Extension]] = ["jinja2.ext.loopcontrols", _GenerationTag]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        with _refusals():
            self._template = environment.from_string(template)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Renders a prompt. Raises the exceptions of the template, and JobFailed if the prompt is too long."""
        pieces: list[str] = []
        length = 0
        for piece in self._template.generate({**variables, **self._special_tokens, "messages": messages}):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_RENDERED_CHARACTERS:
                raise JobFailed(f"makes more than {MAX_RENDERED_CHARACTERS} characters")
        return "".join(pieces)


def render(prepared: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """Renders a prompt with the prepared template: a job of a worker process.

    Raises RequestError with the reason of the template. The template is untrusted and runs on a user's values, so all
    its errors are errors of the request.
    """
    template: ChatTemplate = prepared["template"]
    with _refusals():
        return template.render(messages, variables)


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (MemoryError, JobFailed):
        raise
    except Exception as error:
        reason = error.message if isinstance(error, TemplateError) and error.message else str(error)
        raise RequestError(reason[:MAX_REASON_CHARACTERS]) from error


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
