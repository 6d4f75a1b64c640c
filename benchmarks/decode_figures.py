"""Measured decode steps on one H200, from docs/benchmarks-serving.md ("Serving a 50B model", "One rank of eight of a
full-size model"). `fit_costs.py` fits the cost model of `hotset plan` to these steps, and a test compares the
predictions with the measurements.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from hotset.base.config import EngineConfig
from hotset.engine.model_checks import hot_slots
from hotset.lab.plan.costs import RankCosts, StepTime
from hotset.lab.plan.gpus import H200
from hotset.lab.plan.model_configs import EXAMPLES
from hotset.models.attention.dsa_spec import MlaSpec
from hotset.models.families import read_spec
from hotset.models.spec import ModelSpec
from hotset.models.split import Split

FIGURES = Path(__file__).with_suffix(".json")


@dataclass(frozen=True, slots=True)
class Figure:
    """The measured speed of requests that decode at once, with fp8 rows and keys and twice top-k slots."""

    source: str
    model: str
    context: int
    requests: int
    tiered: int
    tokens_per_s: float
    ranks: int = 1  # data parallel ranks. One was measured; collectives moved their bytes within its GPU
    layers_per_indexer: int | None = None  # instead of the configuration's

    def spec(self) -> ModelSpec:
        path = EXAMPLES / f"{self.model}.json"
        spec = read_spec(json.loads(path.read_text()), {}, str(path))
        assert isinstance(spec.attention, MlaSpec)
        if self.layers_per_indexer is None:
            return spec
        layers = tuple(range(0, spec.layers, self.layers_per_indexer))
        return replace(spec, attention=replace(spec.attention, index=replace(spec.attention.index, full_layers=layers)))

    def predicted(self) -> StepTime:
        import torch

        from hotset.models.decoder import worker_kv_shape
        from hotset.models.spec import KvStorage

        spec, split = self.spec(), Split(dp_size=self.ranks)
        shape = worker_kv_shape(spec, torch.bfloat16, KvStorage(fp8_rows=True, fp8_keys=True), split)
        costs = RankCosts(spec, split, shape, H200, hot_slots(EngineConfig(), shape.topk), 2)
        return costs.decode(self.requests, self.context, self.tiered)

    @property
    def step_s(self) -> float:
        return self.requests / self.tokens_per_s


def read_figures() -> list[Figure]:
    return [Figure(**values) for values in json.loads(FIGURES.read_text())]
