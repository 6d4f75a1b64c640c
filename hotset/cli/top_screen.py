"""Keeps and draws what `hotset top` has received from a server or a router."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

SAMPLES = 40  # of a curve
BAR_CHARACTERS = 48
CURVE = "▁▂▃▄▅▆▇█"
COLORS = {"resident": "green", "tiered": "yellow", "parked": "blue", "landing": "magenta", "waiting": "bright_black"}
COUNTS = ("running", "waiting", "resident", "tiered", "parked")  # numbers of requests that ranks and workers report

Json = dict[str, Any]


class Watched:
    """The state of a server or a router, according to the messages so far."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.hello: Json = {}
        self.failure: str | None = None
        self.samples: deque[Json] = deque(maxlen=SAMPLES)
        self.requests: dict[str, Json] = {}
        self.layers: list[int] = []
        self.workers: list[Json] = []
        self.ranks: list[Json] = []  # data parallel ranks of a server, if there are several
        self.now = 0.0  # by the server's clock

    def apply(self, message: Json) -> None:
        self.failure = message.get("failure")
        self.now = message.get("t", self.now)
        if "hello" in message:
            self.hello, self.requests = message["hello"], {}
            self.samples.clear()
            self.samples.extend(message.get("history", ()))
        if "sample" in message:
            self.samples.append(message["sample"])
        self.layers = message.get("layers", self.layers)
        self.workers = message.get("workers", self.workers)
        self.ranks = message.get("ranks", self.ranks)
        for request in message.get("requests", ()):
            story = self.requests.get(request["id"], {}).get("story")
            self.requests[request["id"]] = {"story": story, **request}
        for request in message.get("ended", ()):
            self.requests.pop(request["id"], None)


def tier_of(request: Json) -> str:
    """Returns where a request is, in the words of the live page."""
    phase, residence = request["phase"], request["residence"]
    if phase in ("waiting", "landing", "parked", "handoff"):
        return "parked" if phase == "handoff" else str(phase)
    return {"streamed": "tiered", "absent": "waiting"}.get(residence, str(residence))


def frame(watched: Watched, height: int) -> RenderableType:
    """Draws everything that is known, in at most `height` lines."""
    hello = watched.hello
    parts_of_name = [str(hello.get(part) or "") for part in ("model", "role", "device", "split")]
    name = " ".join(part for part in parts_of_name if part not in ("", "both"))
    title = Text.assemble(
        ("hotset ", "bold"), f"{hello.get('version', '')} {name or hello.get('kind', '')} {watched.url}"
    )
    if watched.failure is not None:
        title.append(f"\n{watched.failure}", "red")
    last = watched.samples[-1] if watched.samples else None
    if last is None:
        return Group(title, "no requests yet")
    parts: list[RenderableType] = [title, _statistics(watched, last)]
    if hello.get("kind") == "router":
        parts.append(_workers(watched.workers))
    else:
        ranks = [_ranks(watched.ranks)] if watched.ranks else []
        lines = height - 18 - (len(watched.ranks) + 1 if ranks else 0)
        parts += [_memory(watched, last), *ranks, _misses(watched, last), _requests(watched, max(3, lines))]
    return Group(*parts)


def _statistics(watched: Watched, last: Json) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    rows = [("tokens/s", "tokens", f"{last['tokens']:g} out, {last['prefill']:g} in"), ("running", "running", "")]
    if "ttft" in last:
        table_rows = (("first token", "ttft"), ("between tokens", "gap"))
        rows += [(title, name, _latency(watched, name)) for title, name in table_rows]
        rows += [("swap", "swap", f"{last['swap'] / 1e6:.1f} MB/s")]
        totals = last["totals"]
        reused = 100 * totals["reused"] / max(1, totals["queried"])
        rows += [("prefix cache", "", f"{reused:.0f} % of tokens reused")]
        if last["handoff"] is not None:
            rows += [("handoffs", "", f"{last['handoff']['open']} open, {last['handoff']['bytes'] / 1e6:.1f} MB")]
    for title, name, text in rows:
        values = [_value(sample.get(name)) for sample in watched.samples] if name else []
        table.add_row(title, _curve(values), text or f"{last['running']} running, {last['waiting']} waiting")
    return table


def _latency(watched: Watched, name: str) -> str:
    newest = next((sample[name] for sample in reversed(watched.samples) if sample.get(name)), None)
    return "–" if newest is None else f"{1000 * newest[0]:.0f} ms, 95 % within {1000 * newest[1]:.0f} ms"


def _value(value: Any) -> float:
    return float(value[0]) if isinstance(value, list) else float(value or 0)


def _curve(values: list[float]) -> str:
    top = max(values, default=0.0)
    return "".join(CURVE[int(value / top * (len(CURVE) - 1))] if top else CURVE[0] for value in values)


def _memory(watched: Watched, last: Json) -> RenderableType:
    pages = {kind: dict.fromkeys(COLORS, 0) for kind in ("device", "host")}
    counts = dict.fromkeys(COLORS, 0)
    for request in watched.requests.values():
        tier = tier_of(request)
        counts[tier] = counts.get(tier, 0) + 1
        for kind in pages:
            pages[kind][tier] = pages[kind].get(tier, 0) + request[kind]
    held, cached, quarantined, total = last["host"]
    table = Table.grid(padding=(0, 2))
    table.add_row("device", _bar(pages["device"], last["device"][1]), "{} of {} pages".format(*last["device"]))
    cached_part = {"cached": cached, "quarantined": quarantined}
    text = f"{held} of {total} pages, {cached} cached" if total else "tiers are off"
    table.add_row("host", _bar(pages["host"] | cached_part, total), text)
    table.add_row("requests", Text.assemble(*((f"{tier} {counts[tier]}  ", color) for tier, color in COLORS.items())))
    return table


def _bar(pages: dict[str, int], total: int) -> RenderableType:
    bar, drawn, sum_of_pages = Text(), 0, 0
    for name, count in pages.items():
        sum_of_pages += count
        end = round(BAR_CHARACTERS * sum_of_pages / total) if total else 0
        bar.append("█" * (end - drawn), COLORS.get(name, "red" if name == "quarantined" else "white"))
        drawn = max(drawn, end)
    bar.append("░" * (BAR_CHARACTERS - drawn), "bright_black")
    return bar


def _misses(watched: Watched, last: Json) -> RenderableType:
    rates = next((sample["miss"] for sample in reversed(watched.samples) if sample.get("lookups")), None)
    if rates is None or len(rates) != len(watched.layers):
        return Text("no request has been tiered yet", "bright_black")
    line = Text("misses by layer  ")
    for layer, rate in zip(watched.layers, rates, strict=True):
        color = "bright_black" if rate is None else "green" if rate < 50 else "yellow" if rate < 200 else "red"
        line.append(f"{layer}:{'–' if rate is None else f'{rate / 10:.0f}%'} ", color)
    return line


def _table(*, texts: Sequence[str] = (), numbers: Sequence[str]) -> Table:
    """Returns a table without rows: the columns of texts on the left, then those of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    for column in texts:
        table.add_column(column, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _requests(watched: Watched, limit: int) -> RenderableType:
    columns = ("prompt", "answer", "device", "host", "seconds")
    table = _table(texts=("request", "tier", "phase"), numbers=columns)
    largest = sorted(watched.requests.values(), key=lambda request: -request["rows"])[:limit]
    for request in largest:
        tier = tier_of(request)
        story = request["story"] or [[watched.now]]
        numbers = (request["prompt"], request["answer"], request["device"], request["host"])
        age = max(0.0, watched.now - story[0][0])
        place = Text(tier, COLORS.get(tier, "white"))
        table.add_row(Text(request["id"][:40]), place, Text(request["phase"]), *map(str, numbers), f"{age:.1f}")
    return table


def _ranks(ranks: list[Json]) -> RenderableType:
    table = _table(numbers=("rank", *COUNTS, "device pages", "host pages"))
    for number, rank in enumerate(ranks):
        pages = [f"{rank[f'{kind}_pages_held']}/{rank[f'{kind}_pages_total']}" for kind in ("device", "host")]
        table.add_row(str(number), *(str(rank[name]) for name in COUNTS), *pages)
    return table


def _workers(workers: list[Json]) -> RenderableType:
    table = _table(texts=("worker", "role", "state"), numbers=(*COUNTS, "device pages", "tokens/s"))
    for worker in workers:
        state = worker["state"] or {}
        health = Text("up", "green") if worker["up"] else Text(f"down: {worker['error']}", "red")
        pages = f"{state.get('device_pages_held', 0)}/{state.get('device_pages_total', 0)}"
        numbers = [str(state.get(name, "–")) for name in COUNTS]
        table.add_row(Text(worker["url"]), worker["role"], health, *numbers, pages, f"{worker['tokens']:g}")
    return table
