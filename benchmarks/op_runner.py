"""Runs the benchmark of one op: its cases, their bars, another project's timings (--peer), and tunings (--sweep).

The script of an op describes its benchmark by an `OpBenchmark`, and calls `run`. Its docstring is the help text.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_timing import copy_bandwidth, matrix_rate, require_gpu, seconds_of
from peer_timings import PeerTimings, add_peer_option, geometric_mean
from report import Bar, Row, make_parser, report

Seconds = Callable[[Any], float]


@dataclass(frozen=True, slots=True)
class PeerComparison:
    """How `--peer` compares our times with those of another kernel."""

    columns: Sequence[str]  # they identify a row
    mean: float  # the bar of the mean speedup
    slowest: float  # the bar of the speedup in every case
    own: str = "us"  # the column of our times
    counts: Callable[[Row], bool] = lambda row: True  # whether a row counts for the bars
    default: PeerTimings | None = None  # used if --peer is not given


@dataclass(frozen=True, slots=True)
class Sweep:
    """Other tunings of a kernel. Each case returns the seconds of a call with one of them."""

    title: str
    tunings: Mapping[str, Any]
    cases: Mapping[str, Seconds]


@dataclass(frozen=True, slots=True)
class OpBenchmark:
    """The cases of one op, how one is measured, and what is required."""

    doc: str | None
    title: str
    cases: Sequence[Any]
    measure: Callable[[Any], Row | list[Row]]
    quick: Sequence[Any] = ()  # the cases of --quick; () if there is no such option
    bars: Callable[[list[Row]], list[Bar]] = lambda rows: []
    peer: PeerComparison | None = None
    sweeps: Callable[[], Iterator[Sweep]] | None = None
    drawn: Sequence[str] = ("us",)  # columns that --png draws
    notes: str = ""


def run(op: OpBenchmark, options: argparse.Namespace | None = None) -> None:
    """Measures and reports the cases. A case that fails does not end the run, but the exit status is then 1."""
    options = options or make_options(op).parse_args()
    require_gpu()
    torch.manual_seed(0)
    if getattr(options, "sweep", False):
        assert op.sweeps is not None
        sweep(op.sweeps(), time.monotonic() + options.seconds, options.json)
        return
    end, failed = time.monotonic() + options.seconds, []
    rows: list[Row] = []
    for case in op.quick if getattr(options, "quick", False) else op.cases:
        if time.monotonic() > end:
            print(f"not measured, because {options.seconds:g} s have passed: {case}", flush=True)
            continue
        try:
            measured = op.measure(case)
        except (ArithmeticError, RuntimeError) as error:
            failed.append(f"{case}: {error}")
            print(f"failed: {failed[-1]}", flush=True)
            continue
        for row in measured if isinstance(measured, list) else [measured]:
            print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
            rows.append(row)
    if rows:
        show(op, rows, options)
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


def make_options(op: OpBenchmark) -> argparse.ArgumentParser:
    parser = make_parser(op.doc)
    parser.add_argument("--png", type=Path, help="also draw the results to this file (requires matplotlib)")
    parser.add_argument("--seconds", type=float, default=560.0, help="begin no further case after this time")
    if op.quick:
        parser.add_argument("--quick", action="store_true", help=f"only {len(op.quick)} of {len(op.cases)} cases")
    if op.sweeps is not None:
        parser.add_argument("--sweep", action="store_true", help="print the times of other tunings instead")
    if op.peer is not None:
        add_peer_option(parser, op.peer.columns)
    return parser


def show(op: OpBenchmark, rows: list[Row], options: argparse.Namespace) -> None:
    """Prints table and bars, with the timings of a peer if there is one. Writes the files of --json and --png."""
    rates = f"copy {copy_bandwidth() * 1e-12:.2f} TB/s, matrix product {matrix_rate() * 1e-12:.0f} TFLOP/s"
    bars, shown, peer = op.bars(rows), rows, None
    if op.peer is not None:
        peer = options.peer or op.peer.default
    if op.peer is not None and peer is not None:
        shown = peer.beside(rows, op.peer.own)
        counted = [row for row in rows if op.peer.counts(row)]
        bars += peer.bars(counted, op.peer.mean, op.peer.slowest, op.peer.own)
    report(op.title, shown, options.json, f"{rates}; {op.notes}" if op.notes else rates)
    if bars:
        bars_json = options.json and options.json.with_name(f"{options.json.stem}-bars.json")
        report("Bars", [bar.row() for bar in bars], bars_json)
    if options.png is not None:
        try:
            draw(op, rows, options.png, peer)
        except ImportError:
            print(f"{options.png} was not drawn: pip install matplotlib", file=sys.stderr)


def draw(op: OpBenchmark, rows: Sequence[Row], path: Path, peer: PeerTimings | None) -> None:
    """Draws one panel for each column in `drawn`. The times of a peer are drawn beside ours."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    named = [key for key in rows[0] if key not in op.drawn and not isinstance(rows[0][key], float)]
    names = ["\n".join(str(row[key]) for key in named) for row in rows]
    size = (0.55 * len(rows) + 3, 3.5 * len(op.drawn))
    figure, grid = pyplot.subplots(len(op.drawn), 1, figsize=size, squeeze=False, sharex=True)
    for axes, column in zip(grid[:, 0], op.drawn, strict=True):
        if op.peer is not None and peer is not None and column == op.peer.own:
            peer.draw(axes, names, rows, column)
            continue
        axes.bar(range(len(rows)), [row[column] if isinstance(row[column], float) else math.nan for row in rows])
        axes.set_xticks(range(len(rows)), names, fontsize=7)
        axes.set_ylabel(column)
    figure.suptitle(f"{op.title}, {torch.cuda.get_device_name()}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def sweep(sweeps: Iterator[Sweep], end: float, json_path: Path | None) -> None:
    """Prints the time of each case with each tuning, the fastest on average first. A tuning that fails is left out."""
    for tried in sweeps:
        rows: list[Row] = []
        for name, tuning in tried.tunings.items():
            if time.monotonic() > end:
                print(f"{tried.title}: no time left for {name}")
                continue
            try:
                times = {f"{case} us": seconds(tuning) * 1e6 for case, seconds in tried.cases.items()}
            except Exception as error:  # a tuning that does not compile or fit must not end the sweep
                print(f"{name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            rows.append({"tuning": name} | times | {"mean us": geometric_mean(list(times.values()))})
            print(rows[-1], flush=True)
        if rows:
            report(tried.title, sorted(rows, key=lambda row: float(row["mean us"])), json_path)


def us(call: Callable[[], object]) -> float:
    """Returns the microseconds of one call."""
    return 1e6 * seconds_of([call])
