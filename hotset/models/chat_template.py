"""Chat templates: Jinja programs that come with a model and turn messages into its prompt format.

Templates run as in the `transformers` library (block trimming, loop controls, `raise_exception`, `strftime_now`, a
plain `tojson`, the `generation` tag), and in a sandbox, because they are untrusted. The sandbox limits neither time nor
memory, so this module runs in a child process (`main`), which `template_process.TemplateRenderer` starts.
"""

import json
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hotset.base.units import show_bytes
from hotset.models.template_process import MAX_CHILD_BYTES, MAX_RENDERED_CHARACTERS, START_SECONDS, json_line

MAX_REASON_CHARACTERS = 1000


class ChatTemplate:
    """A compiled template with the special tokens that it may use. Raises the exceptions of Jinja."""

    def __init__(self, template: str, special_tokens: Mapping[str, str]) -> None:
        extensions: list[str | type[Extension]] = ["jinja2.ext.loopcontrols", _GenerationTag]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(template)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Renders a prompt. Raises the exceptions of the template, and OutputTooLong."""
        pieces: list[str] = []
        length = 0
        for piece in self._template.generate({**variables, **self._special_tokens, "messages": messages}):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_RENDERED_CHARACTERS:
                raise OutputTooLong
        return "".join(pieces)


class OutputTooLong(Exception):
    """A template has rendered more than MAX_RENDERED_CHARACTERS characters."""


def main(seconds: float) -> None:
    """Runs in the child process: reads the template, then messages, and answers each line, until the input ends.

    A rendering may take `seconds` of CPU time, so that a busy machine does not shorten it. Then the timer's signal,
    SIGPROF, ends this process.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MAX_CHILD_BYTES, MAX_CHILD_BYTES))
    _answer({})  # the imports are done
    template: ChatTemplate | None = None
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, START_SECONDS if template is None else seconds)
        request = json.loads(line)
        try:
            if template is None:
                template = ChatTemplate(request["template"], request["special_tokens"])
                answer: dict[str, str] = {}
            else:
                answer = {"text": template.render(request["messages"], request["variables"])}
        except MemoryError:
            answer = {"failed": f"needs more than {show_bytes(MAX_CHILD_BYTES)} of memory"}
        except OutputTooLong:
            answer = {"failed": f"makes more than {MAX_RENDERED_CHARACTERS} characters"}
        except Exception as error:
            # The template is untrusted and runs on a user's values, so all its errors are errors of the request.
            reason = error.message if isinstance(error, TemplateError) and error.message else str(error)
            answer = {"refused": reason[:MAX_REASON_CHARACTERS]}
        _answer(answer)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _answer(answer: Mapping[str, str]) -> None:
    sys.stdout.buffer.write(json_line(answer))
    sys.stdout.buffer.flush()


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
