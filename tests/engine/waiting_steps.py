"""Finds steps that make the host wait for the GPU."""

import pytest
import torch

from hotset.engine.decode_graphs import StepGraph
from hotset.engine.runner import Runner, SubmittedStep
from hotset.schedule.plan import Plan
from hotset.tiers.commands import Grant


def forbid_waiting(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Makes a step that a graph computes raise an error if its submission waits for the GPU. Steps with commands other
    than `Grant` are not checked. Returns a list to which each checked step adds its plan."""
    submit, checked = Runner.submit, []

    def submit_without_waiting(runner: Runner, plan: Plan, graph: StepGraph | None = None) -> SubmittedStep:
        if graph is None or not all(isinstance(command, Grant) for command in plan.commands):
            return submit(runner, plan, graph)
        checked.append(plan)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return submit(runner, plan, graph)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Runner, "submit", submit_without_waiting)
    return checked
