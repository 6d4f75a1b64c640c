"""Measures what structured output costs in decode steps of the embedded model on one CPU core, at batch 8.

    OMP_NUM_THREADS=1 python benchmarks/structured.py --json structured.json

All 8 answers are JSON by a schema, or none is. The times are CPU times of the engine's thread, per decode step:
"masks" is the time to accept the previous tokens and to compute and upload the masks, "apply" the time to apply them to
the logits, and "share" both together relative to the rest of the step. Steps that compute prompts are left out. Bar:
the median share is at most 3 %.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from report import Bar, make_parser, report

from hotset.base.sampling import SamplingParams
from hotset.base.structure import Structure
from hotset.engine import constraints
from hotset.engine.llm import LLM
from hotset.models import sampler

BATCH = 8
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


class Stopwatch:
    """Adds up the CPU time of a function that it replaces."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        started = time.thread_time()
        result = self._function(*arguments, **options)
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


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    options = parser.parse_args()
    watches = [Stopwatch(constraints.Constraints.masks), Stopwatch(sampler._masked)]
    constraints.Constraints.masks = lambda *arguments: watches[0](*arguments)  # type: ignore[method-assign]
    sampler._masked = watches[1]
    rows, shares = [], []
    with LLM("embedded", progress=False, max_model_len=1024, plans_in_flight=1) as llm:
        for name, structure in (("none", None), ("JSON schema", Structure("json_schema", json.dumps(SCHEMA)))):
            times = steps_of(llm, structure, options.tokens, watches)
            shares = [(masks + apply) / (step - masks - apply) for step, masks, apply in times]
            medians = [1e3 * statistics.median(column) for column in zip(*times, strict=True)]
            row = dict(zip(("step ms", "masks ms", "apply ms"), medians, strict=True))
            rows.append({"structure": name, "steps": len(times), **row, "share %": 100 * statistics.median(shares)})
    bar = Bar("share of masks", statistics.median(shares), 0.03)
    report("structured output, SmolLM2-135M-Instruct, batch 8", rows, options.json, str(bar.row()))


if __name__ == "__main__":
    main()
