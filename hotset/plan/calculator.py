"""Makes plans for the page /plan: `python -m hotset.plan.calculator` answers each line of standard input with a line.

A request is a JSON object with fields of `PlanRequest`, and the answer is a plan, or {"error": MESSAGE}. The server
runs this program in a process of its own, because a plan needs torch.
"""

import json
import os
import sys
from dataclasses import dataclass, fields
from typing import Any, TextIO, cast

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError, HotsetError
from hotset.base.settings import check_setting_names, check_settings, setting
from hotset.base.units import GIB
from hotset.plan.gpus import GPUS, Machine, find_gpu
from hotset.plan.model_configs import example_names, find_config
from hotset.plan.planner import GOALS, Goal, make_plan

NICENESS = 10  # steps of the engine come first


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the page asks for."""

    model: str = setting("glm-5.2", "Model.")
    gpu: str = setting("h200", "Type of the GPUs.")
    gpus: int = setting(8, "Number of GPUs.", minimum=1, maximum=64)
    host_gib: float = setting(2048.0, "Free host memory.", positive=True)
    context: int = setting(32768, "Context length.", minimum=2, maximum=1 << 24)
    max_num_seqs: int = setting(256, "Requests at once, at most.", minimum=1, maximum=1 << 16)
    goal: str = setting("throughput", "What the best split should have.", choices=GOALS)

    def __post_init__(self) -> None:
        for declared in fields(self):
            value, kind = getattr(self, declared.name), type(declared.default)
            if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
                raise ConfigError(f"{declared.name} must be of type {kind.__name__}, got {value!r}")
        check_settings(self)


def calculate(values: Any) -> dict[str, Any]:
    """Returns the plan that `values` asks for, with the models and GPUs that can be chosen. Raises HotsetError."""
    if not isinstance(values, dict):
        raise ConfigError("a plan is requested by a JSON object")
    check_setting_names("a plan", values, [declared.name for declared in fields(PlanRequest)])
    request = PlanRequest(**values)
    files = find_config(request.model)
    machine = Machine(int(request.host_gib * GIB), find_gpu(request.gpu), request.gpus)
    context = min(request.context, files.spec.context)
    config = EngineConfig(max_num_seqs=request.max_num_seqs)
    plan = make_plan(request.model, files, machine, config, (context,), cast(Goal, request.goal))
    return plan.to_json() | {"models": example_names(), "gpus": [gpu.name for gpu in GPUS]}


def main(requests: TextIO = sys.stdin, answers: TextIO = sys.stdout) -> None:
    """Answers requests until the input ends."""
    for line in requests:
        try:
            answer = calculate(json.loads(line))
        except HotsetError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    os.nice(NICENESS)
    main()
