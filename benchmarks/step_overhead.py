"""Python per decode step: the engine around a model that computes nothing.

Measures the processor time of `Engine.step()` with N requests decoding, on one core: planning, preparing the step's
tensors, sampling (greedy), committing. The bar: at most 2 ms at 256 requests, growing no worse than linearly to 1024.
"""

import statistics
import time

import torch
from report import make_parser, report
from torch import Tensor

from hotset.base.config import EngineConfig
from hotset.base.sampling import SamplingParams
from hotset.engine.build import assemble, in_process_executor
from hotset.engine.input_processor import InputProcessor, ModelCard
from hotset.engine.sizing import KvBudget
from hotset.kernels.rows import RowLayout
from hotset.memory.device_pool import KvShape
from hotset.memory.view import View

VOCAB = 64
CONTEXT = 4096


class NullModel:
    """Answers token 0 at once, whatever it is asked."""

    device = torch.device("cpu")
    kv_shape = KvShape(1, RowLayout(1, torch.float32))

    def __init__(self, rows: int) -> None:
        self._logits = torch.zeros(rows, VOCAB)

    def forward(self, token_ids: Tensor, view: View, wanted: Tensor | None) -> Tensor:
        return self._logits[: token_ids.shape[0] if wanted is None else wanted.shape[0]]


def measure(requests: int, steps: int) -> list[float]:
    """Seconds of each of `steps` decode steps with `requests` running."""
    config = EngineConfig(max_num_seqs=requests, max_num_batched_tokens=8 * requests)
    card = ModelCard("null", "null", CONTEXT, VOCAB, (), False, CONTEXT, "cpu", "float32")
    pages = requests * CONTEXT // config.page_rows
    model = NullModel(8 * requests)
    budget = KvBudget(model.kv_shape.geometry(config.page_rows), pages, pages, CONTEXT)
    executor = in_process_executor(config, model, budget, torch.device("cpu"), card.vocab)
    engine = assemble(config, card, model.kv_shape, budget, executor)
    intake = InputProcessor(card, seed=0)
    params = SamplingParams(temperature=0, max_tokens=CONTEXT - 1024, ignore_eos=True)
    for number in range(requests):
        prompt = [number % VOCAB] * (1 + number % 61)  # so that requests cross page borders at different steps
        for choice in intake.accept(str(number), prompt, params):
            engine.add(choice)
    while len(engine.step().token_ids) < requests:  # until all are admitted and decode
        pass
    times = []
    for _ in range(steps):
        start = time.thread_time()
        news = engine.step()
        times.append(time.thread_time() - start)
        assert len(news.token_ids) == requests
    return times


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for requests in (1, 64, 256, 512, 1024):
        times = sorted(measure(requests, options.steps))
        median = statistics.median(times)
        rows.append(
            {
                "requests": requests,
                "median ms": median * 1e3,
                "p90 ms": times[int(len(times) * 0.9)] * 1e3,
                "us per request": median / requests * 1e6,
            }
        )
    by_count = {row["requests"]: row["median ms"] for row in rows}
    growth = by_count[1024] / by_count[256]
    notes = f"256 requests: {by_count[256]:.2f} ms (bar 2 ms); 1024 / 256: {growth:.2f}x (bar 4x)"
    report("Python per decode step, null model, one core", rows, options.json, notes)


if __name__ == "__main__":
    main()
