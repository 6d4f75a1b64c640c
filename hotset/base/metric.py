"""Declares statistics as fields of dataclasses. The metadata of a field says how /metrics shows its statistic."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal

METRIC = "metric"  # the key in the metadata of a field


@dataclass(frozen=True, slots=True)
class Metric:
    """How /metrics shows a statistic."""

    kind: Literal["gauge", "counter"]
    name: str
    help: str
    label: str | None = None  # the name of the label, if there is a count for each of its values
    label_values: tuple[str, ...] = ()  # values that are shown even if nothing was counted


def gauge(name: str, help: str, *, of_ranks: bool = False) -> Any:
    """Declares a current number. If `of_ranks`, the live page shows it for each data parallel rank."""
    return field(default=0, metadata={METRIC: Metric("gauge", name, help), "of_ranks": of_ranks})


def counter(name: str, help: str) -> Any:
    """Declares a total since the start."""
    return field(default=0, metadata={METRIC: Metric("counter", name, help)})


def labelled_counter(name: str, help: str, label: str, label_values: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the metadata of a field that holds a total since the start for each value of a label."""
    return {METRIC: Metric("counter", name, help, label, label_values)}


def metrics_of(statistics: Any, kind: Literal["gauge", "counter"]) -> Iterator[tuple[str, Metric]]:
    """Yields the metrics of one kind that the fields of `statistics` declare, with the names of these fields."""
    for declared in fields(statistics):
        metric = declared.metadata.get(METRIC)
        if metric is not None and metric.kind == kind:
            yield declared.name, metric
