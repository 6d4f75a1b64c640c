"""What `serving.py` makes of its measurements: bars, the comparison with the prefix cache, and the figure."""

import statistics
from pathlib import Path
from typing import Any

import matplotlib
from report import Bar

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Rows = list[dict[str, Any]]

REUSE = "auto, shared prefix"  # in column "tiers": tiers auto with the prefix cache


def rows_of(rows: Rows, model: str, context: int, tiers: str) -> Rows:
    return [row for row in rows if (row["model"], row["context"], row["tiers"]) == (model, context, tiers)]


def best_of(rows: Rows, model: str, context: int, tiers: str) -> dict[str, Any]:
    """Returns the row with the highest tokens/s."""
    return max(rows_of(rows, model, context, tiers), key=lambda row: float(row["tokens/s"]))


def bars(rows: Rows, without_misses: Rows) -> list[Bar]:
    off = [row for row in rows if row["tiers"] == "off"]
    results = [
        Bar("tiers off: highest step / bytes", max(row["step / bytes"] for row in off), 1.3),
        Bar("tiers off: highest share of a step in which the GPU idles", max(row["idle"] for row in off), 0.05),
    ]
    for model, context in sorted({(row["model"], row["context"]) for row in rows}):
        matching = [row for row in rows if (row["model"], row["context"]) == (model, context)]
        best = {tiers: best_of(rows, model, context, tiers)["tokens/s"] for tiers in ("off", "auto")}
        limit = {32768: 1.8, 131072: 3.0}.get(context, 1.0) if model.endswith("dense") else 1.0
        name = f"{model} {context}"
        results.append(Bar(f"{name}: best auto / best off", best["auto"] / best["off"], limit, at_least=True))
        resident_ratios = []
        for row in matching:
            if row["tiers"] == "auto" and not row["tiered"]:
                same = [other["tokens/s"] for other in off if same_load(other, row)]
                resident_ratios += [row["tokens/s"] / statistics.mean(same)] if same else []
        if resident_ratios:
            what = f"{name}: lowest auto / off while all requests are resident"
            results.append(Bar(what, min(resident_ratios), 0.98, at_least=True))
        share = best_of(rows, model, context, "auto")["of predicted"]
        results.append(Bar(f"{name}: best with tiers, of predicted", share, 0.8, at_least=True))
    for resident, tiered in zip(without_misses[::2], without_misses[1::2], strict=True):
        what = f"{resident['model']}: step of {resident['requests']} requests, tiered without misses / resident"
        results.append(Bar(what, tiered["step ms"] / resident["step ms"], 1.05))
    return results


def reuse_rows(rows: Rows) -> Rows:
    """Returns a comparison of requests at once and tokens/s without and with the prefix cache."""
    loads = dict.fromkeys((row["model"], row["context"]) for row in rows if row["tiers"] == REUSE)
    table = []
    for model, context in loads:
        without, reused = (best_of(rows, model, context, tiers) for tiers in ("auto", REUSE))
        row: dict[str, Any] = {"model": model, "context": context}
        for key in ("requests", "tokens/s"):
            row |= {
                f"{key}, auto": without[key],
                f"{key}, reuse": reused[key],
                f"{key}, ratio": reused[key] / without[key],
            }
        table.append(row)
    return table


def same_load(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return all(left[key] == right[key] for key in ("model", "context", "requests"))


def by_requests(rows: Rows, model: str, context: int, tiers: str) -> dict[str, list[float]]:
    """Returns the columns of one line of the figure. The two runs of `off` are averaged."""
    matching = rows_of(rows, model, context, tiers)
    counts = sorted({row["requests"] for row in matching})
    runs = [[row for row in matching if row["requests"] == count] for count in counts]
    columns = {key: [statistics.mean(row[key] for row in run) for run in runs] for key in ("p50 ms", "p99 ms")}
    columns["tokens/s"] = [statistics.mean(row["tokens/s"] for row in run) for run in runs]
    columns["predicted"] = [statistics.mean(row["tokens/s"] / row["of predicted"] for row in run) for run in runs]
    return columns | {"requests": counts}


def draw(rows: Rows, path: Path) -> None:
    """Draws tokens/s and time between tokens. The label is the best tokens/s with tiers auto over the best with off."""
    keys = list(dict.fromkeys((row["model"], row["context"]) for row in rows))
    size = (3.4 * len(keys), 5.6)
    figure, axes = plt.subplots(2, len(keys), figsize=size, layout="constrained", squeeze=False, sharex="col")
    for (speed, latency), (model, context) in zip(axes.T, keys, strict=True):
        best = {}
        for tiers, colour in (("auto", "#1f77b4"), ("off", "#888888")):
            line = by_requests(rows, model, context, tiers)
            counts = line["requests"]
            speed.plot(counts, line["predicted"], ":", color=colour, label=f"{tiers}, predicted")
            speed.plot(counts, line["tokens/s"], "o-", color=colour, label=f"tiers {tiers}")
            latency.plot(counts, line["p50 ms"], "o-", color=colour, label=f"tiers {tiers}, p50")
            latency.plot(counts, line["p99 ms"], ":", color=colour, label=f"{tiers}, p99")
            best[tiers] = best_of(rows, model, context, tiers)
        ratio = f"{best['auto']['tokens/s'] / best['off']['tokens/s']:.1f}x"
        style = {"textcoords": "offset points", "ha": "right", "va": "top", "weight": "bold", "color": "#1f77b4"}
        speed.annotate(ratio, (best["auto"]["requests"], best["auto"]["tokens/s"]), (6, -24), **style)
        speed.set(title=f"{model}, {context // 1024}k", xlim=(0, None), ylim=(0, None))
        latency.set(xlabel="requests", ylim=(0, None))
    axes[0, 0].set_ylabel("tokens/s")
    axes[1, 0].set_ylabel("ms between tokens")
    for axis in axes[:, 0]:
        axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
