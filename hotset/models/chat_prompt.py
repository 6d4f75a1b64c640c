"""Turns a conversation into the prompt of the model's next message.

Templates come with models and are programs. One that never ends, or that fills the memory, must not stop the server, so
templates are rendered in processes that are killed if they take too long.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotset.base.errors import CheckpointError, ConfigError, RequestError
from hotset.base.fork_server import START_SECONDS, WAIT_FACTOR, JobFailed
from hotset.base.job_pool import JobPool
from hotset.base.units import MIB

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Variables of templates that `chat_template_kwargs` may not set.
REQUEST_FIELDS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
MAX_KWARGS_CHARACTERS = 16384  # of `chat_template_kwargs` as JSON
RENDER_SECONDS = 5.0  # of CPU time
# The process that compiles the template may have an address space of this size. That of a worker may grow by as much.
MAX_TEMPLATE_BYTES = 512 * MIB

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of one rendering. Raises `RequestError` if they contradict each other or are too large.

    By default, the prompt opens the model's next message. With `continue_final_message` it ends exactly with the text
    of the last message, which the model continues.
    """

    add_generation_prompt: bool | None = None  # None: True, unless the last message is continued
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # variables of the template, like enable_thinking
    tools: tuple[Mapping[str, Any], ...] = ()  # as in the API: {"type": "function", "function": {...}}

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "continue_final_message continues the last message, and add_generation_prompt opens a new one; "
                "set only one of them to true",
                param="continue_final_message",
                code="invalid_value",
            )
        check_template_kwargs(self.template_kwargs)

    @property
    def opens_message(self) -> bool:
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raises `RequestError` if variables of a template are reserved, too large or not JSON."""
    reserved = next((name for name in kwargs if name in REQUEST_FIELDS or name in SPECIAL_TOKEN_NAMES), None)
    if reserved is not None:
        owner = "is a field of the request" if reserved in REQUEST_FIELDS else "the model defines"
        problem = f"may not set {reserved!r}, which {owner}"
    else:
        try:
            characters = len(json.dumps(kwargs, ensure_ascii=False))
            if characters <= MAX_KWARGS_CHARACTERS:
                return
            problem = f"has {characters} characters, and the limit is {MAX_KWARGS_CHARACTERS}"
        except (TypeError, ValueError, RecursionError) as error:
            problem = f"must consist of JSON values: {error}"
    raise RequestError(f"chat_template_kwargs {problem}", param="chat_template_kwargs", code="invalid_value")


class ChatFormat:
    """The chat template of a model with its default variables. The workers of `jobs`, which also run other jobs, render
    it. `close` ends these workers."""

    def __init__(
        self,
        template: str,
        special_tokens: Mapping[str, str],
        source: str,
        defaults: Mapping[str, Any] | None = None,
        seconds: float = RENDER_SECONDS,
    ) -> None:
        """Raises `CheckpointError`, whose message names `source`, if the template does not compile within its limits,
        and `ConfigError` if `defaults` are not allowed. `seconds` is the limit for the CPU time of each rendering."""
        self.template = template
        self._defaults = dict(defaults or {})
        try:
            check_template_kwargs(self._defaults)
        except RequestError as error:
            raise ConfigError(f"--default-chat-template-kwargs: {error}") from error
        self._seconds = seconds
        self.jobs = JobPool(MAX_TEMPLATE_BYTES)
        try:
            self.jobs.prepare(
                "template",
                "hotset.models.chat_template:ChatTemplate",
                {"template": template, "special_tokens": dict(special_tokens)},
                cpu_seconds=START_SECONDS,
                memory_bytes=MAX_TEMPLATE_BYTES,
            )
        except (JobFailed, RequestError) as error:
            self.close()
            # The message of a JobFailed continues a sentence.
            problem = f"it {error}" if isinstance(error, JobFailed) else error
            raise CheckpointError(f"{source}: the chat template is broken: {problem}") from error

    def render(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """Returns the prompt. Waits while all workers have jobs.

        Raises `RequestError` if the template refuses the messages, fails on them, or exceeds its limits.
        """
        prepared = [self._prepared(message) for message in messages]
        variables = {
            **self._defaults,
            **options.template_kwargs,
            "tools": list(options.tools) or None,
            "documents": None,
            "add_generation_prompt": options.opens_message,
        }
        if not options.continue_final_message:
            return self._rendered(prepared, variables)
        text = prepared[-1].get("content") if prepared else None
        if not isinstance(text, str) or not text:
            message = "continue_final_message needs text in the last message"
            raise RequestError(message, param="messages", code="invalid_value")
        # A mark after the text shows where the template ends the text. As in the `transformers` library, the mark ends
        # with a space: if that space is gone, the template trims texts, and so must we.
        mark = f"[{secrets.token_hex(16)}] "
        prepared[-1]["content"] = text + mark
        before, found, after = self._rendered(prepared, variables).rpartition(mark.rstrip())
        if not found or not before.rstrip().endswith(text.strip()):
            message = (
                "continue_final_message is not possible: the chat template does not render the last message as it is"
            )
            raise RequestError(message, param="continue_final_message", code="invalid_value")
        return before if after.startswith(" ") else before.rstrip()

    def close(self) -> None:
        """Kills all workers. A rendering in progress fails. Idempotent."""
        self.jobs.close()

    def _rendered(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """Renders in a worker. `variables` are those of the template other than `messages` and the special tokens."""
        arguments = {"messages": messages, "variables": variables}
        try:
            wall_seconds = WAIT_FACTOR * self._seconds
            return str(self.jobs.run("hotset.models.chat_template:render", arguments, self._seconds, wall_seconds))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"messages must consist of JSON values: {error}", param="messages") from error
        except RequestError as refusal:
            raise RequestError(f"the chat template refuses these messages: {refusal}", param="messages") from refusal
        except JobFailed as failure:
            # The message of a JobFailed continues a sentence.
            message = f"the chat template {failure} on these messages; send a prompt instead, or repair the template"
            raise RequestError(message, param="messages", code="chat_template_failed") from failure

    def _prepared(self, message: Message) -> dict[str, Any]:
        """Returns the message in the form that templates expect: content is a text, the arguments of tool calls are
        objects and not JSON texts, and the role `developer` is `system` in templates that do not know it."""
        prepared = dict(message)
        if prepared.get("content") is None:
            prepared["content"] = ""  # many templates would render None as a word
        if prepared.get("role") == "developer" and "developer" not in self.template:
            prepared["role"] = "system"
        if isinstance(prepared.get("tool_calls"), list):
            prepared["tool_calls"] = [_with_parsed_arguments(call) for call in prepared["tool_calls"]]
        return prepared


def _with_parsed_arguments(call: Any) -> Any:
    """Returns a tool call whose `arguments` are parsed to an object. Arguments that are not JSON objects are kept."""
    try:
        function = call["function"]
        arguments = json.loads(function["arguments"] or "{}")
        return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
