"""Records the rows that a sparse-attention model selects while it decodes long contexts, and writes a trace file.

    python benchmarks/record_topk.py --model models/demo-dsa --out data/topk/demo-dsa.topk

The prompts are questions from all tasks of hotset/evaluate/tasks.py in turn: real text with hidden records, and a
question at the end. Tokens are sampled. Decoding continues past the end of the answer: the model then writes more text,
records and questions. All requests run in the same engine at the same time. Nothing is timed, and there is no bar.
topk_trace.py describes the file format, and topk_locality.py evaluates a trace.
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
from report import HelpFormatter, hardware
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
from hotset.memory.device_pool import KvShape
from hotset.memory.resident import ResidentView
from hotset.memory.view import Selected, View, ViewWrapper
from hotset.models.checkpoint.files import ModelFiles, find_model
from hotset.models.checkpoint.weights import open_weights
from hotset.models.decoder import Decoder
from hotset.models.spec import MlaSpec
from hotset.models.tokenizer import Tokenizer


def make_prompts(tokenizer: Tokenizer, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Returns one question per length, rendered with the chat template. A length counts the prompt and its answer."""

    def encode(prompt: str) -> list[int]:
        return tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": prompt}]), add_special=False)

    prompts = []
    for number, length in enumerate(lengths):
        task = list(TASKS)[number % len(TASKS)]
        (question,) = make_questions([task], length, 1, seed, lambda prompt: len(encode(prompt)))
        prompts.append(encode(question.prompt))
    return prompts


@dataclass(frozen=True, slots=True)
class DecodeSelections:
    """The selections of all decoding requests in one layer of one step."""

    layer: int
    seats: Tensor  # [requests] int64
    lengths: Sequence[int]  # context length of each request, including the new token
    positions: Tensor  # [requests, k] int32, EMPTY-padded


class RecordingView(ViewWrapper):
    """Appends the selections of decoding requests (segments of one token) to `recorded`."""

    def __init__(self, inner: ResidentView, recorded: list[DecodeSelections]) -> None:
        super().__init__(inner)
        self._seat_of = inner.seat_of
        self._recorded = recorded

    def select(self, layer: int, positions: Tensor) -> Selected:
        single = [span for span in self.segments if span.last - span.first == 1]
        if single:
            tokens = torch.tensor([span.first for span in single], device=positions.device)
            lengths = [span.length for span in single]
            chosen = positions[tokens].to(torch.int32)
            self._recorded.append(DecodeSelections(layer, self._seat_of[tokens], lengths, chosen))
        return self._inner.select(layer, positions)


class RecordingModel:
    """Wraps a decoder and records the selections of decoding requests, in the memory of the decoder's device."""

    def __init__(self, inner: Decoder) -> None:
        self.inner = inner
        self.device, self.dtype = inner.device, inner.dtype
        self._recorded: list[DecodeSelections] = []

    @property
    def kv_shape(self) -> KvShape:
        return self.inner.kv_shape

    def forward(self, token_ids: Tensor, view: View) -> Tensor:
        assert isinstance(view, ResidentView)
        return self.inner.forward(token_ids, RecordingView(view, self._recorded))

    def logits(self, hidden: Tensor, indices: Tensor | None) -> Tensor:
        return self.inner.logits(hidden, indices)

    def selections(self, prompt_lengths: Sequence[int], steps: int, k: int) -> np.ndarray:
        """Returns the recorded positions [requests, steps, layers, k] int32, EMPTY-padded.

        A request is identified by the length of its prompt, so the lengths of all prompts must differ.
        """
        by_seat: dict[int, dict[tuple[int, int], np.ndarray]] = {}  # seat -> (context length, layer) -> positions
        for step in self._recorded:
            chosen = step.positions.cpu().numpy()
            for seat, length, positions in zip(step.seats.tolist(), step.lengths, chosen, strict=True):
                by_seat.setdefault(seat, {})[length, step.layer] = positions
        layers = self.inner.spec.layers
        out = np.empty((len(prompt_lengths), steps, layers, k), dtype=np.int32)
        for selected in by_seat.values():
            longest = max(length for length, _layer in selected)
            request = prompt_lengths.index(longest - steps)
            first = prompt_lengths[request] + 1
            for number in range(steps):
                for layer in range(layers):
                    out[request, number, layer] = selected[first + number, layer]
        assert len(by_seat) == len(prompt_lengths), "a seat was used twice, or a request never ran"
        return out


def load(config: EngineConfig) -> tuple[ModelFiles, RecordingModel, Engine]:
    """Returns the model's files, the recording model, and an engine that runs it. Raises StartupError on failure."""
    device = choose_device(config.device)
    files = find_model(config.model)
    if not isinstance(files.spec.attention, MlaSpec):
        raise ConfigError(f"{config.model} has no indexer, so there are no selections to record")
    dtype = choose_dtype(config.dtype, files.spec, device)
    weights = open_weights(files, dtype, device, load_format=config.load_format)
    model = RecordingModel(Decoder(files.spec, weights))
    weights.finish()
    budget = kv_budget(config, model.kv_shape, files.spec.context, device)
    card = model_card(config, files.spec, budget, device, dtype)
    executor = in_process_executor(config, model, budget, device, card.vocab)
    return files, model, assemble(config, card, model.kv_shape, budget, executor)


def decode(engine: Engine, prompts: Sequence[list[int]], steps: int, temperature: float, seed: int) -> None:
    """Decodes `steps` steps after each prompt, with all requests in the engine at the same time."""
    input_processor = InputProcessor(engine.card, seed=seed)
    for number, prompt in enumerate(prompts):
        # The prefill samples the first token, so a request generates one more token than it has decode steps.
        params = SamplingParams(temperature=temperature, max_tokens=steps + 1, ignore_eos=True, seed=seed + number)
        for choice in input_processor.accept(str(number), prompt, params):
            engine.add(choice)
    total = sum(map(len, prompts)) + len(prompts) * (steps + 1)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("Decoding", total=total)
        while not engine.idle:
            engine.step()
            stats = engine.stats()
            progress.update(task, completed=stats.tokens_prefilled + stats.tokens_generated)
    assert not engine.stats().recomputes, "a request was recomputed: the device pool is too small for all requests"


def record(options: argparse.Namespace) -> TopkTrace:
    span = options.longest - options.shortest
    targets = [options.shortest + span * n // max(1, options.requests - 1) for n in range(options.requests)]
    config = EngineConfig(
        model=options.model,
        device=options.device,
        max_num_seqs=options.requests,
        device_kv_tokens=sum(targets) + options.requests * (options.steps + 128),
        max_model_len=options.longest + options.steps + 1,
        cuda_graphs="off",  # replaying a captured step runs no Python, so nothing would be recorded
    )
    files, model, engine = load(config)
    tokenizer = Tokenizer.load(files, None)
    if tokenizer is None:
        raise ConfigError(f"{options.model} has no tokenizer.json, which the prompts require")
    prompts = make_prompts(tokenizer, targets, options.seed)
    lengths = [len(prompt) for prompt in prompts]
    if len(set(lengths)) < len(lengths):
        raise ConfigError("two prompts have the same number of tokens, but these must differ: increase --longest")
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
        context_lengths=tuple(length + 1 for length in lengths),
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--model", default="models/demo-dsa", help="directory of a sparse-attention model")
    parser.add_argument("--out", type=Path, default=Path("data/topk/demo-dsa.topk"), help="trace file to write")
    parser.add_argument("--device", help="'cpu', 'cuda' or 'cuda:N'; default: the GPU if there is one")
    parser.add_argument("--requests", type=int, default=8, help="number of requests")
    parser.add_argument("--steps", type=int, default=512, help="decode steps per request")
    parser.add_argument("--shortest", type=int, default=4608, help="tokens of the shortest prompt and answer")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of the longest prompt and answer")
    parser.add_argument("--temperature", type=float, default=0.7, help="sampling temperature")
    parser.add_argument("--seed", type=int, default=0, help="seed of questions and sampling")
    options = parser.parse_args()
    try:
        trace = record(options)
    except HotsetError as error:
        sys.exit(f"error: {error}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_trace(options.out, trace)
    print(f"{options.out}: {trace.header.shape} selections in {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
