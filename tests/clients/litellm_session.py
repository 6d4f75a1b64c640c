"""Talks to a server through LiteLLM, and prints what it answered as one JSON object.

The tests run this file in an environment of its own, because LiteLLM needs an older `openai` than they do. Its
arguments are the URL of the server and the name of the model.
"""

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise the import downloads a list of prices

import litellm

litellm.telemetry = False

QUESTION = {"role": "user", "content": "What is the capital of France?"}
NEXT_QUESTION = {"role": "user", "content": "And of Italy?"}
PROMPT = "Go on: <|capital|>"  # the token with which a script of the model begins


def ask(model: str, messages: list[Any], options: dict[str, Any]) -> Any:
    return litellm.completion(model, messages, **options).choices[0].message


async def ask_asynchronously(model: str, messages: list[Any], options: dict[str, Any]) -> Any:
    return (await litellm.acompletion(model, messages, **options)).choices[0].message


def streamed(model: str, options: dict[str, Any]) -> dict[str, Any]:
    stream_options = {"include_usage": True}
    chunks = list(litellm.completion(model, [QUESTION], stream=True, stream_options=stream_options, **options))
    whole = litellm.stream_chunk_builder(chunks)
    return {
        "chunks": len(chunks),
        "text": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "finish_reason": whole.choices[0].finish_reason,
        "completion_tokens": whole.usage.completion_tokens,
    }


def called(model: str, options: dict[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}}
    parameters |= {"required": ["city"], "additionalProperties": False}
    function = {"name": "forecast", "description": "Returns the weather of a city", "parameters": parameters}
    tools: dict[str, Any] = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    tools["_skip_mcp_handler"] = True  # it needs a package that LiteLLM does not install
    question = {"role": "user", "content": "Will it rain in Rome?"}
    choice = litellm.completion(model, [question], **tools, **options, parallel_tool_calls=False).choices[0]
    (call,) = choice.message.tool_calls
    return {"finish_reason": choice.finish_reason, "name": call.function.name, "arguments": call.function.arguments}


def continued(model: str, options: dict[str, Any]) -> dict[str, str]:
    whole = litellm.text_completion(model=model, prompt=PROMPT, **options).choices[0].text
    chunks = litellm.text_completion(model=model, prompt=PROMPT, stream=True, **options)
    return {"whole": whole, "streamed": "".join(chunk.choices[0].text or "" for chunk in chunks)}


def main() -> None:
    url, name = sys.argv[1:]
    options = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 8, "num_retries": 0}
    first = ask(f"openai/{name}", [QUESTION], options)
    turns = [QUESTION, first, NEXT_QUESTION]  # `first` is the message object that LiteLLM returned
    answers = {
        "first": first.content,
        "second": ask(f"openai/{name}", turns, options).content,
        "hosted_vllm": asyncio.run(ask_asynchronously(f"hosted_vllm/{name}", turns, options)).content,
        "streamed": streamed(f"openai/{name}", options),
        "called": called(f"openai/{name}", options | {"max_tokens": 200}),
        "continued": continued(f"text-completion-openai/{name}", options),
    }
    print(json.dumps(answers))


main()
