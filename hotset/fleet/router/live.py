"""Publishes the data of a router's live page: its workers, with the numbers that health checks return."""

import asyncio
import time

from starlette.responses import Response

from hotset import __version__
from hotset.fleet.router.fleet import Fleet, RoutedWorker
from hotset.serve.feed import Feed, Json

PUBLISH_SECONDS = 0.5


class LiveFleet:
    """Publishes the state of all workers while a client watches."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.feed = Feed(lambda: {"hello": {"kind": "router", "version": __version__}, **self._message()}, dict)
        self._publishing: asyncio.Task[None] | None = None
        self._previous: dict[str, tuple[float, int, int]] = {}  # by URL: time, tokens generated, tokens prefilled

    def response(self) -> Response:
        response = self.feed.response()
        if self._publishing is None or self._publishing.done():
            self._publishing = asyncio.create_task(self._publish())
        return response

    async def _publish(self) -> None:
        await asyncio.sleep(PUBLISH_SECONDS)
        while self.feed.watched:
            self.feed.publish(self._message())
            await asyncio.sleep(PUBLISH_SECONDS)

    def _message(self) -> Json:
        now = time.time()
        workers = [self._worker(worker, now) for worker in self._fleet.workers]
        states = [worker.state for worker in self._fleet.workers if worker.up and worker.state is not None]
        sample = {
            "t": round(now, 3),
            "tokens": round(sum(worker["tokens"] for worker in workers), 1),  # per second
            "prefill": round(sum(worker["prefill"] for worker in workers), 1),  # per second
            "running": sum(state.running for state in states),
            "waiting": sum(state.waiting for state in states),
        }
        return {"workers": workers, "sample": sample}

    def _worker(self, worker: RoutedWorker, now: float) -> Json:
        state = worker.state
        generated, prefilled = (0, 0) if state is None else (state.tokens_generated, state.tokens_prefilled)
        then, generated_before, prefilled_before = self._previous.get(worker.url, (now, generated, prefilled))
        if now - then >= PUBLISH_SECONDS / 2 or worker.url not in self._previous:
            self._previous[worker.url] = now, generated, prefilled
        seconds = max(now - then, PUBLISH_SECONDS / 2)
        return {
            "url": worker.url,
            "role": worker.role,
            "up": worker.up,
            "error": None if worker.up else worker.last_error,
            "requests": worker.requests,
            # Per second. A restarted worker counts from 0 again.
            "tokens": round(max(0, generated - generated_before) / seconds, 1),
            "prefill": round(max(0, prefilled - prefilled_before) / seconds, 1),
            "state": None if state is None else state.model_dump(exclude={"control", "kv_events"}),
        }
