"""Measures what structured output costs in decode steps.

    python benchmarks/structured.py --one-in 32 --model models/demo-dsa
    python benchmarks/structured.py --one-in 32 --config hotset/lab/plan/configs/dsa-50b.json          (GPU)

Runs take turns: in every other run, one answer of the batch must be JSON that follows a schema. Times are wall times
between steps. Steps that compute prompts are left out. Bar (required result): the median with the constrained answer is
at most 1.03 times the median without it.
"""

import json
import shutil
import statistics
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from report import Bar, make_parser, report

from hotset.base.sampling import SamplingParams
from hotset.base.structure import Structure
from hotset.engine.llm import LLM

ROUNDS = 5  # runs without and with a constrained answer, in turn
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


def step_seconds(llm: LLM, batch: int, constrained: int, tokens: int) -> list[float]:
    """Returns the seconds between decode steps of `batch` answers. The last `constrained` of them are JSON."""
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
        step_seconds(llm, batch, 1, options.tokens)  # compiles the structure
        for _ in range(ROUNDS):
            for constrained, times in by_count.items():
                times += step_seconds(llm, batch, constrained, options.tokens)
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
    parser.add_argument("--one-in", type=int, default=32, help="batch size, of which one answer is constrained")
    parser.add_argument("--model", type=Path, default=DEMO, help="model directory")
    parser.add_argument(
        "--config", type=Path, help="config.json of a model with random weights, with the tokenizer of --model"
    )
    options = parser.parse_args()
    measure_one_constrained(options)


if __name__ == "__main__":
    main()
