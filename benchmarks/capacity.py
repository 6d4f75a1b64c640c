"""Measures the capacity that tiers add and what they cost: an engine with `--tiers auto` against `off`, on a CPU.

    python benchmarks/capacity.py --json capacity.json --png capacity.png

Four measurements, each with its bars (required results):

1. Requests that decode at once, and tokens/s, by context length, within the same device memory. Bars: with contexts of
   16 times as many tokens as a hot buffer has slots, auto decodes at least 3.5 times as many requests as off. At every
   length, auto decodes at least as many requests as off, and both decode at least 95 % of the number that the sizing
   code predicts.
2. A burst of long requests demotes resident requests. Bars: at most 2 s after the end of the burst, the median of 8
   step times is within 5 % of an engine without tiers and without a burst, and so is the median of all later steps.
3. The cost of tiers while all requests are resident: steps of both engines alternate. Bar: auto takes at most 3 %
   longer.
4. Four times as many requests as fit. "sustained": a request that ends is replaced by a new one; "at once": all arrive
   together. The wait of a request is the number of steps between its arrival and its end in which it gets no token.
   Bars: the longest wait is at most twice the mean, and no request is parked more than 3 times. If all requests arrive
   at once and are served in order, four waves wait for 0, 1, 2 and 3 times the duration of a wave. The longest wait is
   then exactly twice the mean.

Engine, scheduler and memory are real. Prompts are not computed, since that would take hours: a synthetic model stores
random rows and index keys, and its selections are about as local as the demo model's. The demo model computes the timed
steps that only decode, over those rows. In measurement 4, in steps that are not timed, and in steps that contain
prompts, the synthetic model also decodes.
Step times are CPU time of the one computing thread, which other load on the machine disturbs less than wall time. A run
takes about three minutes, --quick less than one.
"""

import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from report import Bar, make_parser, report, write_json
from synthetic_model import DemoEngine, SyntheticDemoModel

from hotset.base.config import EngineConfig, TiersMode
from hotset.base.errors import HotsetError

OFF: TiersMode = "off"
AUTO: TiersMode = "auto"

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of the run."""

    device_gib: float = 0.6
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    answer: int = 96  # tokens; enough that all requests that fit are admitted before the first request ends
    timed_steps: int = 4
    burst_steps: int = 32
    after_steps: int = 64
    overhead_steps: int = 128
    overload_gib: float = 0.12


QUICK = Sizes(0.3, (512, 4096), 64, 2, 16, 40, 32, 0.06)


def fill_engine(model: SyntheticDemoModel, tiers: TiersMode, length: int, sizes: Sizes) -> dict[str, Any]:
    """Adds more requests of `length` tokens than fit. Measures how many decode at once, and their tokens/s."""
    demo = DemoEngine(model, tiers, sizes.device_gib, length)
    predicted = demo.budget.requests(length)
    for _ in range(predicted + max(2, predicted // 8)):
        demo.add(length - sizes.answer, sizes.answer)
    oldest, peak = demo.requests[0], 0
    while oldest.max_length - len(oldest.tokens) > sizes.timed_steps + 2:
        demo.step()
        peak = max(peak, demo.decoding)
    demo.step(computes_decode=True)
    before, seconds = demo.engine.stats(), sum(demo.step(computes_decode=True) for _ in range(sizes.timed_steps))
    stats, geometry = demo.engine.stats(), demo.budget.geometry
    return {
        "context": length,
        "tiers": tiers,
        "pages/request": geometry.resident_pages(length) if tiers == OFF else geometry.tiered_pages(length),
        "predicted": predicted,
        "decoding": peak,
        "tiered": stats.tiered,
        "parks": stats.parks,
        "ms/step": seconds / sizes.timed_steps * 1e3,
        "tokens/s": (stats.tokens_generated - before.tokens_generated) / seconds,
    }


def capacity(model: SyntheticDemoModel, sizes: Sizes) -> tuple[Rows, list[Bar]]:
    rows = [fill_engine(model, tiers, length, sizes) for length in sizes.lengths for tiers in (OFF, AUTO)]
    counts = {(row["context"], row["tiers"]): row["decoding"] for row in rows}
    ratios = {length: counts[length, AUTO] / counts[length, OFF] for length in sizes.lengths}
    worst_share = min(row["decoding"] / row["predicted"] for row in rows)
    bars = [
        Bar("lowest auto / off of any context length", min(ratios.values()), 1, at_least=True),
        Bar("lowest decoding / predicted", worst_share, 0.95, at_least=True),
    ]
    long_context = 16 * 2 * model.kv_shape.topk
    if long_context in ratios:
        bars.insert(0, Bar(f"auto / off at {long_context} tokens", ratios[long_context], 3.5, at_least=True))
    return rows, bars


def burst(model: SyntheticDemoModel, sizes: Sizes) -> tuple[Rows, list[Bar]]:
    """Steps both engines in turn. A burst of long requests arrives at `auto` only. Returns one row per later step."""
    gib, length, long_running, burst_requests = 0.15, 1536, 4, 5
    engines = {tiers: DemoEngine(model, tiers, gib, 4096) for tiers in (OFF, AUTO)}
    for demo in engines.values():
        for _ in range(long_running):
            demo.add(length, 4096 - length)
        demo.step()
        demo.step(computes_decode=True)
    auto, steps = engines[AUTO], []
    for _ in range(burst_requests):
        auto.add(4000, 96)
    since_end: float | None = None  # wall seconds of the steps of `auto` since the burst ended
    for number in range(sizes.burst_steps + sizes.after_steps):
        if number == sizes.burst_steps:
            since_end = 0.0
            for request in auto.requests[long_running:]:
                auto.engine.abort(request.request_id)
        start = time.perf_counter()
        auto_s, decoding = auto.step(computes_decode=True), auto.decoding
        wall = time.perf_counter() - start
        off_s = engines[OFF].step(computes_decode=True)
        tiered = auto.engine.stats().tiered
        steps.append(
            {
                "auto ms": auto_s * 1e3,
                "off ms": off_s * 1e3,
                "decoding": decoding,
                "tiered": tiered,
                "since end": since_end,
            }
        )
        since_end = None if since_end is None else since_end + wall
    assert steps[sizes.burst_steps]["tiered"] == long_running, "the burst did not demote all long-running requests"
    seconds, ratio = recovery(steps)
    return steps, [
        Bar("seconds from the end of a burst until within 5 % of off", seconds, 2),
        Bar("auto / off after that", ratio, 1.05),
    ]


def recovery(steps: Rows, window: int = 8) -> tuple[float, float]:
    """Finds the first `window` consecutive steps after the burst whose median ratio `auto` / `off` is at most 1.05.

    Returns the seconds from the end of the burst to the end of these steps, and the median ratio of the later steps.
    Both are infinite if there are no such steps, or none after them.
    """
    late = [step for step in steps if step["since end"] is not None]
    ratios = [step["auto ms"] / step["off ms"] for step in late]
    for end in range(window, len(late)):
        if statistics.median(ratios[end - window : end]) <= 1.05:
            return late[end]["since end"], statistics.median(ratios[end:])
    return float("inf"), float("inf")


def overhead(model: SyntheticDemoModel, sizes: Sizes) -> tuple[Rows, list[Bar]]:
    """Steps both engines in turn with eight resident requests each. The order alternates."""
    requests, page_rows = 8, EngineConfig().page_rows
    engines = {tiers: DemoEngine(model, tiers, 0.2, 1024) for tiers in (OFF, AUTO)}
    for demo in engines.values():
        for number in range(requests):
            demo.add(560 + number * page_rows // requests, 400)  # the requests fill their pages at different steps
        demo.step()
        demo.step(computes_decode=True)
    times: dict[tuple[str, bool], list[float]] = {(tiers, fills): [] for tiers in engines for fills in (False, True)}
    for number in range(sizes.overhead_steps):
        fills = any((request.num_scheduled + 1) % page_rows == 0 for request in engines[AUTO].requests)
        for tiers in (OFF, AUTO) if number % 2 else (AUTO, OFF):
            times[tiers, fills].append(engines[tiers].step(computes_decode=True))
    stats = engines[AUTO].engine.stats()
    assert stats.resident == requests and not stats.demotions, "not all requests stayed resident"
    # A page is copied to the host in the step that fills it. One median over all steps would ignore those few steps, so
    # steps that fill a page and other steps have separate medians, weighted by their numbers.
    total_s = {
        tiers: sum(len(times[tiers, fills]) * statistics.median(times[tiers, fills]) for fills in (False, True))
        for tiers in engines
    }
    rows = [
        {
            "tiers": tiers,
            "ms/step": total_s[tiers] / sizes.overhead_steps * 1e3,
            "ms, no full page": statistics.median(times[tiers, False]) * 1e3,
            "ms, a full page": statistics.median(times[tiers, True]) * 1e3,
            "ratio": total_s[tiers] / total_s[OFF],
        }
        for tiers in engines
    ]
    return rows, [Bar("auto / off, everything resident", total_s[AUTO] / total_s[OFF], 1.03)]


def overload(model: SyntheticDemoModel, prompt: int, answer: int, gib: float, sustained: bool) -> dict[str, Any]:
    """Runs four times as many requests as fit until all have ended.

    If `sustained`, each request that ends is replaced until eight times as many requests as fit have arrived. The first
    half of them, which arrived at an empty engine, is then not counted.
    """
    demo = DemoEngine(model, AUTO, gib, prompt + answer)
    fit = demo.budget.requests(prompt + answer)
    for _ in range(4 * fit):
        demo.add(prompt, answer)
    waits, steps = [0] * len(demo.requests), 0
    while not demo.engine.idle:
        before = [len(request.tokens) for request in demo.requests]
        demo.step()
        steps += 1
        for number, request in enumerate(demo.requests):
            waits[number] += len(request.tokens) == before[number] < request.max_length
        ended = sum(len(request.tokens) >= request.max_length for request in demo.requests)
        while sustained and len(waits) < min(4 * fit + ended, 8 * fit):
            demo.add(prompt, answer)
            waits.append(0)
    waits = waits[4 * fit :] if sustained else waits
    stats = demo.engine.stats()
    return {
        "load": "sustained" if sustained else "at once",
        "prompt": prompt,
        "answer": answer,
        "fit": fit,
        "counted": len(waits),
        "steps": steps,
        "mean wait": statistics.mean(waits),
        "max wait": max(waits),
        "max / mean": max(waits) / statistics.mean(waits),
        "parks": stats.parks,
        "max parks of one": max(request.parks for request in demo.requests),
        "recomputes": stats.recomputes,
    }


def overloads(model: SyntheticDemoModel, sizes: Sizes) -> tuple[Rows, list[Bar]]:
    rows = [
        overload(model, prompt, answer, sizes.overload_gib, sustained)
        for sustained in (True, False)
        for prompt, answer in ((900, 124), (256, 256))
    ]
    bars = [
        Bar(f"max / mean wait, {row['load']}, {row['prompt']} + {row['answer']} tokens", row["max / mean"], 2)
        for row in rows
    ]
    return rows, [*bars, Bar("most parks of one request", max(row["max parks of one"] for row in rows), 3)]


def draw(path: Path, by_length: Rows, by_step: Rows) -> None:
    """Draws the results to `path`. Raises ImportError if matplotlib is not installed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (requests, speed, latency) = pyplot.subplots(1, 3, figsize=(14, 4), constrained_layout=True)
    for tiers, colour in ((AUTO, "tab:red"), (OFF, "tab:gray")):
        rows = [row for row in by_length if row["tiers"] == tiers]
        lengths = [row["context"] for row in rows]
        requests.plot(lengths, [row["decoding"] for row in rows], "o-", color=colour, label=f"tiers {tiers}")
        requests.plot(lengths, [row["predicted"] for row in rows], "_", color=colour, markersize=16)
        speed.plot(lengths, [row["tokens/s"] for row in rows], "o-", color=colour, label=f"tiers {tiers}")
        latency.plot([row[f"{tiers} ms"] for row in by_step], color=colour, label=f"tiers {tiers}")
    ends = [number for number, row in enumerate(by_step) if row["since end"] is not None]
    latency.axvline(ends[0], color="black", linestyle=":", label="end of the burst")
    requests.set(title="Requests decoding at once (dashes: predicted)", ylim=(0, None))
    speed.set(title="Tokens/s on one core", ylim=(0, None))
    for axes in (requests, speed):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False)
        axes.set_xlabel("context length in tokens")
    latency.set(title="ms per step around a burst (off: no burst)", xlabel="step", ylim=(0, None))
    for axes in (requests, speed, latency):
        axes.legend()
    figure.savefig(path, dpi=120)


def burst_table(steps: Rows) -> Rows:
    """Summarizes the steps in up to three rows: steps during the burst, later steps in which a request is still tiered,
    and later steps in which all requests are resident. A row without steps is omitted."""
    during = [step for step in steps if step["since end"] is None]
    late = [step for step in steps if step["since end"] is not None]
    recovering = [step for step in late if step["tiered"]]
    resident = [step for step in late if not step["tiered"]]
    return [
        {
            "phase": name,
            "steps": len(phase),
            "decoding": max(step["decoding"] for step in phase),
            "auto ms": statistics.median(step["auto ms"] for step in phase),
            "off ms": statistics.median(step["off ms"] for step in phase),
            "ratio": statistics.median(step["auto ms"] / step["off ms"] for step in phase),
        }
        for name, phase in (("burst", during), ("recovering", recovering), ("resident again", resident))
        if phase
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="models/demo-dsa", help="directory of a sparse-attention model")
    parser.add_argument("--png", type=Path, help="also draw the results to this file (requires matplotlib)")
    parser.add_argument("--quick", action="store_true", help="a smaller run, whose ratios are less precise")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = QUICK if options.quick else Sizes()
    start, load_before = time.perf_counter(), os.getloadavg()[0]
    try:
        model = SyntheticDemoModel(options.model)
    except HotsetError as error:
        sys.exit(f"error: {error}")
    note = "synthetic prompts; the demo model computes the timed steps that only decode"
    by_length, bars = capacity(model, sizes)
    report(f"Requests decoding at once in {sizes.device_gib} GiB of device memory", by_length, None, note)
    by_step, burst_bars = burst(model, sizes)
    report("During and after a burst of long requests", burst_table(by_step), None, f"{note}; medians")
    costs, overhead_bars = overhead(model, sizes)
    report("Cost of tiers while everything is resident", costs, None, f"{note}; medians")
    waits, wait_bars = overloads(model, sizes)
    report("Four times as many requests as fit", waits, None, "synthetic prompts and tokens; waits in steps")
    rows = [bar.row() for bar in (*bars, *burst_bars, *overhead_bars, *wait_bars)]
    load = load_before, os.getloadavg()[0]
    duration = f"{time.perf_counter() - start:.0f} s; load average {load[0]:.1f} before, {load[1]:.1f} after"
    report("Bars", rows, None, duration)
    if options.json is not None:
        tables = {"bars": rows, "contexts": by_length, "burst": by_step, "resident": costs, "overload": waits}
        write_json(options.json, "Capacity and cost of tiers", tables, **{"load average before and after": load})
    if options.png is not None:
        try:
            draw(options.png, by_length, by_step)
        except ImportError:
            print(f"{options.png} was not drawn: pip install matplotlib", file=sys.stderr)


if __name__ == "__main__":
    main()
