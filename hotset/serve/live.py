"""What the live page and `hotset top` show: a bounded history of the engine's state, streamed to every open page.

The engine reports its state with the outputs of steps (`engine/process.py`). Each report becomes one sample: rates
since the previous one, latencies of requests in between, and the newest numbers.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hotset.engine.outputs import EngineStats
from hotset.engine.process import StateReport
from hotset.schedule.snapshots import RequestSnapshot
from hotset.serve.feed import Feed, Json
from hotset.serve.metrics import Metrics

HISTORY = 240  # samples: two minutes at two per second
ENDED = 64  # ended requests whose stories are kept
ENDED_PHASES = frozenset({"ending", "finished"})


class Live:
    """Collects the reports of one engine. All methods must be called on the event loop."""

    def __init__(self, hello: Callable[[], Json], failure: Callable[[], str | None], metrics: Metrics) -> None:
        """`hello` describes the server. `failure` returns why the engine no longer works, or None. `metrics` has the
        newest latencies."""
        self._hello, self._failure, self._metrics = hello, failure, metrics
        self._history: deque[Json] = deque(maxlen=HISTORY)
        self._requests: dict[str, Json] = {}  # open requests, as they were sent last, with their stories
        self._ended: deque[Json] = deque(maxlen=ENDED)
        self._layers: list[int] = []
        self._ranks: list[Json] = []  # data parallel ranks, if there are several
        self._previous: tuple[float, EngineStats] | None = None
        self.feed = Feed(self._state, self._heartbeat)

    def record(self, report: StateReport) -> None:
        """Adds a report to the history, and sends it to all watchers."""
        sample = self._sample(report.stats)
        self._history.append(sample)
        changed, ended = self._update(report.requests)
        if self.feed.watched:
            message: Json = {
                "sample": sample,
                "requests": changed,
                "ended": ended,
                "layers": self._layers,
                "ranks": self._ranks,
            }
            self.feed.publish({key: value for key, value in message.items() if value})

    def _state(self) -> Json:
        return {
            "hello": self._hello(),
            "layers": self._layers,
            "ranks": self._ranks,
            "history": list(self._history),
            "requests": list(self._requests.values()),
            "ended": list(self._ended),
            **self._heartbeat(),
        }

    def _heartbeat(self) -> Json:
        failure = self._failure()
        return {} if failure is None else {"failure": failure}

    def _update(self, snapshots: Sequence[RequestSnapshot]) -> tuple[list[Json], list[Json]]:
        """Returns the open requests that have changed, and those that have ended."""
        changed, ended = [], []
        reported: dict[str, Json] = {}
        for snapshot in snapshots:
            known = self._requests.get(snapshot.request_id, {})
            request = _request_json(snapshot, known.get("story", []))
            if snapshot.phase in ENDED_PHASES:
                ended.append(request)
                continue
            reported[snapshot.request_id] = request
            if request != known:
                without_story = {key: value for key, value in request.items() if key != "story"}
                changed.append(without_story if snapshot.story is None else request)
        self._ended.extend(ended)
        gone = self._requests.keys() - reported.keys() - {request["id"] for request in ended}
        ended += [self._requests[request_id] for request_id in gone]
        self._requests = reported
        return changed, ended

    def _sample(self, stats: EngineStats) -> Json:
        now = time.time()
        then, before = self._previous or (now, stats)
        self._previous = now, stats
        seconds = max(now - then, 1e-3)
        self._layers = sorted(stats.slot_lookups)
        self._ranks = [rank.of_rank for rank in stats.ranks]
        lookups = _change(stats.slot_lookups, before.slot_lookups, self._layers)
        misses = _change(stats.slot_misses, before.slot_misses, self._layers)
        handoff = stats.handoff
        return {
            "t": round(now, 3),
            "tokens": round((stats.tokens_generated - before.tokens_generated) / seconds, 1),
            "prefill": round((stats.tokens_prefilled - before.tokens_prefilled) / seconds, 1),
            "swap": round((stats.bytes_swapped - before.bytes_swapped) / seconds),
            "ttft": _take_quantiles(self._metrics.newest_first_token_seconds),
            "gap": _take_quantiles(self._metrics.newest_inter_token_seconds),
            "running": stats.running,
            "waiting": stats.waiting,
            "queue": stats.tokens_to_prefill,
            "device": [stats.device_pages_held, stats.device_pages_total],
            "host": [
                stats.host_pages_held,
                stats.host_pages_cached,
                stats.host_pages_quarantined,
                stats.host_pages_total,
            ],
            # In thousandths, by layer; None without lookups.
            "miss": [
                round(1000 * missed / looked_up) if looked_up else None
                for missed, looked_up in zip(misses, lookups, strict=True)
            ],
            "lookups": sum(lookups),
            "misses": sum(misses),
            "totals": {
                "steps": stats.steps,
                "finished": sum(stats.requests_finished.values()),
                "queried": stats.tokens_queried,
                "reused": stats.tokens_reused,
                "demotions": stats.demotions,
                "promotions": stats.promotions,
                "parks": stats.parks,
                "resumes": stats.resumes,
                "recomputes": stats.recomputes,
                "tokens": stats.tokens_generated,
            },
            "handoff": None
            if handoff is None
            else {"open": handoff.num_open, "peers": handoff.num_peers, "bytes": handoff.nbytes},
        }


def _change(now: Mapping[int, int], before: Mapping[int, int], layers: Iterable[int]) -> list[int]:
    return [now[layer] - before.get(layer, 0) for layer in layers]


def _take_quantiles(seconds: deque[float]) -> list[float] | None:
    """Returns the median and the 95th percentile of measurements, and removes them. Returns None if there are none."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    seconds.clear()
    return [round(ordered[int(share * (len(ordered) - 1))], 6) for share in (0.5, 0.95)]


def _request_json(snapshot: RequestSnapshot, known_story: list[Any]) -> Json:
    story = known_story if snapshot.story is None else [list(event) for event in snapshot.story]
    return {
        "id": snapshot.request_id,
        "phase": snapshot.phase,
        "residence": snapshot.residence,
        "choice": snapshot.tiers,
        "prompt": snapshot.prompt_tokens,
        "answer": snapshot.answer_tokens,
        "cached": snapshot.cached_tokens,
        "rows": snapshot.rows,
        "device": snapshot.device_pages,
        "host": snapshot.host_pages,
        "parks": snapshot.parks,
        "reason": snapshot.finish_reason,
        "story": story,
    }
