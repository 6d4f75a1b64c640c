"""Draws charts as SVG: panels with lines, points and bars. Needs no other package."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

WIDTH = 1000
COLUMNS = 2
PANEL_HEIGHT = 250
TITLE_HEIGHT = 58
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 34, 42  # margins inside a panel
TICKS = 5
INK, SOFT, GRID = "#1a1a1a", "#6b6b6b", "#e6e6e6"
STYLE = (
    f"text{{font:12px system-ui,sans-serif;fill:{INK}}}"
    f".soft{{fill:{SOFT};font-size:11px}}"
    ".head{font-weight:600;font-size:13px}"
)
LOG_DECADES = 4  # the largest range of a logarithmic axis

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points. `labels` are shown beside the points of the same index; an empty one is not shown."""

    points: Sequence[Point]
    colour: str
    name: str = ""  # in the legend; a line without a name has no entry
    dashed: bool = False
    dots: bool = False
    labels: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Bar:
    """A horizontal bar from `start` to `end` in row `row`."""

    row: int
    start: float
    end: float
    colour: str
    tooltip: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart. Its axes begin at 0 and hold all lines and bars, unless `x_max` cuts them off.

    A logarithmic x axis begins at `x_min`, which must be above 0. `x_names` are shown at 1, 2, … instead of numbers.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line] = ()
    bars: Sequence[Bar] = ()
    x_max: float | None = None
    x_min: float | None = None  # of a logarithmic axis; None: the axis is linear
    x_names: Sequence[str] = ()
    wide: bool = False  # as wide as the page
    legend: Sequence[tuple[str, str]] = field(default=())  # name and colour, for bars

    @property
    def maxima(self) -> Point:
        xs = [x for line in self.lines for x, _ in line.points] + [bar.end for bar in self.bars]
        ys = [y * 1.05 for line in self.lines for _, y in line.points] + [bar.row + 1.0 for bar in self.bars]
        x_max = self.x_max if self.x_max is not None else max(xs, default=1.0)
        return (x_max or 1.0, max(ys, default=1.0) or 1.0)


def ticks(limit: float) -> list[float]:
    """Returns round numbers from 0 up to `limit`, at most TICKS + 1 of them."""
    step = limit / TICKS
    power = 10.0 ** math.floor(math.log10(step))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * (1 - 1e-9))
    return [index * step for index in range(int(limit / step * (1 + 1e-9)) + 1)]


def log_ticks(first: float, last: float) -> list[float]:
    """Returns 1, 2 and 5 times the powers of ten that lie between two numbers."""
    powers = range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)
    values = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return [value for value in values if first <= value <= last]


def page(title: str, subtitle: str, panels: Iterable[Panel]) -> str:
    """Returns an SVG document with the panels in rows of two. A wide panel has a row of its own."""
    parts: list[str] = []
    column, top = 0, TITLE_HEIGHT
    for panel in panels:
        if panel.wide and column:
            column, top = 0, top + PANEL_HEIGHT
        width = WIDTH if panel.wide else WIDTH // COLUMNS
        parts.append(f'<g transform="translate({column * WIDTH // COLUMNS},{top})">{_panel(panel, width)}</g>')
        column = (column + (COLUMNS if panel.wide else 1)) % COLUMNS
        top += PANEL_HEIGHT if column == 0 else 0
    height = top + (PANEL_HEIGHT if column else 0) + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#ffffff"/>'
        f'<text x="20" y="28" style="font-size:17px;font-weight:600">{escape(title)}</text>'
        f'<text x="20" y="47" class="soft">{escape(subtitle)}</text>{"".join(parts)}</svg>\n'
    )


def write_picture(svg: str, title: str, path: Path) -> None:
    """Writes the picture as .svg, or as an .html page that contains it."""
    if path.suffix == ".html":
        title = escape(title)
        svg = f'<!doctype html><meta charset="utf-8"><title>{title}</title><body style="margin:0">{svg}</body>\n'
    path.write_text(svg)


def _panel(panel: Panel, width: int) -> str:
    x_max, y_max = panel.maxima
    right, bottom = width - RIGHT, PANEL_HEIGHT - BOTTOM

    def share(x: float) -> float:
        x = min(x, x_max)
        if panel.x_min is None:
            return x / x_max
        return math.log(max(x, panel.x_min) / panel.x_min) / math.log(x_max / panel.x_min)

    def place(point: Point) -> Point:
        return LEFT + share(point[0]) * (right - LEFT), bottom - point[1] / y_max * (bottom - TOP)

    parts = [f'<text x="{LEFT}" y="20" class="head">{escape(panel.title)}</text>']
    for value, text in _x_ticks(panel, x_max):
        x, _ = place((value, 0.0))
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" class="soft" text-anchor="middle">{escape(text)}</text>')
    for value in ticks(y_max) if not panel.bars else ():
        _, y = place((0.0, value))
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="{GRID}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="soft" text-anchor="end">{_number(value)}</text>')
    parts.append(f'<path d="M{LEFT} {bottom}H{right}" stroke="{SOFT}"/>')
    middle = (LEFT + right) / 2
    parts.append(
        f'<text x="{middle}" y="{bottom + 33}" class="soft" text-anchor="middle">{escape(panel.x_label)}</text>'
    )
    parts.append(
        f'<text transform="translate(14,{(TOP + bottom) / 2}) rotate(-90)" class="soft" text-anchor="middle">'
        f"{escape(panel.y_label)}</text>"
    )
    row_height = (bottom - TOP) / y_max
    for bar in panel.bars:
        (x, y), (end, _) = place((bar.start, bar.row + 1.0)), place((bar.end, 0.0))
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.2f}" width="{max(end - x, 0.5):.1f}" height="{row_height * 0.8:.2f}" '
            f'fill="{bar.colour}"><title>{escape(bar.tooltip)}</title></rect>'
        )
    for line in panel.lines:
        parts += _line(line, [place(point) for point in line.points])
    legend = [*((line.name, line.colour) for line in panel.lines if line.name), *panel.legend]
    return "".join(parts) + _legend(legend, [line.dashed for line in panel.lines if line.name], right)


def _x_ticks(panel: Panel, x_max: float) -> list[tuple[float, str]]:
    if panel.x_names:
        return [(index + 1.0, name) for index, name in enumerate(panel.x_names)]
    values = ticks(x_max) if panel.x_min is None else log_ticks(panel.x_min, x_max)
    return [(value, _number(value)) for value in values]


def _line(line: Line, points: Sequence[Point]) -> list[str]:
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    parts = [f'<path d="{path}" fill="none" stroke="{line.colour}" stroke-width="1.8"{dash}/>'] if points else []
    if line.dots:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{line.colour}"/>' for x, y in points]
    for (x, y), label in zip(points, line.labels, strict=False):
        if label:
            anchor = "end" if x > WIDTH / COLUMNS - 90 else "start"
            shift = -7 if anchor == "end" else 7
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{line.colour}"/>')
            parts.append(
                f'<text x="{x + shift:.1f}" y="{y - 7:.1f}" text-anchor="{anchor}" class="soft">{escape(label)}</text>'
            )
    return parts


def _legend(entries: Sequence[tuple[str, str]], dashed: Sequence[bool], right: float) -> str:
    """Draws the names from right to left at the top of the panel."""
    parts = []
    x = right
    for index in reversed(range(len(entries))):
        name, colour = entries[index]
        x -= len(name) * 6.2
        parts.append(f'<text x="{x:.1f}" y="20" class="soft">{escape(name)}</text>')
        dash = ' stroke-dasharray="5 4"' if index < len(dashed) and dashed[index] else ""
        parts.append(f'<path d="M{x - 19:.1f} 16h14" stroke="{colour}" stroke-width="3"{dash}/>')
        x -= 28
    return "".join(parts)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:g}" if value == 0 else f"{value:.3g}"
