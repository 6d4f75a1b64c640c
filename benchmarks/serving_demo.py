"""Measures throughput and time between tokens of the demo model with its own selections, tiers auto against off.

    python benchmarks/serving_demo.py --json serving_demo.json --png serving_demo.png

Weights, indexer and prompts (retrieval questions of hotset/lab/evaluate/tasks.py) are real, and prompts are computed.
Both modes have the same device memory, which holds 8 of the longest contexts. For each concurrency, new requests are
added. When all of them decode, 8 warm-up steps follow, and then at least 128 tokens of each request are timed. Decoding
is greedy and continues past the end of the answers. Rows and index keys are stored in the dtype of the model: bfloat16
on a GPU, where decode steps are CUDA graphs, and float32 on a CPU, on one core.

    p50, p99    time between two tokens of one request, over all requests
    tiered      requests that were tiered when the measurement ended
    miss        share of the rows selected by tiered requests, outside their tails, that no slot held
    rows/step   rows copied from the host into slots per step, in all layers together
    compared    number of requests that an earlier batch of `off` contained; the answer in the smallest such batch is
                the expected one
    same        share of the compared requests whose first 128 tokens are as expected. In rows of `off`, this shows how
                the batch size affects near ties in bfloat16; tiers should not reduce it further

There is no required result. On a CPU, use --quick (about a minute); the whole run would take hours.
"""

import gc
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from report import make_parser, report

from hotset.base.config import EngineConfig, TiersMode
from hotset.base.errors import ConfigError, HotsetError
from hotset.base.sampling import SamplingParams
from hotset.base.units import GIB, show_bytes
from hotset.engine.build import assemble, in_process_executor, model_card
from hotset.engine.core import Engine
from hotset.engine.input_processor import InputProcessor
from hotset.engine.loading import choose_device, choose_dtype
from hotset.engine.model_checks import kv_storage
from hotset.engine.outputs import EngineStats
from hotset.engine.sizing import KvBudget, kv_budget
from hotset.lab.evaluate.tasks import TASKS, make_questions
from hotset.models.checkpoint.files import find_model
from hotset.models.checkpoint.weights import open_weights
from hotset.models.decoder import Decoder
from hotset.models.spec import MlaSpec
from hotset.models.tokenizer import Tokenizer

OFF: TiersMode = "off"
AUTO: TiersMode = "auto"
SEATS = 64
HOST_STORE_RATIO = 5  # tokens in the host store / tokens on the device
WARM_UP_STEPS = 8  # enough for the request that was prefilled last to fill its slots
SEED = 0
DEMO = str(Path(__file__).resolve().parents[1] / "models" / "demo-dsa")

Rows = list[dict[str, Any]]
Tokens = list[list[int]]  # per request


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of the run."""

    contexts: tuple[int, ...] = (4096, 8192)
    requests: tuple[int, ...] = (1, 4, 16)  # batch sizes; the largest that fits is measured as well
    resident: int = 8  # number of contexts of the longest length that fit in device memory
    answer: int = 128  # minimum number of timed tokens per request; also the number of first tokens that are compared
    growth: int = 512  # maximum tokens per answer; the first requests decode while later ones are prefilled
    step_tokens: int = 8192 + SEATS  # a whole prompt and one token of every other request

    @property
    def longest(self) -> int:
        return max(self.contexts) + self.growth


QUICK = Sizes((1024,), (1,), 3, 16, 64, 1024)


class DemoModel:
    """The loaded model and its prompts."""

    def __init__(self, model: str, device: str | None) -> None:
        """Raises StartupError if the model cannot be loaded or has no indexer."""
        self.name = model
        self.device = choose_device(device)
        files = find_model(model)
        if not isinstance(files.spec.attention, MlaSpec):
            raise ConfigError(f"{model} has no indexer: tiers require a model that selects rows")
        tokenizer = Tokenizer.load(files, None)
        if tokenizer is None:
            raise ConfigError(f"{model} has no tokenizer.json, which the prompts require")
        self.spec, self._tokenizer = files.spec, tokenizer
        self.dtype = choose_dtype(None, files.spec, self.device)
        weights = open_weights(files, self.dtype, self.device)
        self.decoder = Decoder(files.spec, weights, kv_storage(EngineConfig(model=model), files.spec))
        weights.finish()

    def prompts(self, length: int, count: int) -> Tokens:
        """Returns questions of about `length` tokens, from all tasks in turn, rendered with the chat template."""
        encode = cache(self._encode)  # `make_questions` also encodes each prompt, to count its tokens
        questions = make_questions(list(TASKS), length, count, SEED, lambda text: len(encode(text)))
        return [encode(question.prompt) for question in questions]

    def _encode(self, text: str) -> list[int]:
        rendered = self._tokenizer.render_chat([{"role": "user", "content": text}])
        return self._tokenizer.encode(rendered, add_special=False)

    def engine(self, config: EngineConfig, budget: KvBudget) -> Engine:
        """Returns an engine whose CUDA graphs are captured."""
        card = model_card(config, self.spec, budget, self.device, self.dtype)
        executor = in_process_executor(config, self.decoder, budget, self.device, card.vocab)
        engine = assemble(config, card, self.decoder.kv_shape, budget, executor)
        engine.warm_up(lambda done, total: None)
        return engine

    def size(self, tiers: TiersMode, sizes: Sizes) -> tuple[EngineConfig, KvBudget]:
        """Returns the configuration and the memory budget of an engine. Raises ConfigError if memory is too small."""
        shape = self.decoder.kv_shape
        geometry = shape.geometry(EngineConfig().page_rows)
        pages = sizes.resident * geometry.resident_pages(sizes.longest)
        config = EngineConfig(
            model=self.name,
            tiers=tiers,
            max_num_seqs=SEATS,
            max_num_batched_tokens=sizes.step_tokens,
            max_model_len=sizes.longest,
            device_kv_gib=(pages + 0.5) * geometry.page_bytes / GIB,  # rounded down to whole pages
            host_kv_tokens=None if tiers == OFF else HOST_STORE_RATIO * sizes.resident * sizes.longest,
            prefix_cache=False,  # every batch computes the same prompts
        )
        return config, kv_budget(config, shape, self.spec.context, self.device)


@dataclass(frozen=True, slots=True)
class TimedSteps:
    """The times of some decode steps."""

    seconds: float
    steps: int
    gaps: list[float]  # seconds between two tokens of one request, for all requests; ascending


class Batch:
    """Requests that are added together, decode together and are aborted at the end."""

    def __init__(self, engine: Engine, prompts: Sequence[list[int]], growth: int) -> None:
        self._engine = engine
        input_processor = InputProcessor(engine.card, seed=SEED)
        params = SamplingParams(temperature=0, max_tokens=growth, ignore_eos=True)
        self._answers: dict[str, list[int]] = {}
        for number, prompt in enumerate(prompts):
            for choice in input_processor.accept(str(number), prompt, params):
                self._answers[choice.request_id] = []
                engine.add(choice)

    @property
    def answers(self) -> Tokens:
        return list(self._answers.values())

    def step(self) -> list[str]:
        """Runs one step and returns the ids of the requests that got a token."""
        output = self._engine.step()
        assert not output.finished, "a request ended before all requests were timed: increase `growth`"
        for request_id, token in zip(output.request_ids, output.token_ids, strict=True):
            self._answers[request_id].append(token)
        return output.request_ids

    def prefill(self) -> float:
        """Steps until all requests decode, then takes the warm-up steps. Returns the seconds of all these steps."""
        start = time.perf_counter()
        while len(self.step()) < len(self._answers):
            pass
        for _ in range(WARM_UP_STEPS):
            self.step()
        return time.perf_counter() - start

    def decode(self, tokens: int) -> TimedSteps:
        """Steps until every request got at least `tokens` tokens. A request whose residence changes can miss a step."""
        start = time.perf_counter()
        last = dict.fromkeys(self._answers, start)
        counts = dict.fromkeys(self._answers, 0)
        gaps, steps = [], 0
        while min(counts.values()) < tokens:
            request_ids = self.step()
            steps, now = steps + 1, time.perf_counter()
            for request_id in request_ids:
                gaps.append(now - last[request_id])
                last[request_id] = now
                counts[request_id] += 1
        return TimedSteps(now - start, steps, sorted(gaps))

    def abort(self) -> None:
        for request_id in self._answers:
            self._engine.abort(request_id)
        while not self._engine.idle:
            self._engine.step()


def serve(engine: Engine, prompts: Sequence[list[int]], sizes: Sizes, row_bytes: int) -> tuple[dict[str, Any], Tokens]:
    """Serves these prompts in one batch. Returns a table row and the first `sizes.answer` tokens of each answer."""
    batch = Batch(engine, prompts, sizes.growth)
    prefill_s = batch.prefill()
    before = engine.stats()
    timed = batch.decode(sizes.answer)
    after = engine.stats()
    answers = [answer[: sizes.answer] for answer in batch.answers]
    batch.abort()
    lookups, misses = (sum_layers(after, name) - sum_layers(before, name) for name in ("slot_lookups", "slot_misses"))
    row = {
        "requests": len(prompts),
        "tiered": after.tiered,
        "prefill s": prefill_s,
        "tokens/s": len(timed.gaps) / timed.seconds,
        "p50 ms": statistics.median(timed.gaps) * 1e3,
        "p99 ms": timed.gaps[int(len(timed.gaps) * 0.99)] * 1e3,
        "miss": misses / lookups if lookups else 0.0,
        "rows/step": (after.bytes_swapped - before.bytes_swapped) / row_bytes / timed.steps,
    }
    return row, answers


def sum_layers(stats: EngineStats, name: str) -> int:
    """Returns a counter summed over all layers."""
    return sum(getattr(stats, name).values())


def compare(answers: Tokens, known: Mapping[int, list[int]]) -> dict[str, Any]:
    """Returns how many of these requests have a known answer, and the share of those whose answer equals it."""
    same = [answer == known[number] for number, answer in enumerate(answers) if number in known]
    return {"compared": len(same), "same": sum(same) / len(same) if same else None}


def serve_all(model: DemoModel, sizes: Sizes) -> tuple[Rows, int]:
    """Returns a table row per mode, context and concurrency, and the bytes of device KV, equal in both modes."""
    sized = {tiers: model.size(tiers, sizes) for tiers in (OFF, AUTO)}
    max_requests = {
        (tiers, context): min(SEATS, budget.requests(context + sizes.growth))
        for tiers, (_config, budget) in sized.items()
        for context in sizes.contexts
    }
    prompts = {
        context: model.prompts(context, max(max_requests[OFF, context], max_requests[AUTO, context]))
        for context in sizes.contexts
    }
    known: dict[int, dict[int, list[int]]] = {context: {} for context in sizes.contexts}
    row_bytes, rows = model.decoder.kv_shape.row.row_bytes, []
    for tiers, (config, budget) in sized.items():
        engine = model.engine(config, budget)
        for context in sizes.contexts:
            fit = max_requests[tiers, context]
            for requests in [*(count for count in sizes.requests if count < fit), fit]:
                row, answers = serve(engine, prompts[context][:requests], sizes, row_bytes)
                rows.append({"context": context, "tiers": tiers} | row | compare(answers, known[context]))
                if tiers == OFF:
                    known[context] = dict(enumerate(answers)) | known[context]
        engine.audit()
        engine.close()
        del engine
        gc.collect()  # frees the memory for the next engine
    return rows, budget.device_pages * budget.geometry.page_bytes


def draw(path: Path, rows: Rows) -> None:
    """Draws the results to `path`. Raises ImportError if matplotlib is not installed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    contexts = sorted({row["context"] for row in rows})
    figure, axes = pyplot.subplots(
        2, len(contexts), figsize=(5 * len(contexts), 7), constrained_layout=True, squeeze=False
    )
    for (speed, latency), context in zip(axes.T, contexts, strict=True):
        for tiers, colour in ((AUTO, "tab:red"), (OFF, "tab:gray")):
            line = [row for row in rows if (row["context"], row["tiers"]) == (context, tiers)]
            requests = [row["requests"] for row in line]
            speed.plot(requests, [row["tokens/s"] for row in line], "o-", color=colour, label=f"tiers {tiers}")
            latency.plot(requests, [row["p50 ms"] for row in line], "o-", color=colour, label=f"tiers {tiers}, p50")
            latency.plot(requests, [row["p99 ms"] for row in line], "o:", color=colour, label=f"tiers {tiers}, p99")
        speed.set(title=f"Contexts of {context:,} tokens", ylabel="tokens/s", ylim=(0, None))
        latency.set(xlabel="requests", ylabel="ms between tokens", ylim=(0, None))
        for axis in (speed, latency):
            axis.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default=DEMO, help="directory of a sparse-attention model")
    parser.add_argument("--device", help="'cpu', 'cuda' or 'cuda:N'; default: the GPU if there is one")
    parser.add_argument("--png", type=Path, help="also draw the results to this file (requires matplotlib)")
    parser.add_argument("--quick", action="store_true", help="short prompts and few requests")
    options = parser.parse_args()
    torch.set_num_threads(1)  # with several threads that wait for each other, other load would distort the times
    sizes = QUICK if options.quick else Sizes()
    start = time.perf_counter()
    try:
        model = DemoModel(options.model, options.device)
        rows, device_bytes = serve_all(model, sizes)
    except HotsetError as error:
        sys.exit(f"error: {error}")
    device = f"{model.device.type}, {str(model.dtype).removeprefix('torch.')}"
    title = f"{Path(options.model).name} with its own selections ({device}), {show_bytes(device_bytes)} of device KV"
    note = f"at least {sizes.answer} timed tokens per request; the run took {time.perf_counter() - start:.0f} s"
    report(title, rows, options.json, note)
    if options.png is not None:
        try:
            draw(options.png, rows)
        except ImportError:
            print(f"{options.png} was not drawn: pip install matplotlib", file=sys.stderr)


if __name__ == "__main__":
    main()
