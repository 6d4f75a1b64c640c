"""The tables and bars of `decode.py`."""

import argparse
from dataclasses import dataclass, field

from report import Bar, Row, markdown_table, write_json

STEP_BAR, STEP_BAR_REQUESTS, PREFILL_BAR = 1.35, 16, 2.0
ONE_REQUEST_BARS = {"dsa-50b": 1.6}
IDLE_BAR, RESIDENT_BAR, ALL_HITS_BAR = 0.05, 0.98, 1.05
TIERS_BARS = {
    ("deepseek-v3.2", 32768): 2.2,
    ("deepseek-v3.2", 131072): 3.0,
    ("glm-5.2", 32768): 3.2,
    ("glm-5.2", 131072): 5.0,
    ("dsa-50b-dense", 32768): 2.5,
    ("dsa-50b-dense", 131072): 3.8,
}
HIDDEN_COLUMNS = (
    "model",
    "split",
    "misses",
    "p99 ms",
    "collectives",
    "tokens/s with NVLink",
    "finite",
)  # too many for a terminal
SHARED_PAGES_COUNT_FROM = 131072  # the shortest context whose bar counts requests with shared host pages


@dataclass(frozen=True, slots=True)
class Results:
    """All tables of a run."""

    weights: list[Row] = field(default_factory=list)
    prefill: list[Row] = field(default_factory=list)
    serving: list[Row] = field(default_factory=list)
    failures: list[Row] = field(default_factory=list)

    def bars(self) -> list[Bar]:
        bars = [
            Bar(f"{_name(row)}: tokens of a tiered request that differ from a resident one's", row["differ"], 0)
            for row in self.weights
            if row["differ"] is not None
        ]
        if self.serving:
            not_finite = sum(row["finite"] is False for row in self.serving)
            bars.append(Bar("cases with logits that are not finite", not_finite, 0))
        bars += [
            Bar(f"{_name(row)}: prompt of {row['prompt']} / its products", row["seconds / products"], PREFILL_BAR)
            for row in self.prefill
        ]
        plain = [row for row in self.serving if not row["drafts"] and row["misses"]]
        for row in plain:
            what = f"{_name(row)} {row['context']}, {row['requests']} requests"
            if row["tiers"] == "off":
                bars += [Bar(f"{what}: step / bytes", row["step / bytes"], limit) for limit in _step_bars(row)]
                bars += [Bar(f"{what}: the GPU idles", row["idle"], IDLE_BAR)] if row["idle"] is not None else []
            else:
                same = [other["tokens/s"] for other in plain if other["tiers"] == "off" and _same_load(other, row)]
                if same and not row["tiered"]:
                    share = row["tokens/s"] / same[0]
                    bars.append(Bar(f"{what}, all resident: auto / off", share, RESIDENT_BAR, at_least=True))
        return bars + self._bars_of_tiers(plain) + self._bars_without_misses()

    def _bars_of_tiers(self, plain: list[Row]) -> list[Bar]:
        bars = []
        for model, split, context in dict.fromkeys(map(_load, plain)):
            counted = [row for row in plain if _load(row) == (model, split, context) and _counts(row)]
            best = {
                tiers: max((row["tokens/s"] for row in counted if row["tiers"] == tiers), default=None)
                for tiers in ("off", "auto")
            }
            limit = TIERS_BARS.get((model, context))
            if best["off"] and best["auto"] and limit:
                what = f"{model} {split} {context}: best auto / best off"
                bars.append(Bar(what, best["auto"] / best["off"], limit, at_least=True))
        return bars

    def _bars_without_misses(self) -> list[Bar]:
        rows = [row for row in self.serving if not row["misses"]]
        tiered = [row for row in rows if row["tiered"]]
        return [
            Bar(
                f"{_name(row)}: step without misses, tiered / resident", row["step ms"] / other["step ms"], ALL_HITS_BAR
            )
            for row in tiered
            for other in rows
            if not other["tiered"] and _same_load(other, row)
        ]

    def tables(self) -> dict[str, list[Row]]:
        tables = {
            "Weights of one rank": self.weights,
            "Prefill": self.prefill,
            "Decode": self.serving,
            **self._one_request(),
            "Failures": self.failures,
            "Bars": [bar.row() for bar in self.bars()],
        }
        return {title: rows for title, rows in tables.items() if rows}

    def write(self, options: argparse.Namespace) -> None:
        """Writes everything measured so far."""
        if options.json is not None:
            write_json(options.json, "Decode", self.tables())
        if options.markdown is not None:
            parts = [f"## {title}\n\n{markdown_table(flat(rows))}" for title, rows in self.tables().items()]
            if any(row["profile ms"] for row in self.serving):
                parts.append(f"## Profile of a step, ms\n\n{markdown_table(self._profiles())}")
            options.markdown.write_text("\n\n".join(parts) + "\n")

    def _one_request(self) -> dict[str, list[Row]]:
        """Returns the tables of the first profile of one request."""
        row = next((row for row in self.serving if row["requests"] == 1 and row["profile ms"]), None)
        if row is None:
            return {}
        groups = [{"group": group, "ms": ms} for group, ms in row["profile ms"].items()]
        return {"Groups of one request": groups, "Layer of one request": row["layer"]}

    def _profiles(self) -> list[Row]:
        """Returns a row for each case of decode, with a column for each group of kernels."""
        groups = dict.fromkeys(group for row in self.serving for group in row["profile ms"])
        columns = ("context", "tiers", "host pages", "requests", "step ms")
        return [
            {key: row[key] for key in columns} | {group: row["profile ms"].get(group, 0.0) for group in groups}
            for row in self.serving
        ]


def _name(row: Row) -> str:
    return f"{row['model']} {row['split']}"


def _load(row: Row) -> tuple[str, str, int]:
    return row["model"], row["split"], row["context"]


def _same_load(left: Row, right: Row) -> bool:
    return _load(left) == _load(right) and left["requests"] == right["requests"]


def _step_bars(row: Row) -> list[float]:
    """Returns the bar of step / bytes, if there is one."""
    if row["requests"] == 1 and row["model"] in ONE_REQUEST_BARS and row["split"] == "one":
        return [ONE_REQUEST_BARS[row["model"]]]
    return [STEP_BAR] if row["requests"] >= STEP_BAR_REQUESTS else []


def _counts(row: Row) -> bool:
    """Returns whether the row counts for the bars of tiers."""
    if row["host pages"] == "shared prefix":
        return False
    return bool(row["host pages"] != "shared" or row["context"] >= SHARED_PAGES_COUNT_FROM)


def flat(rows: list[Row]) -> list[Row]:
    """Returns the rows without nested values."""
    return [{key: value for key, value in row.items() if not isinstance(value, dict | list)} for row in rows]
