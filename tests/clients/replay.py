"""Sends the requests of benchmark tools that are too large to install, and checks what the tools read in the answers.

replays.json has the requests. They follow the public source of each tool. MODEL stands for the name of the model.
"""

import json
from pathlib import Path
from typing import Any

import plain_http

REPLAYS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "replays.json").read_text())
TIMEOUT_SECONDS = 240


def replay(url: str, model: str, tool: str) -> int:
    """Sends all requests of `tool`, and returns their number. Raises AssertionError if an answer is not as expected."""
    requests = REPLAYS[tool]["requests"]
    with plain_http.Client(base_url=url, timeout=TIMEOUT_SECONDS) as http:
        for request in requests:
            body = request.get("body")
            if body is None:
                answer = http.get(request["path"])
            else:
                sent = {**body, "model": model}
                answer = http.post(request["path"], json=sent, headers=request.get("headers"))
            assert answer.status_code == 200, f"{tool}: {request['path']}: {answer.status_code} {answer.text}"
            for name, value in request.get("headers", {}).items():
                assert answer.headers[name] == value
            if body is not None and body.get("stream"):
                _check_stream(request, answer.text)
            elif "has" in request:
                _check_member(request["has"], answer.json())
    return len(requests)


def _check_stream(request: dict[str, Any], stream: str) -> None:
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    if request.get("every_chunk_has_a_choice"):
        assert len(choices) == len(chunks), "the tool reads choices[0] of every chunk"
    text = "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)
    assert text.startswith(request["starts_with"]), text
    if "completion_tokens" in request:
        assert chunks[-1]["usage"]["completion_tokens"] == request["completion_tokens"]


def _check_member(path: list[str | int], answer: Any) -> None:
    for key in path:
        assert isinstance(key, int) or key in answer, f"the tool reads {key}, which is not in {answer}"
        answer = answer[key]
