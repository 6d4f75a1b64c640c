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
    QWEN_CODER_CALLS,
    GrammarOfCalls,
    calls_structure,
    llama3_calls,
    qwen3_calls,
)
from hotset.serve.tools.json_calls import PYTHON_TAG, read_llama_calls, read_qwen3_call
from hotset.serve.tools.markup_calls import DSML, Tools, deepseek_reader, glm_reader, qwen_coder_reader
from hotset.serve.tools.parsing import CallParser, CallReader, new_call_id

WRITE_SECONDS = 2.0  # of CPU time, for the grammar of calls of a request
ParserMaker = Callable[[Sequence[ToolSpec], Callable[[], str]], CallParser]
USES_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls. `sign` in a chat template shows that the template is written for this format."""

    name: str
    sign: str
    new_parser: ParserMaker
    write_calls: GrammarOfCalls

    def parser(self, tools: Sequence[ToolSpec], new_id: Callable[[], str] = new_call_id) -> CallParser:
        """Returns a parser for one answer."""
        return self.new_parser(tools, new_id)

    def structure(self, use: ToolUse, special_ids: Mapping[str, int]) -> Structure:
        """Returns the structure of an answer that must be a call. Its arguments follow the schema of the tool. Schemas
        of clients can take long, so servers call `structure_in_process`."""
        return calls_structure(self.write_calls, use, special_ids)


def _markup_parser(opener: str, reader_of: Callable[[Tools], CallReader]) -> ParserMaker:
    def new_parser(tools: Sequence[ToolSpec], new_id: Callable[[], str]) -> CallParser:
        by_name = {tool.name: tool for tool in tools}
        return CallParser(opener, reader_of(by_name), by_name, new_id)

    return new_parser


def _qwen3_parser(tools: Sequence[ToolSpec], new_id: Callable[[], str]) -> CallParser:
    return CallParser("<tool_call>", read_qwen3_call, [tool.name for tool in tools], new_id)


def _llama3_parser(tools: Sequence[ToolSpec], new_id: Callable[[], str]) -> CallParser:
    return CallParser(PYTHON_TAG, read_llama_calls, [tool.name for tool in tools], new_id, at_start=True)


DEEPSEEK_V32 = ToolFormat(
    "deepseek_v32", DSML, _markup_parser(f"<{DSML}function_calls>", deepseek_reader), DEEPSEEK_CALLS
)
QWEN3 = ToolFormat("qwen3", "<tool_call>", _qwen3_parser, qwen3_calls)
# In the order in which templates are searched for their signs: a sign can also be in templates of earlier formats.
FORMATS = (
    DEEPSEEK_V32,
    ToolFormat("glm", "<arg_key>", _markup_parser("<tool_call>", glm_reader), GLM_CALLS),
    ToolFormat("qwen3_coder", "<function=", _markup_parser("<tool_call>", qwen_coder_reader), QWEN_CODER_CALLS),
    QWEN3,
    ToolFormat("llama3", '"parameters"', _llama3_parser, llama3_calls),
)
DEFAULT = QWEN3  # of templates that do not show a format


def structure_in_process(
    jobs: JobPool, tool_format: ToolFormat, use: ToolUse, special_ids: Mapping[str, int]
) -> Structure:
    """Returns what `ToolFormat.structure` does, from a process with limits. Raises RequestError if it exceeds them."""
    tools = [asdict(tool) for tool in use.callable]
    arguments = {"name": tool_format.name, "tools": tools, "parallel": use.parallel, "special_ids": dict(special_ids)}
    try:
        return Structure("grammar", jobs.run("hotset.serve.tools.formats:write_calls", arguments, WRITE_SECONDS))
    except JobFailed as failure:
        raise invalid_tool(f"writing the grammar of calls of these tools {failure}; simplify their schemas") from None


def write_calls(
    prepared: Prepared, name: str, tools: Sequence[Mapping[str, Any]], parallel: bool, special_ids: Mapping[str, int]
) -> str:
    """Returns the grammar of calls: a job of a worker process."""
    tool_format = next(tool_format for tool_format in FORMATS if tool_format.name == name)
    use = ToolUse(tuple(ToolSpec(**tool) for tool in tools), "required", parallel)
    return tool_format.structure(use, special_ids).value


def format_for(chat_template: str | None, setting: str) -> ToolFormat | None:
    """Returns the format of a model. `setting` is the name of one, "none", or "auto": the chat template decides, which
    comes with the model or, for models without one, is the built-in one of its architecture."""
    if setting == "none":
        return None
    if setting != "auto":
        return next(tool_format for tool_format in FORMATS if tool_format.name == setting)
    shown = (tool_format for tool_format in FORMATS if tool_format.sign in (chat_template or ""))
    return next(shown, DEFAULT)


def takes_tools(chat_template: str) -> bool:
    """Returns whether a chat template describes tools to the model."""
    return USES_TOOLS.search(chat_template) is not None
