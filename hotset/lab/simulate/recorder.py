"""Records the rows that a sparse-attention model selects while it decodes long contexts: `hotset record`.

The prompts are questions from all tasks of evaluate/tasks.py in turn: real text with hidden records, and a question at
the end. Tokens are sampled. Decoding continues past the end of the answer: the model then writes more text, records and
questions. All requests run in the same engine at the same time. `topk_trace.py` describes the file format.
"""

import datetime
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError, InternalError
from hotset.base.sampling import SamplingParams
from hotset.base.settings import check_settings, setting
from hotset.engine.build import assemble, model_card
from hotset.engine.build_runner import build_runner
from hotset.engine.core import Engine
from hotset.engine.input_processor import InputProcessor
from hotset.engine.loading import choose_device, choose_dtype
from hotset.engine.sizing import kv_budget
from hotset.engine.workers.executor import InProcessExecutor
from hotset.kernels.rows import PagedRows
from hotset.kernels.segments import Segments
from hotset.lab.evaluate.tasks import TASKS, make_questions
from hotset.lab.simulate.topk_trace import TopkTrace, TraceHeader
from hotset.memory.device_pool import KvShape
from hotset.memory.resident import ResidentView
from hotset.memory.view import Contexts, NewRows, Selected, View
from hotset.models.checkpoint.files import ModelFiles, find_model
from hotset.models.checkpoint.weights import open_weights
from hotset.models.decoder import Decoder
from hotset.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RecordConfig:
    """What `hotset record` records."""

    requests: int = setting(8, "Number of requests, which decode at the same time.", minimum=1)
    steps: int = setting(512, "Steps of each request: the last token of its prompt, and decode steps.", minimum=2)
    shortest: int = setting(4608, "Tokens of the shortest prompt with its answer.", minimum=256)
    longest: int = setting(8192, "Tokens of the longest prompt with its answer.", minimum=256)
    temperature: float = setting(0.7, "Sampling temperature.")
    seed: int = setting(0, "Seed of questions and sampling.", minimum=0)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.longest < self.shortest:
            raise ConfigError(f"--longest {self.longest} is lower than --shortest {self.shortest}; raise it")

    @property
    def lengths(self) -> list[int]:
        """The lengths of all prompts with their answers."""
        span = self.longest - self.shortest
        return [self.shortest + span * number // max(1, self.requests - 1) for number in range(self.requests)]


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
class LastSelections:
    """The selections of the newest token of each request in one layer of one step."""

    layer: int
    seats: Tensor  # [requests] int64
    lengths: Sequence[int]  # context length of each request, including the new token
    positions: Tensor  # [requests, k] int32, EMPTY-padded


class ViewWrapper:
    """Forwards every call to another view. Subclasses override the calls that they observe or change."""

    def __init__(self, inner: View) -> None:
        self._inner = inner

    @property
    def segments(self) -> Segments:
        return self._inner.segments

    @property
    def padded_seats(self) -> Tensor | None:
        return self._inner.padded_seats

    def new_rows(self, layer: int) -> NewRows:
        return self._inner.new_rows(layer)

    def keys(self, group: int) -> PagedRows:
        return self._inner.keys(group)

    def context(self, layer: int) -> PagedRows:
        return self._inner.context(layer)

    def select(self, layer: int, positions: Tensor) -> Selected:
        return self._inner.select(layer, positions)

    def short_contexts(self, layer: int) -> Contexts | None:
        return self._inner.short_contexts(layer)


class RecordingView(ViewWrapper):
    """Appends the selections of the last token of each segment to `recorded`."""

    def __init__(self, inner: ResidentView, recorded: list[LastSelections]) -> None:
        super().__init__(inner)
        self._seat_of = inner.seat_of
        self._recorded = recorded

    def select(self, layer: int, positions: Tensor) -> Selected:
        tokens = torch.tensor([span.last - 1 for span in self.segments], device=positions.device)
        lengths = [span.length for span in self.segments]
        chosen = positions[tokens].to(torch.int32)
        self._recorded.append(LastSelections(layer, self._seat_of[tokens], lengths, chosen))
        return super().select(layer, positions)


class RecordingModel:
    """Wraps a decoder and records the selections of newest tokens, in the memory of the decoder's device."""

    def __init__(self, inner: Decoder) -> None:
        self.inner = inner
        self.device, self.dtype = inner.device, inner.dtype
        self._recorded: list[LastSelections] = []

    @property
    def kv_shape(self) -> KvShape:
        return self.inner.kv_shape

    def forward(self, token_ids: Tensor, view: View) -> Tensor:
        assert isinstance(view, ResidentView)
        return self.inner.forward(token_ids, RecordingView(view, self._recorded))

    def forward_once(self, token_ids: Tensor, view: View) -> Tensor:
        return self.inner.forward_once(token_ids, view)

    def logits(self, hidden: Tensor, indices: Tensor | None) -> Tensor:
        return self.inner.logits(hidden, indices)

    def selections(self, prompt_lengths: Sequence[int], steps: int, k: int) -> np.ndarray:
        """Returns the recorded positions [requests, steps, layers, k] int32, EMPTY-padded.

        The first step is that of the last token of a prompt. A request is identified by the length of its prompt, so
        the lengths of all prompts must differ.
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
            first = longest - steps + 1
            request = prompt_lengths.index(first)
            for number in range(steps):
                for layer in range(layers):
                    out[request, number, layer] = selected[first + number, layer]
        if len(by_seat) != len(prompt_lengths):
            raise InternalError("a seat was used twice, or a request never ran")
        return out


def load(config: EngineConfig) -> tuple[ModelFiles, RecordingModel, Engine]:
    """Returns the model's files, the recording model, and an engine that runs it. Raises StartupError on failure."""
    device = choose_device(config.device)
    files = find_model(config.model)
    if files.spec.attention.topk is None:
        raise ConfigError(f"{config.model} has no indexer, so there are no selections to record")
    dtype = choose_dtype(config.dtype, files.spec, device)
    weights = open_weights(files, dtype, device, load_format=config.load_format)
    model = RecordingModel(Decoder(files.spec, weights))
    weights.finish()
    budget = kv_budget(config, model.kv_shape, files.spec.context, device)
    card = model_card(config, files.spec, budget, device, dtype)
    executor = InProcessExecutor(build_runner(config, model, budget, device, card.vocab))
    return files, model, assemble(config, card, model.kv_shape, budget, executor)


def decode(
    engine: Engine,
    prompts: Sequence[list[int]],
    steps: int,
    temperature: float,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Computes each prompt and the decode steps after it. The step of the prompt's last token is the first of `steps`.

    All requests are in the engine at the same time. `progress(done, total)` counts tokens.
    """
    input_processor = InputProcessor(engine.card, seed=seed)
    for number, prompt in enumerate(prompts):
        # The step of the prompt's last token samples the first token.
        params = SamplingParams(temperature=temperature, max_tokens=steps, ignore_eos=True, seed=seed + number)
        for choice in input_processor.accept(str(number), prompt, params):
            engine.add(choice)
    total = sum(map(len, prompts)) + len(prompts) * steps
    while not engine.idle:
        engine.step()
        stats = engine.stats()
        progress(stats.tokens_prefilled + stats.tokens_generated, total)
    if engine.stats().recomputes:
        raise ConfigError("a request was recomputed, because the device pool is too small for all requests")


def record(
    model_name: str,
    device: str | None,
    config: RecordConfig,
    recorded: dict[str, Any],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TopkTrace:
    """Records a trace. Its header contains `recorded`, and date, dtype and machine.

    Raises StartupError if the model cannot be loaded, has no indexer, or has no tokenizer for the prompts.
    """
    targets = config.lengths
    engine_config = EngineConfig(
        model=model_name,
        device=device,
        max_num_seqs=config.requests,
        device_kv_tokens=sum(targets) + config.requests * (config.steps + 128),
        max_model_len=config.longest + config.steps + 1,
        cuda_graphs="off",  # replaying a captured step runs no Python, so nothing would be recorded
        prefix_cache=False,
    )
    files, model, engine = load(engine_config)
    try:
        tokenizer = Tokenizer.load(files, None)
        if tokenizer is None:
            raise ConfigError(f"{model_name} has no tokenizer.json, which the prompts require")
        prompts = make_prompts(tokenizer, targets, config.seed)
        lengths = [len(prompt) for prompt in prompts]
        if len(set(lengths)) < len(lengths):
            raise ConfigError("two prompts have the same number of tokens, but these must differ: increase --longest")
        decode(engine, prompts, config.steps, config.temperature, config.seed, progress)
    finally:
        engine.close()
    topk = files.spec.attention.topk
    assert topk is not None
    header = TraceHeader(
        model=engine.card.name,
        layers=files.spec.layers,
        k=topk,
        requests=config.requests,
        steps=config.steps,
        context_lengths=tuple(lengths),
        page_rows=engine_config.page_rows,
        recorded=recorded
        | {
            "date": datetime.date.today().isoformat(),
            "dtype": engine.card.dtype,
            "device": engine.card.device,
            "machine": platform.machine(),
        },
    )
    return TopkTrace(header, model.selections(lengths, config.steps, topk))
