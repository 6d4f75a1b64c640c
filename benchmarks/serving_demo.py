"""Throughput and time between tokens against concurrency, tiers off and auto: the demo model and its own selections.

    python benchmarks/serving_demo.py --json serving_demo.json --png serving_demo.png

Nothing is made up: trained weights, the model's own indexer, retrieval questions (`hotset/evaluate/tasks.py`) as
prompts, which are computed. Both modes have the same device memory, which holds 8 of the longest contexts. At each
concurrency fresh requests come in; when all of them decode, the next 128 tokens of each are timed. Answers are greedy
and go on past their end. Rows and keys are stored as the model computes: bfloat16 on a GPU, where decode steps are CUDA
graphs, float32 on a CPU, of which one core computes (use --quick there: the whole run would take hours).

    p50, p99    of the time from a token to the next of the same request, all requests together
    tiered      requests whose rows were in the host store when the timing ended
    miss        of the rows that tiered requests selected outside their tails, the share that no slot held
    rows/step   copied from the host into slots by one step, all layers together
    compared    requests that `off` had served before, at the least concurrency at which it did
    same        share of those whose first tokens, as many as are timed, are the same now. In rows of `off` this shows
                what other company in the batch does to near ties in bfloat16; tiers should add nothing to it

There is no bar here: `serving.py` has them.
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
from hotset.engine.loading import choose_device, choose_dtype, kv_storage
from hotset.engine.outputs import EngineStats
from hotset.engine.sizing import KvBudget, kv_budget
from hotset.evaluate.tasks import TASKS, make_questions
from hotset.models.checkpoint import find_model, open_weights
from hotset.models.decoder import Decoder
from hotset.models.spec import MlaSpec
from hotset.models.tokenizer import Tokenizer

OFF: TiersMode = "off"
AUTO: TiersMode = "auto"
SEATS = 64
HOST_TIMES = 5  # as many tokens in the host store as on the device
WARM_STEPS = 8  # before the timed ones: the last to come in has only just got its slots
SEED = 0
DEMO = str(Path(__file__).resolve().parents[1] / "models" / "demo-dsa")

Rows = list[dict[str, Any]]
Tokens = list[list[int]]  # of each request of a run, as they were generated


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is run."""

    contexts: tuple[int, ...] = (4096, 8192)
    requests: tuple[int, ...] = (1, 4, 16)  # and the most that fit
    resident: int = 8  # of the longest contexts, in device memory
    answer: int = 128  # tokens of each request that are timed, and as many that are compared
    growth: int = 512  # most tokens of one answer: who comes first decodes while the others come in
    step_rows: int = 8192 + SEATS  # a whole prompt in one step, whoever decodes beside it

    @property
    def longest(self) -> int:
        return max(self.contexts) + self.growth


QUICK = Sizes((1024,), (1,), 3, 16, 64, 1024)


class Demo:
    """The model, loaded once, and its prompts."""

    def __init__(self, model: str, device: str | None) -> None:
        """StartupError where it cannot be loaded, or selects no rows."""
        self.name = model
        self.device = choose_device(device)
        files = find_model(model)
        if not isinstance(files.spec.attention, MlaSpec):
            raise ConfigError(f"{model} has no indexer: tiers are for models that select their rows")
        tokenizer = Tokenizer.load(files, None)
        if tokenizer is None:
            raise ConfigError(f"{model} has no tokenizer.json: prompts cannot be made")
        self.spec, self._tokenizer = files.spec, tokenizer
        self.dtype = choose_dtype(None, files.spec, self.device)
        weights = open_weights(files, self.dtype, self.device)
        self.decoder = Decoder(files.spec, weights, kv_storage(EngineConfig(model=model), files.spec))
        weights.finish()

    def prompts(self, length: int, count: int) -> Tokens:
        """Questions of about `length` tokens, one task after another, as the model's chat template writes them."""
        encode = cache(self._encode)  # each was encoded once to be measured
        questions = make_questions(list(TASKS), length, count, SEED, lambda text: len(encode(text)))
        return [encode(question.prompt) for question in questions]

    def _encode(self, text: str) -> list[int]:
        rendered = self._tokenizer.render_chat([{"role": "user", "content": text}])
        return self._tokenizer.encode(rendered, add_special=False)

    def engine(self, config: EngineConfig, budget: KvBudget) -> Engine:
        """Captured and ready."""
        card = model_card(config, self.spec, budget, self.device, self.dtype)
        executor = in_process_executor(config, self.decoder, budget, self.device, card.vocab)
        engine = assemble(config, card, self.decoder.kv_shape, budget, executor)
        engine.warm_up(lambda done, total: None)
        return engine

    def size(self, tiers: TiersMode, sizes: Sizes) -> tuple[EngineConfig, KvBudget]:
        """What an engine is told, and what that gives it. ConfigError where memory is short."""
        shape = self.decoder.kv_shape
        geometry = shape.geometry(EngineConfig().page_rows)
        pages = sizes.resident * geometry.resident_pages(sizes.longest)
        config = EngineConfig(
            model=self.name,
            tiers=tiers,
            max_num_seqs=SEATS,
            max_num_batched_tokens=sizes.step_rows,
            max_model_len=sizes.longest,
            device_kv_gib=(pages + 0.5) * geometry.page_bytes / GIB,  # rounded down to whole pages
            host_kv_tokens=None if tiers == OFF else HOST_TIMES * sizes.resident * sizes.longest,
        )
        return config, kv_budget(config, shape, self.spec.context, self.device)


@dataclass(frozen=True, slots=True)
class Timed:
    """Some steps, in seconds."""

    seconds: float
    steps: int
    gaps: list[float]  # before each token, since the one before of the same request; ascending


class Run:
    """Requests that are served together, from their arrival until they are sent away."""

    def __init__(self, engine: Engine, prompts: Sequence[list[int]], growth: int) -> None:
        self._engine = engine
        intake = InputProcessor(engine.card, seed=SEED)
        params = SamplingParams(temperature=0, max_tokens=growth, ignore_eos=True)
        self._answers: dict[str, list[int]] = {}
        for number, prompt in enumerate(prompts):
            for choice in intake.accept(str(number), prompt, params):
                self._answers[choice.request_id] = []
                engine.add(choice)

    @property
    def answers(self) -> Tokens:
        return list(self._answers.values())

    def step(self) -> list[str]:
        """One step; the requests that gained a token."""
        news = self._engine.step()
        assert not news.finished, "a request ended before all had been timed: raise `growth`"
        for request_id, token in zip(news.request_ids, news.token_ids, strict=True):
            self._answers[request_id].append(token)
        return news.request_ids

    def come_in(self) -> float:
        """Steps until all decode. Seconds."""
        start = time.perf_counter()
        while len(self.step()) < len(self._answers):
            pass
        for _ in range(WARM_STEPS):
            self.step()
        return time.perf_counter() - start

    def timed(self, tokens: int) -> Timed:
        """Steps until every request gained so many tokens. One that changes its residence may miss a step."""
        start = time.perf_counter()
        last = dict.fromkeys(self._answers, start)
        gained = dict.fromkeys(self._answers, 0)
        gaps, steps = [], 0
        while min(gained.values()) < tokens:
            request_ids = self.step()
            steps, now = steps + 1, time.perf_counter()
            for request_id in request_ids:
                gaps.append(now - last[request_id])
                last[request_id] = now
                gained[request_id] += 1
        return Timed(now - start, steps, sorted(gaps))

    def leave(self) -> None:
        for request_id in self._answers:
            self._engine.abort(request_id)
        while not self._engine.idle:
            self._engine.step()


def serve(engine: Engine, prompts: Sequence[list[int]], sizes: Sizes, row_bytes: int) -> tuple[dict[str, Any], Tokens]:
    """What serving these prompts together took, and the first tokens of each answer."""
    run = Run(engine, prompts, sizes.growth)
    arrival = run.come_in()
    before = engine.stats()
    timed = run.timed(sizes.answer)
    after = engine.stats()
    answers = [answer[: sizes.answer] for answer in run.answers]
    run.leave()
    looked_up, missed = (counted(after, name) - counted(before, name) for name in ("slot_lookups", "slot_misses"))
    row = {
        "requests": len(prompts),
        "tiered": after.tiered,
        "arrival s": arrival,
        "tokens/s": len(timed.gaps) / timed.seconds,
        "p50 ms": statistics.median(timed.gaps) * 1e3,
        "p99 ms": timed.gaps[int(len(timed.gaps) * 0.99)] * 1e3,
        "miss": missed / looked_up if looked_up else 0.0,
        "rows/step": (after.bytes_swapped - before.bytes_swapped) / row_bytes / timed.steps,
    }
    return row, answers


def counted(stats: EngineStats, name: str) -> int:
    """A count of all layers together."""
    return sum(getattr(stats, name).values())


def compare(answers: Tokens, known: Mapping[int, list[int]]) -> dict[str, Any]:
    """How many of these requests were served before, and which share of them was answered alike."""
    same = [answer == known[number] for number, answer in enumerate(answers) if number in known]
    return {"compared": len(same), "same": sum(same) / len(same) if same else None}


def serve_all(demo: Demo, sizes: Sizes) -> tuple[Rows, int]:
    """A row for each mode, context and concurrency, and the bytes of KV that the device had in either mode."""
    sized = {tiers: demo.size(tiers, sizes) for tiers in (OFF, AUTO)}
    most = {
        (tiers, context): min(SEATS, budget.requests(context + sizes.growth))
        for tiers, (_config, budget) in sized.items()
        for context in sizes.contexts
    }
    prompts = {
        context: demo.prompts(context, max(most[OFF, context], most[AUTO, context])) for context in sizes.contexts
    }
    known: dict[int, dict[int, list[int]]] = {context: {} for context in sizes.contexts}
    row_bytes, rows = demo.decoder.kv_shape.row.row_bytes, []
    for tiers, (config, budget) in sized.items():
        engine = demo.engine(config, budget)
        for context in sizes.contexts:
            fit = most[tiers, context]
            for requests in [*(count for count in sizes.requests if count < fit), fit]:
                row, answers = serve(engine, prompts[context][:requests], sizes, row_bytes)
                rows.append({"context": context, "tiers": tiers} | row | compare(answers, known[context]))
                if tiers == OFF:
                    known[context] = dict(enumerate(answers)) | known[context]
        engine.audit()
        engine.close()
        del engine
        gc.collect()  # its memory is the next one's
    return rows, budget.device_pages * budget.geometry.page_bytes


def draw(path: Path, rows: Rows) -> None:
    """Draws into `path`. ImportError without matplotlib, which is not needed for the figures in numbers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    contexts = sorted({row["context"] for row in rows})
    figure, axes = pyplot.subplots(
        2, len(contexts), figsize=(5 * len(contexts), 7), constrained_layout=True, squeeze=False
    )
    for (speed, latency), context in zip(axes.T, contexts, strict=True):
        for tiers, colour in ((AUTO, "tab:red"), (OFF, "tab:gray")):
            here = [row for row in rows if (row["context"], row["tiers"]) == (context, tiers)]
            requests = [row["requests"] for row in here]
            speed.plot(requests, [row["tokens/s"] for row in here], "o-", color=colour, label=f"tiers {tiers}")
            latency.plot(requests, [row["p50 ms"] for row in here], "o-", color=colour, label=f"tiers {tiers}, p50")
            latency.plot(requests, [row["p99 ms"] for row in here], "o:", color=colour, label=f"tiers {tiers}, p99")
        speed.set(title=f"Contexts of {context:,} tokens", ylabel="tokens/s", ylim=(0, None))
        latency.set(xlabel="requests", ylabel="ms between tokens", ylim=(0, None))
        for axis in (speed, latency):
            axis.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default=DEMO, help="directory of a sparse-attention model")
    parser.add_argument("--device", help="'cpu', 'cuda' or 'cuda:N'; by default the GPU if there is one")
    parser.add_argument("--png", type=Path, help="also draw the results into this file (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="short prompts and few requests")
    options = parser.parse_args()
    torch.set_num_threads(1)  # of several, each waits for all: other load on the machine would be measured
    sizes = QUICK if options.quick else Sizes()
    start = time.perf_counter()
    try:
        demo = Demo(options.model, options.device)
        rows, device_bytes = serve_all(demo, sizes)
    except HotsetError as error:
        sys.exit(f"error: {error}")
    where = f"{demo.device.type}, {str(demo.dtype).removeprefix('torch.')}"
    title = f"{Path(options.model).name} with its own selections ({where}), {show_bytes(device_bytes)} of device KV"
    note = f"prompts computed; {sizes.answer} tokens of each request timed; {time.perf_counter() - start:.0f} s in all"
    report(title, rows, options.json, note)
    if options.png is not None:
        try:
            draw(options.png, rows)
        except ImportError:
            print(f"{options.png} was not drawn: pip install matplotlib", file=sys.stderr)


if __name__ == "__main__":
    main()
