"""Compares what `hotset plan` predicts with engines that are started: the requests that run at once.

    python benchmarks/plan_starts.py --json plan_starts.json

Each case starts an engine with random weights and limited KV memory, sends more requests of the same length than are
predicted, and counts how many decode at the same time if no answer ends before all others that fit have begun. The last
case starts an engine with the default memory, and counts the requests that fit into it without computing them. The
second table compares the tokens/s that the cost model predicts with the figures of `serving.py` and `one_rank.py` in
docs/benchmarks-serving.md. On a machine without a GPU, the cases are small, and the second table is the same.

Bars (required results): predicted and admitted requests differ by at most one or 3 %, and tokens/s by at most 15 %.
"""

import gc
import json
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from decode_figures import read_figures
from report import Bar, make_parser, report

from hotset.base.config import EngineConfig
from hotset.base.host_memory import host_memory
from hotset.base.sampling import SamplingParams
from hotset.engine.build import build_engine
from hotset.engine.core import Engine
from hotset.engine.input_processor import InputProcessor
from hotset.lab.plan.capacity import Capacity, plan_capacity
from hotset.lab.plan.gpus import H200, Machine
from hotset.lab.plan.model_configs import EXAMPLES, find_config
from hotset.schedule.request import Phase, Request

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo-dsa"
ANSWER = 12  # tokens of each answer, which are in the last page
# DeepSeek-V3.2 with its first three layers and one with few experts: small weights, and rows of the real size
FOUR_LAYERS = {"num_hidden_layers": 4, "n_routed_experts": 16, "n_group": 1, "topk_group": 1}


@dataclass(frozen=True, slots=True)
class Case:
    """A model, settings of the engine, and the length of all requests."""

    name: str
    model: str
    context: int
    settings: dict[str, Any]
    changes: dict[str, Any] | None = None  # of the model's config.json
    computed: bool = True  # whether requests are computed, or only counted


FP8 = {"kv_dtype": "fp8", "index_dtype": "fp8"}
LONG_CHUNKS = {"max_num_batched_tokens": 4096}  # long prompts in less time
GPU_CASES = (
    Case("Qwen3-8B", "qwen3-8b", 2048, {"device_kv_gib": 4, "tiers": "off"}),
    Case("Llama-3.1-8B", "llama-3.1-8b", 1024, {"device_kv_gib": 4, "tiers": "off"}),
    Case(
        "DeepSeek-V3.2, 4 layers, tiers off",
        "deepseek-v3.2",
        8192,
        {"device_kv_gib": 1, "tiers": "off", **FP8, **LONG_CHUNKS},
        FOUR_LAYERS,
    ),
    Case(
        "DeepSeek-V3.2, 4 layers, tiers",
        "deepseek-v3.2",
        16384,
        {"device_kv_gib": 0.5, "host_kv_gib": 8, **FP8, **LONG_CHUNKS},
        FOUR_LAYERS,
    ),
    Case("demo model, tiers", str(DEMO), 2048, {"device_kv_gib": 0.1, "host_kv_gib": 2}),
    Case("Qwen3-8B, default memory", "qwen3-8b", 32768, {"tiers": "off"}, computed=False),
)
CPU_CASES = (
    Case("demo model, tiers off", str(DEMO), 192, {"device_kv_gib": 0.02, "tiers": "off"}),
    Case("demo model, tiers", str(DEMO), 512, {"device_kv_gib": 0.02, "host_kv_gib": 0.5, "hot_slots": 128}),
)


def config_of(case: Case, folder: Path) -> EngineConfig:
    model = case.model
    if case.changes is not None:
        values = json.loads((EXAMPLES / f"{case.model}.json").read_text())
        values.pop("quantization_config", None)
        (folder / "config.json").write_text(json.dumps(values | case.changes))
        model = str(folder)
    elif not Path(model).is_dir():
        (folder / "config.json").write_text((EXAMPLES / f"{case.model}.json").read_text())
        model = str(folder)
    defaults: dict[str, Any] = {
        "max_num_seqs": 64,
        "prefix_cache": False,
        "load_format": "dummy",
        "plans_in_flight": 1 if case.computed else None,
    }
    return EngineConfig(model=model, max_model_len=case.context, **defaults | case.settings)


def admitted(engine: Engine, offered: int, context: int) -> int:
    """Returns how many of `offered` requests of `context` tokens, which arrive together, decode at once.

    Steps compute prompts in chunks, and meanwhile earlier requests would decode and end. So each answer is held after
    its first token, until every further request waits for memory. Then all held answers are completed together.
    """
    processor = InputProcessor(engine.card, seed=0)
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    requests: list[Request] = []
    for number in range(offered):
        prompt = [5 + (number * 7 + position) % 40 for position in range(context - ANSWER)]
        requests += [choice.to_request() for choice in processor.accept(str(number), prompt, params)]
    for number, request in enumerate(requests):
        engine.replicas[number % len(engine.replicas)].scheduler.add(request)
    steps = -1
    while steps < engine.steps:  # until a call executes no step
        steps = engine.steps
        engine.step()
        for request in requests:
            if request.phase is Phase.DECODE:
                assert request.in_flight == 0, "an answer can be held only if one plan at a time computes it"
                request.max_length = len(request.prompt) + 1  # it has this many tokens, so no step computes more
    stats = engine.stats()
    for request in requests:
        if request.running:
            request.max_length = context
        else:
            engine.abort(request.request_id)
    finished: Counter[str] = Counter()
    while not engine.idle:
        finished.update(engine.step().finished.values())
    assert finished["length"] == stats.running == stats.resident + stats.tiered, "a held answer was not completed"
    return stats.running


def fitting(engine: Engine, planned: Capacity, context: int) -> int:
    """Returns how many requests fit into the memory of the started engine."""
    stats = engine.stats()
    budget = replace(planned.budget, device_pages=stats.device_pages_total, host_pages=stats.host_pages_total)
    return replace(planned, budget=budget).requests(context)


def compare(case: Case, on_gpu: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(case, Path(folder))
        machine = Machine(host_memory().free, H200 if on_gpu else None)
        planned = plan_capacity(config, find_config(config.model), machine)
        expected, began = planned.requests(case.context), time.perf_counter()
        engine = build_engine(config)
        started = time.perf_counter() - began
        try:
            found = (
                admitted(engine, expected + 3, case.context)
                if case.computed
                else fitting(engine, planned, case.context)
            )
        finally:
            engine.close()
    return {
        "case": case.name,
        "context": case.context,
        "predicted": expected,
        "admitted": found,
        "start s": started,
        "all s": time.perf_counter() - began,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=140, help="begin no case after this time")
    options = parser.parse_args()
    on_gpu, began, rows, bars = torch.cuda.is_available(), time.perf_counter(), [], []
    for case in GPU_CASES if on_gpu else CPU_CASES:
        if time.perf_counter() - began > options.seconds:
            print(f"{case.name}: left out, because the time is over", flush=True)
            continue
        row = compare(case, on_gpu)
        print(row, flush=True)
        rows.append(row)
        difference = abs(row["admitted"] - row["predicted"])
        allowed = max(1.0, 0.03 * row["predicted"])
        bars.append(Bar(f"{case.name}: requests too many or too few", difference, allowed))
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    report("Requests at once, predicted and admitted", rows, options.json)
    speeds = []
    for figure in read_figures():
        step = figure.predicted()
        predicted = figure.requests / (step.seconds - step.links_s)  # links were simulated within one GPU
        error = predicted / figure.tokens_per_s - 1
        names = {"model": figure.model, "context": figure.context, "requests": figure.requests, "tiered": figure.tiered}
        speeds.append(
            names | {"measured": figure.tokens_per_s, "predicted": predicted, "error": f"{100 * error:+.1f} %"}
        )
        bars.append(Bar(f"{figure.source}, {figure.model}, {figure.context}: error of tokens/s", abs(error), 0.15))
    report("Tokens/s, predicted and measured by serving.py and one_rank.py on an H200", speeds, None)
    missed = [bar for bar in bars if not bar.met]
    report(
        "Bars",
        [bar.row() for bar in missed or bars[: len(rows)]],
        None,
        f"{len(bars) - len(missed)} of {len(bars)} met",
    )


if __name__ == "__main__":
    main()
