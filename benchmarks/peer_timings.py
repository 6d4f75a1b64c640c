"""Timings of another project's kernel beside our own: the option `--peer FILE` of kernel benchmarks.

The program that runs the other kernel writes the file. Both should run on the same GPU and with the same inputs:

    {"name": "FlashMLA", "timings": [{"batch": 1, "heads": 64, "rows": "fp8", "us": 12.3}]}

The fields of a timing, except "us", are columns of the benchmark's table. They say to which row it belongs.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import Bar


@dataclass(frozen=True, slots=True)
class PeerTimings:
    """The microseconds of another kernel. The other fields of a timing are columns of our table."""

    name: str
    timings: Sequence[Mapping[str, Any]]

    def us_of(self, row: Mapping[str, Any]) -> float | None:
        """Returns the microseconds of the timing that belongs to `row`, or None if there is none."""
        for timing in self.timings:
            if all(row.get(column) == value for column, value in timing.items() if column != "us"):
                return float(timing["us"])
        return None

    def beside(self, rows: Sequence[dict[str, Any]], own: str = "us") -> list[dict[str, Any]]:
        """Returns `rows` with the peer's times, and with the speedup: the peer's time / the time in column `own`."""
        return [row | self._columns(row, own) for row in rows]

    def _columns(self, row: Mapping[str, Any], own: str) -> dict[str, Any]:
        us = self.us_of(row)
        return {f"{self.name} us": "-" if us is None else us, "speedup": "-" if us is None else us / row[own]}

    def bars(self, rows: Sequence[Mapping[str, Any]], mean: float, slowest: float, own: str = "us") -> list[Bar]:
        """Returns the bars of all rows that the peer has timed: for the mean speedup, and for the lowest one."""
        speedups = [us / row[own] for row in rows if (us := self.us_of(row)) is not None]
        if not speedups:
            return []
        what = f"speedup against {self.name}"
        return [
            Bar(f"{what}, geometric mean of {len(speedups)} cases", geometric_mean(speedups), mean, at_least=True),
            Bar(f"{what}, slowest case", min(speedups), slowest, at_least=True),
        ]

    def draw(self, axes: Any, names: Sequence[str], rows: Sequence[Mapping[str, Any]], own: str = "us") -> None:
        """Draws the times of both kernels side by side into matplotlib's `axes`, on a logarithmic scale."""
        ticks = range(len(rows))
        theirs = [math.nan if (us := self.us_of(row)) is None else us for row in rows]
        axes.bar([x - 0.2 for x in ticks], [row[own] for row in rows], 0.4, label="Hotset")
        axes.bar([x + 0.2 for x in ticks], theirs, 0.4, label=self.name)
        for x, row, us in zip(ticks, rows, theirs, strict=True):
            if not math.isnan(us):
                axes.annotate(f"{us / row[own]:.2f}x", (x, max(us, row[own])), ha="center", va="bottom", fontsize=7)
        axes.set_xticks(list(ticks), names, fontsize=7)
        axes.set(yscale="log", ylabel="us")
        axes.legend()


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def read_peer(path: Path, columns: Sequence[str]) -> PeerTimings:
    """Reads a file of timings. `columns` identify a row. Raises ValueError if the file is not as described above."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("name"), str) or not content.get("timings"):
        raise ValueError(f'{path}: expected {{"name": ..., "timings": [...]}}')
    expected = {*columns, "us"}
    for number, timing in enumerate(content["timings"]):
        if not isinstance(timing, dict) or set(timing) != expected:
            raise ValueError(f"{path}: timing {number} must have the fields {', '.join(sorted(expected))}")
        us = timing["us"]
        if not isinstance(us, int | float) or not 0 < us < math.inf:
            raise ValueError(f"{path}: timing {number}: us must be a positive number, not {us!r}")
    return PeerTimings(content["name"], content["timings"])


def add_peer_option(parser: argparse.ArgumentParser, columns: Sequence[str]) -> None:
    def peer(path: str) -> PeerTimings:
        try:
            return read_peer(Path(path), columns)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    example = json.dumps({"name": "Peer", "timings": [dict.fromkeys(columns, "...") | {"us": 12.3}]})
    parser.add_argument(
        "--peer", type=peer, metavar="FILE", help=f"also compare with another kernel's timings, as JSON: {example}"
    )
