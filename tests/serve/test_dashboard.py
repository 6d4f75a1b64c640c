"""Every query of the Grafana dashboard names metrics that exist, with labels that they have."""

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from hotset.engine.client import ReceivedStats
from hotset.engine.outputs import EngineStats
from hotset.engine.ports import HandoffStats
from hotset.fleet.router.metrics import RouterMetrics
from hotset.serve.metrics import Metrics

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana" / "hotset.json").read_text())
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def sample_names() -> set[str]:
    handoff = HandoffStats(
        outcomes={"done": 1}, num_open=0, num_peers=0, nbytes=0, throughput=None, phase_seconds={}, num_retransmits=0,
        dropped={},
    )  # fmt: skip
    stats = EngineStats(slot_lookups={0: 1}, slot_misses={0: 1}, handoff=handoff)
    fleet: Any = SimpleNamespace(workers=[], up=lambda role: [])
    texts = (Metrics().render(ReceivedStats(stats, time.monotonic()), 0.0, "m"), RouterMetrics(fleet).render())
    families = [family for text in texts for family in text_string_to_metric_families(text.decode())]
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}


def test_every_query_names_metrics_that_exist() -> None:
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    queries += [
        variable["query"]["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"
    ]
    used = {name for query in queries for name in re.findall(r"\bhotset_\w+", query)}
    assert len(queries) > 30 and len(used) > 25
    assert used <= sample_names(), f"there are no metrics {used - sample_names()}"
    assert all(query.count("(") == query.count(")") and query.count("{") == query.count("}") for query in queries)


def test_panels_do_not_overlap_and_have_different_ids() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
