"""What tiers buy and what they cost, on the CPU, with the demo model's memory: four measurements in one run.

    python benchmarks/capacity.py --json capacity.json --png capacity.png

1. Requests that decode at the same time and tokens/s, by context length, within one device budget, tiers auto and off.
   Bars: at 16 times the hot buffer 3.5x as many as off; 95 % of what the sizing code predicts; never fewer than off.
2. A burst of long requests demotes a few that are resident. Bar: within 2 s of its end, the time between tokens is back
   within 5 % of an engine without tiers that saw no burst.
3. Everything resident, steps of an auto and an off engine in turns. Bar: auto costs at most 3 % more.
4. Four times as many requests as fit: sustained (each that ends is followed by the next), and all at once. Bars: no
   request waits more than twice the mean, none is parked more than 3 times. A request waits in every step, from its
   arrival to its end, that brings it no token. All at once, first come, first served makes four waves wait 0, A, 2A and
   3A, so the largest is twice the mean at best.

Engine, scheduler and memory are real throughout. Prompts are not computed, which would take hours: a stand-in writes
made-up rows and keys for them, and selects positions about as local as the demo model's. Decode steps that are timed
are the demo model's own, over those rows. In 4, and wherever nothing is timed, the stand-in decodes as well. Times are
processor time of the one thread that computes, so that other load on the machine disturbs them less.
"""

import datetime
import json
import os
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from report import hardware, make_parser, report
from synthetic_model import Demo, Watched

from hotset.base.config import EngineConfig, TiersMode
from hotset.base.errors import HotsetError

OFF: TiersMode = "off"
AUTO: TiersMode = "auto"

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is run."""

    device_gib: float = 0.6
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    answer: int = 96  # by when all that fit have come in
    timed_steps: int = 4
    burst_steps: int = 32
    after_steps: int = 64
    overhead_steps: int = 128
    overload_gib: float = 0.12


QUICK = Sizes(0.3, (512, 4096), 64, 2, 16, 40, 32, 0.06)


@dataclass(frozen=True, slots=True)
class Bar:
    """One target and what was measured against it."""

    what: str
    measured: float
    bar: float
    at_least: bool = False

    def row(self) -> dict[str, Any]:
        met = self.measured >= self.bar if self.at_least else self.measured <= self.bar
        sign = ">=" if self.at_least else "<="
        return {"target": self.what, "measured": self.measured, "bar": f"{sign} {self.bar:g}", "met": met}


def crowd(demo: Demo, tiers: TiersMode, length: int, sizes: Sizes) -> dict[str, Any]:
    """How many contexts of `length` decode at once where more than fit are waiting, and how fast they are."""
    run = Watched(demo, tiers, sizes.device_gib, length)
    predicted = run.budget.requests(length)
    for _ in range(predicted + max(2, predicted // 8)):
        run.add(length - sizes.answer, sizes.answer)
    oldest, peak = run.requests[0], 0
    while oldest.max_length - len(oldest.tokens) > sizes.timed_steps + 2:
        run.step()
        peak = max(peak, run.decoding)
    run.step(computes=True)
    before, seconds = run.engine.stats(), sum(run.step(computes=True) for _ in range(sizes.timed_steps))
    stats, geometry = run.engine.stats(), run.budget.geometry
    return {
        "context": length,
        "tiers": tiers,
        "pages each": geometry.resident_pages(length) if tiers == OFF else geometry.tiered_pages(length),
        "predicted": predicted,
        "decoding": peak,
        "tiered": stats.tiered,
        "parks": stats.parks,
        "ms/step": seconds / sizes.timed_steps * 1e3,
        "tokens/s": (stats.tokens_generated - before.tokens_generated) / seconds,
    }


def crowds(demo: Demo, sizes: Sizes) -> tuple[Rows, list[Bar]]:
    rows = [crowd(demo, tiers, length, sizes) for length in sizes.lengths for tiers in (OFF, AUTO)]
    counts = {(row["context"], row["tiers"]): row["decoding"] for row in rows}
    ratios = {length: counts[length, AUTO] / counts[length, OFF] for length in sizes.lengths}
    as_predicted = min(row["decoding"] / row["predicted"] for row in rows)
    bars = [
        Bar("least auto / off, any context", min(ratios.values()), 1, at_least=True),
        Bar("least decoding / predicted", as_predicted, 0.95, at_least=True),
    ]
    far = 16 * 2 * demo.kv_shape.topk
    if far in ratios:
        bars.insert(0, Bar(f"auto / off at {far} tokens", ratios[far], 3.5, at_least=True))
    return rows, bars


def burst(demo: Demo, sizes: Sizes) -> tuple[Rows, list[Bar]]:
    """One row per step, from the arrival of the burst on: both engines took it in turns with the same survivors."""
    gib, length, survivors, guests = 0.15, 1536, 4, 5
    runs = {tiers: Watched(demo, tiers, gib, 4096) for tiers in (OFF, AUTO)}
    for run in runs.values():
        for _ in range(survivors):
            run.add(length, 4096 - length)
        run.step()
        run.step(computes=True)
    auto, steps = runs[AUTO], []
    for _ in range(guests):
        auto.add(4000, 96)
    since_end: float | None = None  # wall clock, of the steps with tiers alone
    for number in range(sizes.burst_steps + sizes.after_steps):
        if number == sizes.burst_steps:
            since_end = 0.0
            for guest in auto.requests[survivors:]:
                auto.engine.abort(guest.request_id)
        start = time.perf_counter()
        spent, decoding = auto.step(computes=True), auto.decoding
        wall = time.perf_counter() - start
        off = runs[OFF].step(computes=True)
        tiered = auto.engine.stats().tiered
        steps.append(
            {
                "auto ms": spent * 1e3,
                "off ms": off * 1e3,
                "decoding": decoding,
                "tiered": tiered,
                "since end": since_end,
            }
        )
        since_end = None if since_end is None else since_end + wall
    assert steps[sizes.burst_steps]["tiered"] == survivors, "the burst did not demote those that were there"
    seconds, since = recovery(steps)
    return steps, [
        Bar("s from the end of a burst to within 5 % of off", seconds, 2),
        Bar("auto / off, from then on", since, 1.05),
    ]


def recovery(steps: Rows, window: int = 8) -> tuple[float, float]:
    """Seconds from the burst's end until the median of the last `window` steps was within 5 % of off; and the median of
    all steps since. Infinite, both, if that never happened."""
    late = [step for step in steps if step["since end"] is not None]
    ratios = [step["auto ms"] / step["off ms"] for step in late]
    for end in range(window, len(late)):
        if statistics.median(ratios[end - window : end]) <= 1.05:
            return late[end]["since end"], statistics.median(ratios[end:])
    return float("inf"), float("inf")


def overhead(demo: Demo, sizes: Sizes) -> tuple[Rows, list[Bar]]:
    """Eight resident requests in either engine, a step of each in turns, who goes first alternating."""
    requests, page_rows = 8, EngineConfig().page_rows
    runs = {tiers: Watched(demo, tiers, 0.2, 1024) for tiers in (OFF, AUTO)}
    for run in runs.values():
        for number in range(requests):
            run.add(560 + number * page_rows // requests, 400)  # they fill their pages at different steps
        run.step()
        run.step(computes=True)
    times: dict[tuple[str, bool], list[float]] = {(tiers, fills): [] for tiers in runs for fills in (False, True)}
    for number in range(sizes.overhead_steps):
        fills = any((request.num_scheduled + 1) % page_rows == 0 for request in runs[AUTO].requests)
        for tiers in (OFF, AUTO) if number % 2 else (AUTO, OFF):
            times[tiers, fills].append(runs[tiers].step(computes=True))
    stats = runs[AUTO].engine.stats()
    assert stats.resident == requests and not stats.demotions, "not everything was resident"
    # A page that fills is copied to the host. Medians would pass over those steps: they are taken apart, then added.
    spent = {t: sum(len(each) * statistics.median(each) for (of, _), each in times.items() if of == t) for t in runs}
    rows = [
        {
            "tiers": tiers,
            "ms/step": spent[tiers] / sizes.overhead_steps * 1e3,
            "ms, no page fills": statistics.median(times[tiers, False]) * 1e3,
            "ms, one fills": statistics.median(times[tiers, True]) * 1e3,
            "ratio": spent[tiers] / spent[OFF],
        }
        for tiers in runs
    ]
    return rows, [Bar("auto / off, everything resident", spent[AUTO] / spent[OFF], 1.03)]


def overload(demo: Demo, prompt: int, answer: int, gib: float, sustained: bool) -> dict[str, Any]:
    """Four times as many requests as fit, until the last has ended. Sustained: whoever ends is followed by another
    until as many again have come, and the first wave, which met an empty engine, is not counted."""
    run = Watched(demo, AUTO, gib, prompt + answer)
    fit = run.budget.requests(prompt + answer)
    for _ in range(4 * fit):
        run.add(prompt, answer)
    waits, steps = [0] * len(run.requests), 0
    while not run.engine.idle:
        before = [len(request.tokens) for request in run.requests]
        run.step()
        steps += 1
        for number, request in enumerate(run.requests):
            waits[number] += len(request.tokens) == before[number] < request.max_length
        ended = sum(len(request.tokens) >= request.max_length for request in run.requests)
        while sustained and len(waits) < min(4 * fit + ended, 8 * fit):
            run.add(prompt, answer)
            waits.append(0)
    waits = waits[4 * fit :] if sustained else waits
    stats = run.engine.stats()
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
        "most of one": max(request.parks for request in run.requests),
        "recomputes": stats.recomputes,
    }


def overloads(demo: Demo, sizes: Sizes) -> tuple[Rows, list[Bar]]:
    rows = [
        overload(demo, prompt, answer, sizes.overload_gib, sustained)
        for sustained in (True, False)
        for prompt, answer in ((900, 124), (256, 256))
    ]
    bars = [
        Bar(f"max / mean wait, {row['load']}, {row['prompt']} + {row['answer']} tokens", row["max / mean"], 2)
        for row in rows
    ]
    return rows, [*bars, Bar("most parks of one request", max(row["most of one"] for row in rows), 3)]


def draw(path: Path, by_length: Rows, by_step: Rows) -> None:
    """Draws into `path`. ImportError without matplotlib, which is not needed for the figures in numbers."""
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
    speed.set(title="Tokens/s of one core", ylim=(0, None))
    for axes in (requests, speed):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False)
        axes.set_xlabel("context, in tokens")
    latency.set(title="A burst: ms between tokens (off: no burst)", xlabel="step", ylim=(0, None))
    for axes in (requests, speed, latency):
        axes.legend()
    figure.savefig(path, dpi=120)


def burst_table(steps: Rows) -> Rows:
    """The steps of a burst in three lines: before it is over, until all are resident again, from then on."""
    during = [step for step in steps if step["since end"] is None]
    late = [step for step in steps if step["since end"] is not None]
    tiered, resident = ([s for s in late if bool(s["tiered"]) == still] for still in (True, False))
    return [
        {
            "while": name,
            "steps": len(part),
            "decoding": max(step["decoding"] for step in part),
            "auto ms": statistics.median(step["auto ms"] for step in part),
            "off ms": statistics.median(step["off ms"] for step in part),
            "ratio": statistics.median(step["auto ms"] / step["off ms"] for step in part),
        }
        for name, part in (("burst", during), ("coming back", tiered), ("resident again", resident))
        if part
    ]


def write_json(path: Path, parts: dict[str, Rows], loads: tuple[float, float]) -> None:
    context = {
        "title": "Capacity and cost of tiers",
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "load average before and after": loads,
        "results": parts,
    }
    path.write_text(json.dumps(context, indent=2) + "\n")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="models/demo-dsa", help="directory of a sparse-attention model")
    parser.add_argument("--png", type=Path, help="also draw the results into this file (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="a smaller run, less sure of its ratios")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = QUICK if options.quick else Sizes()
    started, load_before = time.perf_counter(), os.getloadavg()[0]
    try:
        demo = Demo(options.model)
    except HotsetError as error:
        sys.exit(f"error: {error}")
    made_up = "prompts made up by the stand-in"
    by_length, bars = crowds(demo, sizes)
    report(f"Contexts in {sizes.device_gib} GiB of device memory", by_length, None, f"{made_up}; ms: the demo model's")
    by_step, more = burst(demo, sizes)
    bars += more
    report("Before, during and after a burst", burst_table(by_step), None, f"{made_up}; ms: the demo model's, medians")
    costs, more = overhead(demo, sizes)
    bars += more
    report("Everything resident, in turns", costs, None, f"{made_up}; ms: the demo model's, medians")
    waits, more = overloads(demo, sizes)
    bars += more
    report("Four times as many requests as fit", waits, None, "the stand-in decodes; waits in steps")
    targets = [bar.row() for bar in bars]
    load = load_before, os.getloadavg()[0]
    took = f"{time.perf_counter() - started:.0f} s; load average {load[0]:.1f} before, {load[1]:.1f} after"
    report("Targets", targets, None, took)
    if options.json is not None:
        parts = {"targets": targets, "contexts": by_length, "burst": by_step, "resident": costs, "overload": waits}
        write_json(options.json, parts, load)
    if options.png is not None:
        try:
            draw(options.png, by_length, by_step)
        except ImportError:
            print(f"{options.png} was not drawn: pip install matplotlib", file=sys.stderr)


if __name__ == "__main__":
    main()
