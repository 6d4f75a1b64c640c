"""POST /v1/responses."""

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hotset.models.chat_prompt import ChatOptions
from hotset.serve.agent_request import AgentTurn, answer
from hotset.serve.blocks import AnswerBlocks, Block, BlockChange
from hotset.serve.conversation import (
    AnswerReader,
    Conversation,
    Finished,
    collected,
    events_of,
    rename_error_fields,
    thinking_kwargs,
)
from hotset.serve.errors import error_body
from hotset.serve.generation import Deltas, GenerationJob
from hotset.serve.protocol import IGNORED_TOOLS_HEADER
from hotset.serve.responses import Usage
from hotset.serve.responses_api.answer import (
    CallEvent,
    CustomCallItem,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    ItemEvent,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    PartEvent,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    StreamEvent,
    TextEvent,
)
from hotset.serve.responses_api.request import ResponsesRequest, messages_of
from hotset.serve.responses_api.tools import DeclaredTool, custom_input, declared_tools, ignored_tools, tool_use
from hotset.serve.service import Service
from hotset.serve.streams import event_of, json_response

ID_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


# Names of fields in errors of code that endpoints share, and the names of these fields at this endpoint.
FIELD_NAMES = {"prompt": "input", "messages": "input"}


async def create_response(request: Request, service: Service, body: ResponsesRequest) -> Response:
    """Answers a request. Raises RequestError if it is refused, and the errors of `EngineClient.generate`."""
    with rename_error_fields(FIELD_NAMES):
        tools = declared_tools(body.tools or ())
        effort = None if body.reasoning is None else body.reasoning.effort
        kwargs = ({} if effort is None else thinking_kwargs(effort)) | (body.chat_template_kwargs or {})
        conversation = Conversation(
            tuple(messages_of(body)),
            ChatOptions(template_kwargs=kwargs),
            tool_use(tools, body.tool_choice or "auto", parallel=body.parallel_tool_calls is not False),
        )
        text_format = None if body.text is None else body.text.format
        turn = AgentTurn(
            id=f"resp_{uuid.uuid4().hex}",
            conversation=conversation,
            max_tokens=body.max_output_tokens,
            structure=None if text_format is None else text_format.structure(),
        )

        def new_responder(job: GenerationJob, reader: AnswerReader) -> ResponsesResponder:
            return ResponsesResponder(job, reader, tools, _unanswered(job, service, body))

        response = await answer(request, service, body, turn, new_responder)
    if ignored := ignored_tools(body.tools or ()):
        response.headers[IGNORED_TOOLS_HEADER] = ", ".join(ignored)
    return response


@dataclass(frozen=True)
class ResponsesResponder:
    """Formats the deltas of a job as a response object, or as the events of its stream."""

    job: GenerationJob
    reader: AnswerReader
    tools: dict[str, DeclaredTool]
    unanswered: ResponseObject
    blocks: AnswerBlocks = field(default_factory=AnswerBlocks)

    async def full(self, deltas: Deltas) -> Response:
        pieces, finished = await collected(events_of(deltas, self.job, self.reader))
        self.blocks.add(pieces)
        return json_response(self._answered(finished))

    async def events(self, deltas: Deltas) -> AsyncGenerator[bytes, None]:
        number = 0

        def numbered(event: StreamEvent) -> bytes:
            nonlocal number
            event.sequence_number, number = number, number + 1
            return event_of(event, event.type)

        yield numbered(ResponseEvent(type="response.created", response=self.unanswered))
        yield numbered(ResponseEvent(type="response.in_progress", response=self.unanswered))
        try:
            async for event in events_of(deltas, self.job, self.reader):
                if not isinstance(event, Finished):
                    for change in self.blocks.push([event]):
                        for shown in self._shown(change, "completed"):
                            yield numbered(shown)
                    continue
                for change in self.blocks.end():
                    for shown in self._shown(change, _last_status(event)):
                        yield numbered(shown)
                answered = self._answered(event)
                kind: Any = f"response.{answered.status}"
                yield numbered(ResponseEvent(type=kind, response=answered))
        except Exception as error:
            detail = error_body(error).error
            failure = ResponseError(code=detail.code or detail.type, message=detail.message)
            output = [self._item(block, "incomplete") for block in self.blocks.blocks]
            failed = self.unanswered.model_copy(update={"status": "failed", "error": failure, "output": output})
            yield numbered(ResponseEvent(type="response.failed", response=failed))

    def _answered(self, finished: Finished) -> ResponseObject:
        """Returns the whole response."""
        output = [self._item(block, "completed") for block in self.blocks.blocks]
        if output and self.blocks.blocks[-1].call is None:
            output[-1].status = _last_status(finished)
        incomplete = finished.reason == "length"
        return self.unanswered.model_copy(
            update={
                "status": "incomplete" if incomplete else "completed",
                "incomplete_details": IncompleteDetails(reason="max_output_tokens") if incomplete else None,
                "output": output,
                "usage": _usage(finished.usage),
            }
        )

    def _item_id(self, block: Block) -> str:
        return f"{ID_PREFIXES[block.kind]}_{self.job.request_id.removeprefix('resp_')}_{block.index}"

    def _item(self, block: Block, status: ItemStatus, *, is_new: bool = False) -> OutputItem:
        """Returns a block as an item of the output, without its text if it is new."""
        item_id, text = self._item_id(block), "" if is_new else block.text
        status = "incomplete" if block.is_broken else status
        if block.kind == "text":
            return MessageItem(id=item_id, status=status, content=[] if is_new else [OutputText(text=text)])
        if block.kind == "reasoning":
            return ReasoningItem(id=item_id, status=status, content=[] if is_new else [ReasoningText(text=text)])
        assert block.call is not None, "blocks of this kind have a call"
        shared: dict[str, Any] = {"id": item_id, "status": status, "call_id": block.call.id, "name": block.call.name}
        if (tool := self.tools.get(block.call.name)) is not None:
            shared |= {"name": tool.name, "namespace": tool.namespace}
        if self._is_custom(block):
            return CustomCallItem(**shared, input=custom_input(text))
        return FunctionCallItem(**shared, arguments=text)

    def _shown(self, change: BlockChange, status: ItemStatus) -> Iterator[StreamEvent]:
        """Yields the events that show a change. `status` is the status of a block that ends."""
        block, index = change.block, change.block.index
        where: dict[str, Any] = {"item_id": self._item_id(block), "output_index": index}
        if change.what == "grows":
            if block.call is None:
                yield TextEvent(type=_text_event(block, "delta"), delta=change.text, logprobs=_logprobs(block), **where)
            elif not self._is_custom(block):
                yield CallEvent(type="response.function_call_arguments.delta", delta=change.text, **where)
        elif change.what == "begins":
            item = self._item(block, "in_progress", is_new=True)
            yield ItemEvent(type="response.output_item.added", output_index=index, item=item)
            if block.call is None:
                part = OutputText(text="") if block.kind == "text" else ReasoningText(text="")
                yield PartEvent(type="response.content_part.added", part=part, **where)
        else:
            item = self._item(block, status)
            yield from _done_events(block, item, where)
            yield ItemEvent(type="response.output_item.done", output_index=index, item=item)

    def _is_custom(self, block: Block) -> bool:
        return block.call is not None and block.call.name in self.tools and self.tools[block.call.name].is_custom


def _done_events(block: Block, item: OutputItem, where: dict[str, Any]) -> Iterator[StreamEvent]:
    """Yields the events with the whole text of a block. The input of a custom tool is inside of JSON, so its only delta
    comes at the end."""
    if isinstance(item, FunctionCallItem):
        done: Any = "response.function_call_arguments.done"
        yield CallEvent(type=done, arguments=item.arguments, name=item.name, **where)
    elif isinstance(item, CustomCallItem):
        yield CallEvent(type="response.custom_tool_call_input.delta", delta=item.input, **where)
        yield CallEvent(type="response.custom_tool_call_input.done", input=item.input, **where)
    else:
        yield TextEvent(type=_text_event(block, "done"), text=block.text, logprobs=_logprobs(block), **where)
        yield PartEvent(type="response.content_part.done", part=item.content[0], **where)


def _text_event(block: Block, what: str) -> Any:
    return f"response.{'output' if block.kind == 'text' else 'reasoning'}_text.{what}"


def _logprobs(block: Block) -> list[Any] | None:
    return [] if block.kind == "text" else None


def _unanswered(job: GenerationJob, service: Service, body: ResponsesRequest) -> ResponseObject:
    """Returns the response before anything is generated, with the fields of the request."""
    sent = body.model_dump(by_alias=True, exclude_none=True, include={"tools", "tool_choice", "text", "reasoning"})
    return ResponseObject(
        id=job.request_id,
        created_at=int(time.time()),
        status="in_progress",
        model=service.model_name,
        output=[],
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        temperature=job.params.temperature,
        top_p=job.params.top_p,
        tools=sent.get("tools", []),
        tool_choice=sent.get("tool_choice", "auto"),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        text={"format": {"type": "text"}} | sent.get("text", {}),
        reasoning=sent.get("reasoning", {}),
        metadata=body.metadata or {},
    )


def _last_status(finished: Finished) -> ItemStatus:
    return "incomplete" if finished.reason == "length" else "completed"


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
    )
