"""Helpers that several test files share: a small engine around any decoder, random weights, and a loop that runs
requests."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotset.base.config import EngineConfig
from hotset.base.sampling import SamplingParams
from hotset.engine.build import assemble, model_card
from hotset.engine.build_runner import build_runner
from hotset.engine.connections import Connections, load_connections
from hotset.engine.core import Engine
from hotset.engine.decode_graphs import RunnerModel
from hotset.engine.input_processor import InputProcessor
from hotset.engine.llm import LLM
from hotset.engine.sizing import kv_budget
from hotset.engine.workers.executor import InProcessExecutor
from hotset.engine.workers.processes import MultiprocessExecutor
from hotset.memory.device_pool import KvShape
from hotset.memory.resident import ResidentView
from hotset.memory.view import View
from hotset.models.checkpoint.weights import WeightSource
from hotset.models.decoder import Decoder
from hotset.models.formats.weight_format import PLAIN, WeightFormat
from hotset.models.spec import ModelSpec
from hotset.schedule.plan import LogprobColumns

CPU = torch.device("cpu")
DEMO = str(Path(__file__).resolve().parents[1] / "models" / "demo-dsa")


class RandomTensors:
    """Random tensors. Their scale keeps activations from vanishing or exploding, so sampled tokens vary."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def announce(self, name: str, shape: tuple[int, ...], rows: range | None) -> None:
        pass

    def read(self, name: str, shape: tuple[int, ...], rows: range | None = None) -> Tensor:
        values = self._draw(name, shape)
        return values if rows is None else values[rows.start : rows.stop]

    def _draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        if "norm.weight" in name:
            values = 1 + 0.1 * values
        elif len(shape) == 2:
            values *= 1.5 * shape[1] ** -0.5
        else:
            values *= 0.1
        return values

    def format_of(self, name: str) -> WeightFormat:
        return PLAIN

    def stored_bytes(self, name: str) -> int:
        return 0

    def title(self, name: str) -> str:
        return name

    def finish(self) -> None:
        pass


class RandomWeights(WeightSource):
    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__(RandomTensors(seed), dtype, CPU)


class Recorder:
    """Wraps a decoder and records all logits. `recorded` maps the tokens of a context, up to and including a computed
    token, to the logits of that token: one tensor for each time that the token was computed."""

    def __init__(self, inner: RunnerModel) -> None:
        self._inner = inner
        self.device = inner.device
        self.recorded: dict[tuple[int, ...], list[Tensor]] = {}
        # [seats, context + 1]: the runner's token ids, which are complete for resumed requests too
        self.tokens = torch.empty(0, 0)

    @property
    def kv_shape(self) -> KvShape:
        return self._inner.kv_shape

    def forward(self, token_ids: Tensor, view: View) -> Tensor:
        assert isinstance(view, ResidentView)
        hidden = self._inner.forward(token_ids, view)
        assert hidden is not None
        logits = self._inner.logits(hidden, None)
        for _segment, first, last, length in view.segments:
            context = self.tokens[int(view.seat_of[first]), :length].tolist()
            assert context[length - (last - first) :] == token_ids[first:last].tolist()
            for index in range(first, last):
                prefix = tuple(context[: length - (last - 1 - index)])
                self.recorded.setdefault(prefix, []).append(logits[index].clone())
        return hidden

    def logits(self, hidden: Tensor, indices: Tensor | None) -> Tensor:
        return self._inner.logits(hidden, indices)


@dataclass
class Answer:
    """The tokens of one request, its finish reason, and the log-probabilities of its prompt."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_logprobs: list[LogprobColumns] = field(default_factory=list)


def make_engine(
    model: RunnerModel,
    spec: ModelSpec,
    /,
    *,
    connections: Callable[[], Connections] = load_connections,
    weights: str = "",
    **settings: Any,
) -> Engine:
    """Returns an engine around a loaded decoder. `settings` are fields of EngineConfig."""
    config = EngineConfig(**settings)
    budget = kv_budget(config, model.kv_shape, spec.context, CPU)
    card = model_card(config, spec, budget, CPU, torch.float64)
    executor = InProcessExecutor(build_runner(config, model, budget, CPU, card.vocab))
    engine = assemble(config, card, model.kv_shape, budget, executor, weights=weights, connections=connections)
    if isinstance(model, Recorder):
        assert isinstance(engine.executor, InProcessExecutor)
        model.tokens = engine.executor.runner._tokens
    return engine


def whole_engine(spec: ModelSpec, seed: int, **settings: Any) -> Engine:
    """Returns an engine of one process, with random weights in float64. `settings` are fields of EngineConfig."""
    return make_engine(Decoder(spec, RandomWeights(torch.float64, seed)), spec, **settings)


def run_all(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    arrive_at: Sequence[int] | None = None,
) -> list[Answer]:
    """Runs every request to its end, and returns the answers in the order of `prompts`.

    Request i is added before step `arrive_at[i]`, counted from 0. Without `arrive_at`, all requests are added before
    the first step.
    """
    input_processor = InputProcessor(engine.card, seed=0)
    answers = {f"{index}/0": Answer() for index in range(len(prompts))}
    pending = sorted(range(len(prompts)), key=lambda index: 0 if arrive_at is None else arrive_at[index])
    step = 0
    while pending or not engine.idle:
        while pending and (arrive_at is None or arrive_at[pending[0]] <= step):
            index = pending.pop(0)
            for choice in input_processor.accept(str(index), prompts[index], params[index]):
                engine.add(choice)
        outputs = engine.step()
        engine.audit()
        for request_id, columns in outputs.prompt_logprobs:
            answers[request_id].prompt_logprobs.append(columns)
        for request_id, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
            answers[request_id].token_ids.append(token)
        for request_id, reason in outputs.finished.items():
            answers[request_id].finish_reason = reason
        step += 1
        assert step < 100_000, "the engine makes no progress"
    return list(answers.values())


def executor_of(llm: LLM) -> MultiprocessExecutor:
    """Returns the executor of an engine with several worker processes."""
    executor = llm._engine.executor
    assert isinstance(executor, MultiprocessExecutor)
    return executor


def pids_of(llm: LLM) -> list[int]:
    return [worker.process.pid for worker in executor_of(llm).workers if worker.process.pid is not None]


# Fields of config.json with the sizes of a small sparse model.
DSA_SIZES: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "index_topk": 5,
    "index_head_dim": 16,
    "index_n_heads": 3,
}
# Fields with which `tiny_directory` writes a sparse model. The test adds its numbers of layers and heads.
SPARSE_FIELDS = DSA_SIZES | {
    "model_type": "deepseek_v32",
    "vocab_size": 60,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "index_topk": 8,
}


def tiny_directory(folder: Path, **changes: Any) -> str:
    """Writes a model directory that contains only config.json, for load_format='dummy', and returns its path.

    `changes` replace or add fields of config.json.
    """
    config = {
        "model_type": "llama",
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "eos_token_id": 3,
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)
