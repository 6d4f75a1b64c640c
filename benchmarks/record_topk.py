"""Records which rows a sparse-attention model selects while it decodes long contexts, as a trace file.

    python benchmarks/record_topk.py --model models/demo-dsa --out data/topk/demo-dsa.topk

The prompts are questions of `hotset/evaluate/tasks.py`, one task after another: real text with records hidden in it and
a question at its end. Decoding is sampled and goes on past the end of the answer, so the model keeps writing text,
records and questions of its own. All requests decode together.
"""

import argparse
import datetime
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from report import hardware
from rich.console import Console
from rich.progress import Progress
from topk_trace import TopkTrace, TraceHeader, write_trace
from torch import Tensor

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError, HotsetError
from hotset.base.sampling import SamplingParams
from hotset.engine.build import assemble, in_process_executor, model_card
from hotset.engine.core import Engine
from hotset.engine.input_processor import InputProcessor
from hotset.engine.loading import choose_device, choose_dtype
from hotset.engine.sizing import kv_budget
from hotset.evaluate.tasks import TASKS, make_questions
from hotset.kernels.rows import PagedRows
from hotset.kernels.segments import Segments
from hotset.memory.device_pool import KvShape
from hotset.memory.resident import ResidentView
from hotset.memory.view import NewRows, Selected, View
from hotset.models.checkpoint import ModelFiles, find_model, open_weights
from hotset.models.decoder import Decoder
from hotset.models.spec import MlaSpec
from hotset.models.tokenizer import Tokenizer


def make_prompts(tokenizer: Tokenizer, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """A question of each length (of prompt and answer together), in tokens, as the model's chat template writes it."""

    def encode(prompt: str) -> list[int]:
        return tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": prompt}]), add_special=False)

    prompts = []
    for number, length in enumerate(lengths):
        task = list(TASKS)[number % len(TASKS)]
        (question,) = make_questions([task], length, 1, seed, lambda prompt: len(encode(prompt)))
        prompts.append(encode(question.prompt))
    return prompts


@dataclass(frozen=True, slots=True)
class Seen:
    """The decode rows of one call of `select`."""

    layer: int
    seats: Tensor  # [rows] int64
    lengths: Sequence[int]  # of each row's context, its own row included
    positions: Tensor  # [rows, k] int32, EMPTY-padded


@dataclass(frozen=True, slots=True)
class RecordingView:
    """A view that keeps what is selected for segments of one query row, and hands every call on."""

    inner: ResidentView
    seen: list[Seen]

    @property
    def segments(self) -> Segments:
        return self.inner.segments

    @property
    def padded_seats(self) -> Tensor | None:
        return self.inner.padded_seats

    def new_rows(self, layer: int) -> NewRows:
        return self.inner.new_rows(layer)

    def context(self, layer: int) -> PagedRows:
        return self.inner.context(layer)

    def keys(self, group: int) -> PagedRows:
        return self.inner.keys(group)

    def select(self, layer: int, positions: Tensor) -> Selected:
        single = [span for span in self.segments if span.last - span.first == 1]
        if single:
            rows = torch.tensor([span.first for span in single], device=positions.device)
            lengths = [span.length for span in single]
            self.seen.append(Seen(layer, self.inner.seat_of[rows], lengths, positions[rows].to(torch.int32)))
        return self.inner.select(layer, positions)


class RecordingModel:
    """A decoder whose selections are kept, on its device, until they are asked for."""

    def __init__(self, inner: Decoder) -> None:
        self.inner = inner
        self.device = inner.device
        self.seen: list[Seen] = []

    @property
    def kv_shape(self) -> KvShape:
        return self.inner.kv_shape

    def forward(self, token_ids: Tensor, view: View, wanted: Tensor | None) -> Tensor:
        assert isinstance(view, ResidentView)
        return self.inner.forward(token_ids, RecordingView(view, self.seen), wanted)

    def selections(self, prompt_lengths: Sequence[int], steps: int, k: int) -> np.ndarray:
        """[requests, steps, layers, k] int32. Requests are told apart by their lengths, which must differ."""
        by_seat: dict[int, dict[tuple[int, int], np.ndarray]] = {}  # seat -> (context length, layer) -> positions
        for seen in self.seen:
            for seat, length, row in zip(seen.seats.tolist(), seen.lengths, seen.positions.cpu().numpy(), strict=True):
                by_seat.setdefault(seat, {})[length, seen.layer] = row
        layers = self.inner.spec.layers
        out = np.empty((len(prompt_lengths), steps, layers, k), dtype=np.int32)
        for rows in by_seat.values():
            longest = max(length for length, _layer in rows)
            request = prompt_lengths.index(longest - steps)
            first = prompt_lengths[request] + 1
            for step in range(steps):
                for layer in range(layers):
                    out[request, step, layer] = rows[first + step, layer]
        assert len(by_seat) == len(prompt_lengths), "a seat was used twice, or a request never ran"
        return out


def load(config: EngineConfig) -> tuple[ModelFiles, RecordingModel, Engine]:
    """An engine around a recording model. StartupError where that cannot be done."""
    device = choose_device(config.device)
    files = find_model(config.model)
    if not isinstance(files.spec.attention, MlaSpec):
        raise ConfigError(f"{config.model} has no indexer: its attention selects nothing that could be recorded")
    dtype = choose_dtype(config.dtype, files.spec, device)
    weights = open_weights(files, dtype, device, load_format=config.load_format)
    model = RecordingModel(Decoder(files.spec, weights))
    weights.finish()
    budget = kv_budget(config, model.kv_shape, files.spec.context, device)
    card = model_card(config, files.spec, budget, device, dtype)
    executor = in_process_executor(config, model, budget, device, card.vocab)
    return files, model, assemble(config, card, model.kv_shape, budget, executor)


def decode(engine: Engine, prompts: Sequence[list[int]], steps: int, temperature: float, seed: int) -> None:
    """Runs every request for `steps` decode steps, all at once."""
    intake = InputProcessor(engine.card, seed=seed)
    for number, prompt in enumerate(prompts):
        # One token more than steps: the prefill yields the first.
        params = SamplingParams(temperature=temperature, max_tokens=steps + 1, ignore_eos=True, seed=seed + number)
        for choice in intake.accept(str(number), prompt, params):
            engine.add(choice)
    total = sum(map(len, prompts)) + len(prompts) * (steps + 1)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("Decoding", total=total)
        while not engine.idle:
            engine.step()
            stats = engine.stats()
            progress.update(task, completed=stats.tokens_prefilled + stats.tokens_generated)
    assert not engine.stats().recomputes, "the pool was sized for every request"


def record(options: argparse.Namespace) -> TopkTrace:
    span = options.longest - options.shortest
    wanted = [options.shortest + span * at // max(1, options.requests - 1) for at in range(options.requests)]
    config = EngineConfig(
        model=options.model,
        device=options.device,
        max_num_seqs=options.requests,
        device_kv_tokens=sum(wanted) + options.requests * (options.steps + 128),
        max_model_len=options.longest + options.steps + 1,
        cuda_graphs="off",  # a captured step runs no Python that could keep anything
    )
    files, model, engine = load(config)
    tokenizer = Tokenizer.load(files, None)
    if tokenizer is None:
        raise ConfigError(f"{options.model} has no tokenizer.json: prompts cannot be made")
    prompts = make_prompts(tokenizer, wanted, options.seed)
    lengths = [len(prompt) for prompt in prompts]
    if len(set(lengths)) < len(lengths):
        raise ConfigError("requests are told apart by their lengths: move --shortest and --longest further apart")
    decode(engine, prompts, options.steps, options.temperature, options.seed)
    attention = files.spec.attention
    assert isinstance(attention, MlaSpec)
    k = attention.index.topk
    header = TraceHeader(
        model=engine.card.name,
        layers=files.spec.layers,
        k=k,
        requests=options.requests,
        steps=options.steps,
        context_lengths=tuple(each + 1 for each in lengths),
        page_rows=config.page_rows,
        recorded={
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.date.today().isoformat(),
            "dtype": engine.card.dtype,
            "hardware": hardware(),
        },
    )
    return TopkTrace(header, model.selections(lengths, options.steps, k))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    arguments.add_argument("--model", default="models/demo-dsa", help="directory of a sparse-attention model")
    arguments.add_argument("--out", type=Path, default=Path("data/topk/demo-dsa.topk"))
    arguments.add_argument("--device", help="'cpu', 'cuda' or 'cuda:N'; by default the GPU if there is one")
    arguments.add_argument("--requests", type=int, default=8)
    arguments.add_argument("--steps", type=int, default=512, help="decode steps of each request")
    arguments.add_argument("--shortest", type=int, default=4608, help="tokens of the shortest question")
    arguments.add_argument("--longest", type=int, default=8192, help="tokens of the longest question")
    arguments.add_argument("--temperature", type=float, default=0.7)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    try:
        trace = record(options)
    except HotsetError as error:
        sys.exit(f"error: {error}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_trace(options.out, trace)
    print(f"{options.out}: {trace.header.shape} selections in {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
