"""GET /plan: the planner with sliders, and the process that calculates its plans."""

import asyncio
import json
import subprocess
import sys
import threading
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hotset.base.errors import EngineStopped, RequestError
from hotset.serve.json_body import parsed
from hotset.serve.page import page_response

CALCULATION_SECONDS = 60.0  # of one plan, with the start of the process
IDLE_SECONDS = 120.0  # the process ends after this time without a request
MAX_BYTES = 4096


class PlanCalculator:
    """Runs `hotset.lab.plan.calculator` in a process of its own, from the first plan until a while after the last."""

    def __init__(self, served_model: str) -> None:
        self._served_model = served_model
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._idle: threading.Timer | None = None

    def calculate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer of the process. Blocks; other threads take turns. Raises EngineStopped if it has died."""
        with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            child = self._running()
            assert child.stdin is not None and child.stdout is not None
            timeout = threading.Timer(CALCULATION_SECONDS, child.kill)
            timeout.daemon = True
            timeout.start()
            try:
                child.stdin.write(json.dumps(request).encode() + b"\n")
                child.stdin.flush()
                line = child.stdout.readline()
            except OSError:
                line = b""
            finally:
                timeout.cancel()
            if not line:
                self._end()
                raise EngineStopped("the process that calculates plans has ended; try again")
            self._idle = threading.Timer(IDLE_SECONDS, self._close_idle)
            self._idle.daemon = True
            self._idle.start()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends the process at once. A calculation in progress fails."""
        if (child := self._child) is not None:
            child.kill()
        self._close_idle()

    def _close_idle(self) -> None:
        """Ends the process after the calculation in progress. It is started again when needed."""
        with self._lock:
            self._end()

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._child is None:
            command = [sys.executable, "-m", "hotset.lab.plan.calculator", self._served_model]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self._child

    def _end(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


def plan_routes(calculator: PlanCalculator) -> APIRouter:
    """The page, which needs no key, and its calculation, which does."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/plan")
    async def page() -> Response:
        return page_response("plan.html")

    @routes.post("/plan/calculate")
    async def calculate(request: Request) -> Response:
        body = await request.body()
        if len(body) > MAX_BYTES:
            message = f"the body has {len(body)} bytes, and the limit for the request of a plan is {MAX_BYTES}"
            raise RequestError(message, code="invalid_value")
        try:
            values = parsed(body)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise RequestError("the body must be a JSON object", code="invalid_value")
        answer = await asyncio.to_thread(calculator.calculate, values)
        if "error" in answer:
            raise RequestError(answer["error"], code="invalid_value")
        return JSONResponse(answer)

    return routes
