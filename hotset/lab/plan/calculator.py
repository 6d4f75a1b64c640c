"""Makes plans for the page /plan: `python -m hotset.lab.plan.calculator MODEL` answers each line of standard input with
a line.

A request is a JSON object with fields of `PlanRequest`, and the answer is a plan, or {"error": MESSAGE}. MODEL is the
model that requests call "served". The server runs this program in a process of its own, because a plan needs torch.
"""

import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, TextIO, cast

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError, DeadlineExceeded, HotsetError
from hotset.base.settings import check_setting_names, check_settings, setting
from hotset.base.units import GIB
from hotset.lab.plan.gpus import GPUS, Machine, find_gpu
from hotset.lab.plan.model_configs import example_names, find_config
from hotset.lab.plan.planner import GOALS, Goal, make_plan

NICENESS = 10  # steps of the engine come first
SERVED = "served"  # the name of the server's own model in a request
CALCULATION_CPU_SECONDS = 20.0  # of one plan; it takes less than 1
MAX_BYTES = 4 << 30  # of the process's own memory; torch takes less than 1 GiB of them
MAX_CHARACTERS = 256
MAX_BITS = 64


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the page asks for."""

    model: str = setting("glm-5.2", "Model.")
    gpu: str = setting("h200", "Type of the GPUs.")
    gpus: int = setting(8, "Number of GPUs.", minimum=1, maximum=64)
    host_gib: float = setting(2048.0, "Free host memory.", minimum=0, maximum=1 << 20, positive=True)
    context: int = setting(32768, "Context length.", minimum=2, maximum=1 << 24)
    max_num_seqs: int = setting(256, "Requests at once, at most.", minimum=1, maximum=1 << 16)
    goal: str = setting("throughput", "What the best split should have.", choices=GOALS)

    def __post_init__(self) -> None:
        for declared in fields(self):
            value, kind = getattr(self, declared.name), type(declared.default)
            if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
                shown = repr(value) if isinstance(value, str | float | None) else type(value).__name__
                raise ConfigError(f"{declared.name} must be of type {kind.__name__}, got {shown:.{MAX_CHARACTERS}}")
            if isinstance(value, str) and len(value) > MAX_CHARACTERS:
                raise ConfigError(f"{declared.name} has {len(value)} characters, and the limit is {MAX_CHARACTERS}")
            if isinstance(value, int) and value.bit_length() > MAX_BITS:
                raise ConfigError(f"{declared.name} has {value.bit_length()} bits, and the limit is {MAX_BITS}")
        check_settings(self)


def calculate(values: Any, served: str | None = None) -> dict[str, Any]:
    """Returns the plan that `values` asks for, with the models and GPUs that can be chosen. Raises HotsetError.

    Only shipped examples and the model `served` can be planned, so that no client learns of other files.
    """
    if not isinstance(values, dict):
        raise ConfigError("a plan is requested by a JSON object")
    if not all(isinstance(name, str) and len(name) <= MAX_CHARACTERS for name in values):
        raise ConfigError(f"the names of a plan's settings are texts of at most {MAX_CHARACTERS} characters")
    check_setting_names("a plan", values, [declared.name for declared in fields(PlanRequest)])
    request = PlanRequest(**values)
    if request.model.lower() in example_names():
        files = find_config(request.model)
    elif request.model == SERVED and served is not None:
        files = find_config(served)
    else:
        examples = ", ".join(example_names())
        raise ConfigError(f"model must be one of the examples ({examples}) or {SERVED!r}, got {request.model!r}")
    machine = Machine(int(request.host_gib * GIB), find_gpu(request.gpu), request.gpus)
    context = min(request.context, files.spec.context)
    config = EngineConfig(max_num_seqs=request.max_num_seqs)
    plan = make_plan(request.model, files, machine, config, (context,), cast(Goal, request.goal))
    return plan.to_json() | {"models": example_names(), "gpus": [gpu.name for gpu in GPUS]}


def answer(line: str, served: str | None) -> str:
    """Returns the answer to one line. Whatever fails, the answer is an error."""
    try:
        signal.setitimer(signal.ITIMER_PROF, CALCULATION_CPU_SECONDS)
        return json.dumps(calculate(json.loads(line), served), allow_nan=False)
    except HotsetError as error:
        return json.dumps({"error": str(error)})
    except Exception as error:
        traceback.print_exc()
        return json.dumps({"error": f"these values cannot be planned ({type(error).__name__}); change them"})
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _on_timeout(signum: int, frame: object) -> None:
    raise DeadlineExceeded(
        f"the plan took more than {CALCULATION_CPU_SECONDS:g} s, which is the limit; change its values"
    )


def main(requests: Iterable[str] = sys.stdin, answers: TextIO = sys.stdout, served: str | None = None) -> None:
    """Answers requests until the input ends."""
    signal.signal(signal.SIGPROF, _on_timeout)
    for line in requests:
        print(answer(line, served), file=answers, flush=True)


if __name__ == "__main__":
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    main(served=sys.argv[1])
