"""The formats in which models write calls, and the choice of one for a model."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hotset.base.fork_server import JobFailed, Prepared
from hotset.base.job_pool import JobPool
from hotset.base.structure import Structure
from hotset.serve.tools.calls import ToolSpec, ToolUse, invalid_tool
from hotset.serve.tools.grammars import (
    DEEPSEEK_CALLS,
    GLM_CALLS,
    LLAMA3_CALLS,
    QWEN3_CALLS,
    QWEN_CODER_CALLS,
    GrammarOfCalls,
    calls_structure,
)
from hotset.serve.tools.json_calls import PYTHON_TAG, TOOL_CALL, read_llama_calls, read_qwen3_call
from hotset.serve.tools.markup_calls import DSML, ToolsByName, deepseek_reader, glm_reader, qwen_coder_reader
from hotset.serve.tools.parsing import CallParser, CallReader

WRITE_SECONDS = 2.0  # of CPU time, for the grammar of calls of a request
USES_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls. `sign` in a chat template shows that the template is written for this format."""

    name: str
    sign: str
    opener: str  # the marker with which calls begin
    reader_of: Callable[[ToolsByName], CallReader]
    write_calls: GrammarOfCalls
    at_start: bool = False  # calls may also begin the answer without the marker

    def parser(self, tools: Sequence[ToolSpec]) -> CallParser:
        """Returns a parser for one answer."""
        by_name = {tool.name: tool for tool in tools}
        return CallParser(self.opener, self.reader_of(by_name), by_name, at_start=self.at_start)

    def structure(self, use: ToolUse, special_ids: Mapping[str, int]) -> Structure:
        """Returns the structure of an answer that must be a call. Its arguments follow the schema of the tool. With
        schemas of clients this can take very long, so servers call `structure_in_process` instead."""
        return calls_structure(self.write_calls, use, special_ids)


DEEPSEEK_V32 = ToolFormat("deepseek_v32", DSML, f"<{DSML}function_calls>", deepseek_reader, DEEPSEEK_CALLS)
QWEN3 = ToolFormat("qwen3", TOOL_CALL, TOOL_CALL, lambda tools: read_qwen3_call, QWEN3_CALLS)
# Templates are searched for the signs in this order, because a template can also contain the sign of a later format.
FORMATS = (
    DEEPSEEK_V32,
    ToolFormat("glm", "<arg_key>", TOOL_CALL, glm_reader, GLM_CALLS),
    ToolFormat("qwen3_coder", "<function=", TOOL_CALL, qwen_coder_reader, QWEN_CODER_CALLS),
    QWEN3,
    ToolFormat("llama3", '"parameters"', PYTHON_TAG, lambda tools: read_llama_calls, LLAMA3_CALLS, at_start=True),
)
DEFAULT = QWEN3  # for templates without the sign of a format


def structure_in_process(
    jobs: JobPool, tool_format: ToolFormat, use: ToolUse, special_ids: Mapping[str, int]
) -> Structure:
    """Runs `ToolFormat.structure` in a process with limits. Raises RequestError if a limit is exceeded."""
    tools = [asdict(tool) for tool in use.callable]
    arguments = {"name": tool_format.name, "tools": tools, "parallel": use.parallel, "special_ids": dict(special_ids)}
    try:
        return Structure("grammar", jobs.run("hotset.serve.tools.formats:write_calls", arguments, WRITE_SECONDS))
    except JobFailed as failure:
        raise invalid_tool(f"writing the grammar of calls of these tools {failure}; simplify their schemas") from None


def write_calls(
    prepared: Prepared, name: str, tools: Sequence[Mapping[str, Any]], parallel: bool, special_ids: Mapping[str, int]
) -> str:
    """Returns the grammar of calls. This is a job of a worker process."""
    tool_format = next(tool_format for tool_format in FORMATS if tool_format.name == name)
    use = ToolUse(tuple(ToolSpec(**tool) for tool in tools), "required", parallel)
    return tool_format.structure(use, special_ids).value


def format_for(chat_template: str | None, setting: str) -> ToolFormat | None:
    """Returns the format of a model, or None. `setting` is the name of a format, "none", or "auto". With "auto", the
    chat template decides: the model's own or, if it has none, the built-in one for its architecture."""
    if setting == "none":
        return None
    if setting != "auto":
        return next(tool_format for tool_format in FORMATS if tool_format.name == setting)
    matching = (tool_format for tool_format in FORMATS if tool_format.sign in (chat_template or ""))
    return next(matching, DEFAULT)


def takes_tools(chat_template: str) -> bool:
    """Returns whether a chat template describes tools to the model."""
    return USES_TOOLS.search(chat_template) is not None
