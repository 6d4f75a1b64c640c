"""Measures how many requests of a trace `hotset simulate` simulates per second.

    python benchmarks/simulated_traffic.py mooncake_conversation.jsonl --requests 1000

GLM-5.2 runs as eight data parallel ranks on H200, with 2 TiB of host memory. Requests have the lengths and the rate of
the trace. Time is the CPU time of this process, since other programs take turns with it. It includes making prompts
from the trace, but not reading the file. With `--every-plan`, a second simulation makes the plans that are otherwise
skipped. Its result must be the same.

Bar: 500 requests per second.
"""

import os
import time
from pathlib import Path

from report import make_parser, report

from hotset.base.config import EngineConfig
from hotset.base.units import GIB
from hotset.lab.bench.workload import TraceEntry, read_trace
from hotset.lab.plan.gpus import H200, Machine
from hotset.lab.plan.model_configs import find_config
from hotset.lab.simulate.prompts import arrivals
from hotset.lab.simulate.step_clock import SimulatedClock
from hotset.lab.simulate.traffic import TrafficResult, planned_costs, planned_split, run_traffic, simulated_engine

MODEL = "glm-5.2"
MACHINE = Machine(2048 * GIB, H200, 8)


def simulate(entries: list[TraceEntry], *, every_plan: bool) -> tuple[float, TrafficResult]:
    """Returns the CPU time and the result."""
    files, clock = find_config(MODEL), SimulatedClock()
    capacity = planned_split(MODEL, files, MACHINE, EngineConfig(model=MODEL, max_model_len=131072))
    costs = planned_costs(capacity, files, MACHINE)
    engine = simulated_engine(capacity, files, True, clock, costs, every_plan=every_plan)
    before = time.process_time()
    result = run_traffic(engine, clock, arrivals(entries, 1.0, files.spec.vocab))
    return time.process_time() - before, result


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--every-plan", action="store_true")
    arguments = parser.parse_args()
    entries = read_trace(arguments.trace, 1.0, 1.0)[: arguments.requests]
    seconds, result = simulate(entries, every_plan=False)
    rows = [row("without quiet plans", len(entries), seconds)]
    if arguments.every_plan:
        seconds, expected = simulate(entries, every_plan=True)
        rows.append(row("every plan", len(entries), seconds))
        assert result == expected, "the results differ"
    title = f"{len(entries)} requests, {result.steps:,} steps of one rank, {result.seconds:.0f} s simulated"
    report(title, rows, arguments.json)


def row(plans: str, requests: int, seconds: float) -> dict[str, object]:
    return {
        "plans": plans,
        "CPU s": seconds,
        "requests/s": requests / seconds,
        "load of the machine": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
