"""Measures the CPU time of `Engine.step()` with a model that computes nothing, for several numbers of requests.

    python benchmarks/step_overhead.py --json step_overhead.json

A step plans, prepares tensors, samples greedily and commits, on one core. Two engines take turns: one with the prefix
cache and one without. No prefix is shared, so the ratio of their mean times is what the cache costs. The pages of an
answer enter the cache 16 at a time, so the ratio is meaningful only for 1024 steps or more. Bars (required results):
the median with the cache is at most 2 ms with 256 requests, and with 1024 requests at most 4 times as long as with 256;
the cache costs at most 2 % with 256 requests. A run takes about two minutes.
"""

import statistics
import time
from collections.abc import Sequence

import torch
from report import make_parser, report
from torch import Tensor

from hotset.base.config import EngineConfig
from hotset.base.sampling import SamplingParams
from hotset.engine.build import assemble
from hotset.engine.build_runner import build_runner
from hotset.engine.core import Engine
from hotset.engine.input_processor import InputProcessor, ModelCard
from hotset.engine.sizing import KvBudget
from hotset.engine.workers.executor import InProcessExecutor
from hotset.kernels.rows import RowLayout
from hotset.memory.device_pool import KvShape
from hotset.memory.view import View

VOCAB = 64
CONTEXT = 4096


class NullModel:
    """Computes nothing. All logits are equal, so greedy sampling selects token 0."""

    device, dtype = torch.device("cpu"), torch.float32
    kv_shape = KvShape(1, RowLayout(1, torch.float32))

    def __init__(self, rows: int) -> None:
        self._logits = torch.zeros(rows, VOCAB)

    def forward(self, token_ids: Tensor, view: View) -> Tensor:
        return token_ids

    def logits(self, hidden: Tensor, indices: Tensor | None) -> Tensor:
        return self._logits[: hidden.shape[0] if indices is None else indices.shape[0]]


def make_engine(requests: int, *, prefix_cache: bool) -> Engine:
    """Returns an engine in which `requests` requests decode."""
    config = EngineConfig(
        max_num_seqs=requests,
        max_num_batched_tokens=8 * requests,
        prefix_cache=prefix_cache,
    )
    card = ModelCard("null", "null", CONTEXT, VOCAB, (), False, CONTEXT, "cpu", "float32")
    pages = requests * CONTEXT // config.page_rows
    model = NullModel(8 * requests)
    budget = KvBudget(model.kv_shape.geometry(config.page_rows), pages, pages, CONTEXT)
    executor = InProcessExecutor(build_runner(config, model, budget, torch.device("cpu"), card.vocab))
    engine = assemble(config, card, model.kv_shape, budget, executor)
    input_processor = InputProcessor(card, seed=0)
    params = SamplingParams(temperature=0, max_tokens=CONTEXT - 1024, ignore_eos=True)
    for number in range(requests):
        prompt = [number % VOCAB] * (1 + number % 61)  # requests cross page boundaries at different steps
        for choice in input_processor.accept(str(number), prompt, params):
            engine.add(choice)
    while len(engine.step().token_ids) < requests:  # until all requests decode
        pass
    return engine


def measure(engines: Sequence[Engine], requests: int, steps: int) -> list[list[float]]:
    """Returns the CPU seconds of `steps` decode steps of each engine. The engines take turns."""
    times: list[list[float]] = [[] for _ in engines]
    for step in range(steps):
        for index in sorted(range(len(engines)), reverse=bool(step % 2)):
            start = time.thread_time()
            outputs = engines[index].step()
            times[index].append(time.thread_time() - start)
            assert len(outputs.token_ids) == requests
    return times


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=1100, help="timed steps per number of requests")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, ratios = [], {}
    for requests in (1, 64, 256, 512, 1024):
        engines = [make_engine(requests, prefix_cache=cached) for cached in (True, False)]
        times, without_cache = measure(engines, requests, options.steps)
        for engine in engines:
            engine.close()
        ratios[requests] = statistics.mean(times) / statistics.mean(without_cache)
        times.sort()
        median = statistics.median(times)
        rows.append(
            {
                "requests": requests,
                "median ms": median * 1e3,
                "p90 ms": times[int(len(times) * 0.9)] * 1e3,
                "us per request": median / requests * 1e6,
                "with / without prefix cache": ratios[requests],
            }
        )
    medians = {row["requests"]: row["median ms"] for row in rows}
    growth = medians[1024] / medians[256]
    notes = (
        f"256 requests: {medians[256]:.2f} ms (bar: 2 ms); 1024 against 256: {growth:.2f}x (bar: 4x);"
        f" the prefix cache with 256 requests: {ratios[256]:.3f}x (bar: 1.02x)"
    )
    report("CPU time of a decode step with a model that computes nothing, one core", rows, options.json, notes)


if __name__ == "__main__":
    main()
