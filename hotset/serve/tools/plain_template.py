"""Describes tools to models whose chat templates do not know them, in messages that every template can render."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from hotset.models.chat_prompt import Message
from hotset.serve.tools.calls import ToolSpec

INSTRUCTIONS = """\
You can call these functions. Each line describes one of them as JSON:
{tools}

To call a function, write its name and its arguments as JSON between <tool_call> and </tool_call>:
<tool_call>
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
</tool_call>
The results follow in the next message, between <tool_response> and </tool_response>."""


def plain_messages(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Returns the conversation with the tools in its system message, calls in the texts of the assistant, and their
    results in messages of the user. Calls have the format of Qwen3."""
    plain: list[dict[str, Any]] = [dict(message) for message in messages]
    if tools:
        lines = "\n".join(json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools)
        described = INSTRUCTIONS.format(tools=lines)
        if plain and plain[0].get("role") in ("system", "developer"):
            plain[0]["content"] = f"{plain[0].get('content') or ''}\n\n{described}"
        else:
            plain.insert(0, {"role": "system", "content": described})
    return list(_without_calls(plain))


def _without_calls(messages: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    results: list[str] = []
    for message in messages:
        if message.get("role") == "tool":
            results.append(f"<tool_response>\n{message.get('content') or ''}\n</tool_response>")
            continue
        if results:
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        calls = message.pop("tool_calls", None) or ()
        texts = [message["content"]] if calls and message.get("content") else []
        if calls:
            message["content"] = "\n".join([*texts, *map(_written, calls)])
        yield message
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _written(call: Any) -> str:
    name, arguments = json.dumps(call["function"]["name"]), call["function"]["arguments"] or "{}"
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
