"""Graphs on a CPU: a replay computes again what was captured. Tensors that graphs read and write, padding, and the
choice of graphs are as on a GPU.

CPU kernels know no padding, and read page tables on the host. Padding tokens are therefore tokens of a spare seat, the
last one of the engine, with pages of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import make_engine
from torch import Tensor

from hotset.engine import build_runner
from hotset.engine.core import Engine
from hotset.engine.decode_graphs import DecodeGraphs, StepGraph
from hotset.engine.runner import Runner, SubmittedStep
from hotset.engine.workers.executor import InProcessExecutor
from hotset.kernels import EMPTY
from hotset.kernels.segments import Segments
from hotset.memory.pages import PageAllocator
from hotset.memory.resident import Batch, ResidentView
from hotset.models.decoder import Decoder
from hotset.models.spec import ModelSpec
from hotset.schedule.plan import Plan
from hotset.tiers.kv_memory import KvMemory


@dataclass(frozen=True)
class EmulatedGraph:
    replay: Callable[[], None]


def _captured_view(
    memory: KvMemory, seat_of: Tensor, positions: Tensor, tiered_tokens: int, stamps: Tensor | None = None
) -> ResidentView:
    spare = memory.tables.tiered.shape[0] - 1
    seats = torch.where(seat_of == EMPTY, spare, seat_of)
    tokens = seats.shape[0]
    segments = Segments((1,) * tokens, (positions + 1).tolist(), positions, torch.arange(tokens))
    return memory._view(Batch(seats.tolist(), segments, seats, stamps), tiered_tokens)


def emulate_graphs(monkeypatch: pytest.MonkeyPatch) -> list[StepGraph | None]:
    """Lets engines on a CPU capture graphs. Returns a list to which each later step adds the graph that computed it."""
    submit: Callable[..., SubmittedStep] = Runner.submit
    graphs: list[StepGraph | None] = []

    def recorded(runner: Runner, plan: Plan, graph: StepGraph | None = None) -> SubmittedStep:
        if plan.seats:
            graphs.append(graph)
        return submit(runner, plan, graph)

    monkeypatch.setattr(build_runner, "captures_graphs", lambda config, model: True)
    monkeypatch.setattr(DecodeGraphs, "_record", lambda graphs, compute: EmulatedGraph(compute))
    monkeypatch.setattr(KvMemory, "captured_view", _captured_view)
    monkeypatch.setattr(Runner, "submit", recorded)
    return graphs


def make_engine_with_graphs(model: Decoder, spec: ModelSpec, *, requests: int, **settings: Any) -> Engine:
    """Returns an engine for at most `requests` requests."""
    engine = make_engine(model, spec, max_num_seqs=requests + 1, **settings)
    assert isinstance(engine.executor, InProcessExecutor)
    ledger, tables = engine.schedulers[0].ledger, engine.executor.memory.tables
    first = ledger.device.capacity - 2
    ledger.device = PageAllocator(first)  # the last two pages are those of padding
    tables.extend_rows(requests, 0, [first] * tables.rows.shape[1])  # a selection of any position finds a row
    tables.extend_keys(requests, 0, [first + 1])
    return engine
