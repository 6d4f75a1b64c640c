"""The picture of a benchmark: distributions of latencies, requests over time, and the curves of a sweep."""

from collections.abc import Callable, Iterable, Sequence

from hotset.lab.bench.benchmark import BenchReport
from hotset.lab.bench.results import LoadResult, RequestRecord, Summary, percentile
from hotset.lab.bench.svg import LOG_DECADES, Bar, Line, Panel, Point, page

BLUE, LIGHT, RED = "#1f5fa8", "#b9cfe8", "#c0392b"
RAMP = ("#9cc3e6", "#5a9bd4", "#1f5fa8", "#123c6b", "#0a2138")  # loads from low to high
CURVE_POINTS = 200
MIN_TIME_BINS, MAX_TIME_BINS = 10, 60  # the output rate over time has one bin per second within these limits
MAX_BARS = 400


def picture(report: BenchReport) -> str:
    """Returns the picture as SVG."""
    results = [result for result in report.results if result.completed]
    panels: list[Panel] = []
    if len(results) > 1:
        panels = _sweep_panels(report, results)
    panels += _distribution_panels(results)
    if results:
        panels += _time_panels(results[-1], of_several=len(results) > 1)
    loads = ", ".join(result.load.label for result in report.results)
    return page(f"{report.server.model} at {report.server.url}", f"{loads} · {report.date[:16]}", panels)


def _sweep_panels(report: BenchReport, results: Sequence[LoadResult]) -> list[Panel]:
    summaries = [summary for summary in report.summaries() if summary.completed]
    short = [result.load.value for result in results]

    def curve(name: str, title: str) -> Panel:
        def line(quantile: str, dashed: bool) -> Line:
            points = [point for summary in summaries if (point := _curve_point(summary, name, quantile)) is not None]
            return Line(points, BLUE, quantile, dashed=dashed, dots=True, labels=() if dashed else short)

        lines = (line("p50", False), line("p99", True))
        return Panel(title, "output tokens/s", "milliseconds", lines, x_max=fastest * 1.15)

    fastest = max(summary.output_tokens_per_second for summary in summaries)
    speeds = [(index + 1.0, summary.output_tokens_per_second) for index, summary in enumerate(summaries)]
    throughput = Line(speeds, BLUE, dots=True)
    return [
        Panel("Throughput", _kind(results), "output tokens/s", (throughput,), x_max=len(short) + 0.5, x_names=short),
        curve("ttft", "Time to first token against throughput"),
        curve("tpot", "Time per output token against throughput"),
        curve("e2e", "Whole request against throughput"),
    ]


def _curve_point(summary: Summary, name: str, quantile: str) -> Point | None:
    distribution = summary.latencies_ms[name]
    return None if distribution is None else (summary.output_tokens_per_second, getattr(distribution, quantile))


def _distribution_panels(results: Sequence[LoadResult]) -> list[Panel]:
    by_load = f", by {_kind(results)}" if len(results) > 1 else ""
    return [
        _distribution(f"Time to first token{by_load}", results, lambda record: (record.ttft,)),
        _distribution(f"Time between tokens{by_load}", results, lambda record: record.gaps),
    ]


def _kind(results: Sequence[LoadResult]) -> str:
    return "concurrency" if results[0].load.concurrency else "requests/s sent"


def _distribution(
    title: str, results: Sequence[LoadResult], values: Callable[[RequestRecord], Iterable[float | None]]
) -> Panel:
    """Draws a cumulative distribution: the share of requests, or of gaps between tokens, up to each latency."""
    lines: list[Line] = []
    extremes: list[float] = []
    for index, result in enumerate(results):
        found = (value for record in result.completed for value in values(record))
        ordered = sorted(value * 1e3 for value in found if value is not None)
        if not ordered:
            continue
        shares = [100.0 * step / CURVE_POINTS for step in range(CURVE_POINTS + 1)]
        points = [(percentile(ordered, share), share) for share in shares]
        extremes += [percentile(ordered, 1), ordered[-1]]
        labels = ["p50" if share == 50 else "p99" if share == 99 else "" for share in shares]
        colour = BLUE if len(results) == 1 else RAMP[index * (len(RAMP) - 1) // (len(results) - 1)]
        name = "" if len(results) == 1 else result.load.value
        lines.append(Line(points, colour, name, labels=labels if len(results) == 1 else ()))
    x_max = max(extremes, default=0.0) * 1.1 or 1.0  # all gaps are 0 if each answer came in one piece
    x_min = max(min(extremes, default=0.0) * 0.9, x_max / 10**LOG_DECADES)
    return Panel(title, "milliseconds", "% that took at most this long", tuple(lines), x_max=x_max, x_min=x_min)


def _time_panels(result: LoadResult, of_several: bool) -> list[Panel]:
    label = f" ({result.load.label})" if of_several else ""
    seconds = "seconds since the beginning"
    running = Line(_running(result.records), BLUE)
    speed = Line(_tokens_per_second(result), BLUE)
    return [
        Panel(f"Running requests{label}", seconds, "requests", (running,), x_max=result.seconds),
        Panel(f"Output tokens/s{label}", seconds, "tokens/s", (speed,), x_max=result.seconds),
        Panel(
            f"Requests{label}" + (f", the first {MAX_BARS}" if len(result.records) > MAX_BARS else ""),
            seconds,
            "one row per request",
            bars=_request_bars(result.records),
            x_max=result.seconds,
            wide=True,
            legend=(("to the first token", LIGHT), ("to the end", BLUE), ("failed", RED)),
        ),
    ]


def _running(records: Sequence[RequestRecord]) -> list[Point]:
    """Returns the corners of a step curve: the number of running requests over time."""
    changes = sorted([(record.sent, 1) for record in records] + [(record.ended, -1) for record in records])
    points: list[Point] = [(0.0, 0.0)]
    count = 0
    for time, change in changes:
        points += [(time, float(count)), (time, float(count + change))]
        count += change
    return points


def _tokens_per_second(result: LoadResult) -> list[Point]:
    """Returns the output rate over time. The tokens of a request are divided evenly among its chunks."""
    bins = min(max(int(result.seconds), MIN_TIME_BINS), MAX_TIME_BINS)
    width = result.seconds / bins
    counts = [0.0] * bins
    for record in result.completed:
        for time in record.chunk_times:
            counts[min(int(time / width), bins - 1)] += record.output_tokens / len(record.chunk_times)
    return [((index + 0.5) * width, count / width) for index, count in enumerate(counts)]


def _request_bars(records: Sequence[RequestRecord]) -> list[Bar]:
    ordered = sorted(records, key=lambda record: record.sent)[:MAX_BARS]
    bars: list[Bar] = []
    for index, record in enumerate(ordered):
        row = len(ordered) - 1 - index
        if record.failure is not None:
            bars.append(Bar(row, record.sent, record.ended, RED, record.failure.message))
            continue
        first = record.chunk_times[0] if record.chunk_times else record.ended
        tooltip = f"{record.input_tokens} tokens in, {record.output_tokens} out, {record.e2e:.2f} s"
        bars += [Bar(row, record.sent, first, LIGHT, tooltip), Bar(row, first, record.ended, BLUE, tooltip)]
    return bars
