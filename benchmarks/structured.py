"""Measures what structured output costs in decode steps.

    OMP_NUM_THREADS=1 python benchmarks/structured.py --json structured.json
    python benchmarks/structured.py --one-in 32 --model models/demo-dsa          (GPU)
    python benchmarks/structured.py --one-in 32 --config hotset/lab/plan/configs/dsa-50b.json          (GPU)

The first command measures CPU times of the engine's thread, per decode step of the embedded model at batch 8, of which
all answers are JSON by a schema, or none is: "masks" is the time to send the previous tokens to the process that
follows the answers and to upload the masks (other cores compute them meanwhile), "apply" the time to apply them to the
logits, and "share" both together relative to the rest of the step. Bar: the median share is at most 3 %.

With --one-in, one answer of a batch is JSON by the schema, or none is, in turn. The times are those between two steps
by the clock. Bar: the median with the constrained answer is at most 1.03x the median without.

Steps that compute prompts are left out.
"""

import json
import shutil
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import Bar, make_parser, report

from hotset.base.sampling import SamplingParams
from hotset.base.structure import Structure
from hotset.engine import constraints
from hotset.engine.llm import LLM
from hotset.models import sampler

BATCH = 8
ROUNDS = 5  # of --one-in: runs without and with a constrained answer, in turn
DEMO = Path(__file__).resolve().parents[1] / "models" / "demo-dsa"
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}

JSON_LIST = Structure("json_schema", json.dumps(SCHEMA))


class Stopwatch:
    """Adds up the CPU time of a function that it replaces."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.measure(self._function, *arguments, **options)

    def measure(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Adds the time of another function."""
        started = time.thread_time()
        result = function(*arguments, **options)
        self.seconds += time.thread_time() - started
        return result

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def steps_of(llm: LLM, structure: Structure | None, tokens: int, watches: list[Stopwatch]) -> list[list[float]]:
    """Returns the CPU times of each decode step: the whole step, then those of `watches`."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=tokens, structure=structure)
    if structure is None:
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=tokens, ignore_eos=True)
    prompts = [f"Write a JSON list of people, number {number}: " for number in range(BATCH)]
    times = []
    step = llm._engine.step

    def timed_step() -> Any:
        before = llm._engine.stats().tokens_generated
        for watch in watches:
            watch.take()
        started = time.thread_time()
        outputs = step()
        seconds = time.thread_time() - started
        if llm._engine.stats().tokens_generated - before == BATCH:
            times.append([seconds, *(watch.take() for watch in watches)])
        return outputs

    llm._engine.step = timed_step  # type: ignore[method-assign]
    try:
        llm.generate(prompts, params)
    finally:
        llm._engine.step = step  # type: ignore[method-assign]
    return times[BATCH:]  # the first steps build parts of the lexer, and include those of prompts


def measure_all_constrained(options: Namespace) -> None:
    watches = [Stopwatch(constraints.Constraints.masks), Stopwatch(sampler._masked)]
    request, masks = constraints.Constraints.request, watches[0]
    constraints.Constraints.request = lambda *given: masks.measure(request, *given)  # type: ignore[method-assign]
    constraints.Constraints.masks = lambda *given, **named: masks(*given, **named)  # type: ignore[method-assign]
    sampler._masked = watches[1]
    rows, shares = [], []
    with LLM("embedded", progress=False, max_model_len=1024, plans_in_flight=1) as llm:
        for name, structure in (("none", None), ("JSON schema", JSON_LIST)):
            times = steps_of(llm, structure, options.tokens, watches)
            shares = [(masks + apply) / (step - masks - apply) for step, masks, apply in times]
            medians = [1e3 * statistics.median(column) for column in zip(*times, strict=True)]
            row = dict(zip(("step ms", "masks ms", "apply ms"), medians, strict=True))
            rows.append({"structure": name, "steps": len(times), **row, "share %": 100 * statistics.median(shares)})
    bar = Bar("share of masks", statistics.median(shares), 0.03)
    report("structured output, SmolLM2-135M-Instruct, batch 8", rows, options.json, str(bar.row()))


def clock_times(llm: LLM, batch: int, constrained: int, tokens: int) -> list[float]:
    """Returns the seconds between decode steps of `batch` answers, of which the last `constrained` are JSON."""
    free = SamplingParams(temperature=1.0, seed=1, max_tokens=tokens, ignore_eos=True)
    json_list = SamplingParams(temperature=1.0, seed=1, max_tokens=tokens, structure=JSON_LIST)
    params = [free] * (batch - constrained) + [json_list] * constrained
    times: list[float] = []
    step, last = llm._engine.step, [0.0]

    def timed_step() -> Any:
        before = llm._engine.stats().tokens_generated
        outputs = step()
        now = time.perf_counter()
        if llm._engine.stats().tokens_generated - before == batch:
            times.append(now - last[0])
        last[0] = now
        return outputs

    llm._engine.step = timed_step  # type: ignore[method-assign]
    try:
        llm.generate([f"Write a JSON list of people, number {number}: " for number in range(batch)], params)
    finally:
        llm._engine.step = step  # type: ignore[method-assign]
    return times[8:]  # the first steps follow those of prompts


def measure_one_constrained(options: Namespace) -> None:
    batch = options.one_in
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"model": str(options.model)}
        if options.config is not None:
            shutil.copy(options.config, Path(folder, "config.json"))
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(options.model / name, folder)
            settings = {"model": folder, "load_format": "dummy", "device_kv_gib": 4.0, "host_kv_gib": 5.0}
        llm = LLM(**settings, progress=False, max_num_seqs=batch, max_model_len=1024, seed=0)
    by_count: dict[int, list[float]] = {0: [], 1: []}
    with llm:
        clock_times(llm, batch, 1, options.tokens)  # compiles the structure
        for _ in range(ROUNDS):
            for constrained, times in by_count.items():
                times += clock_times(llm, batch, constrained, options.tokens)
    without, with_one = (statistics.median(times) for times in by_count.values())
    rows = [
        {"constrained": count, "steps": len(times), "step ms": 1e3 * statistics.median(times)}
        for count, times in by_count.items()
    ]
    bar = Bar(f"step with one constrained answer in {batch}", with_one / without, 1.03)
    title = f"structured output, {(options.config or options.model).stem}, one answer in {batch}"
    report(title, rows, options.json, str(bar.row()))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--one-in", type=int, help="batch size, of which one answer is constrained")
    parser.add_argument("--model", type=Path, default=DEMO, help="model directory, for --one-in")
    parser.add_argument(
        "--config", type=Path, help="config.json of a model with random weights, with the tokenizer of --model"
    )
    options = parser.parse_args()
    if options.one_in is None:
        measure_all_constrained(options)
    else:
        measure_one_constrained(options)


if __name__ == "__main__":
    main()
