"""An engine with a real scheduler and real memory around a model that does not compute prompts, for tier benchmarks.

Computing all prompts of a full engine would take hours on a CPU. Instead, a synthetic model stores random rows and
index keys for the prompts, and its selections are about as local as the demo model's. The demo model can decode over
those rows.
"""

import time

import torch
from torch import Tensor

from hotset.base.config import EngineConfig, TiersMode
from hotset.base.errors import ConfigError
from hotset.base.sampling import SamplingParams
from hotset.engine.build import assemble, in_process_executor, model_card
from hotset.engine.input_processor import InputProcessor
from hotset.engine.sizing import kv_budget
from hotset.kernels import EMPTY
from hotset.memory.device_pool import KvShape
from hotset.memory.view import View
from hotset.models.attention.dsa_spec import MlaSpec
from hotset.models.checkpoint.files import find_model
from hotset.models.checkpoint.weights import open_weights
from hotset.models.decoder import Decoder
from hotset.schedule.request import Phase, Request

CPU = torch.device("cpu")
DTYPE = torch.float32
MAX_STEP_TOKENS = 8192  # whole prompts fit in one step, since they are not computed
SEATS = 256
# Steps for which a synthetic selection keeps a position. With twice top-k slots, 15 % of the selected rows are missing,
# as with the demo model.
KEPT_STEPS = 5


class SyntheticModel:
    """Stores random rows and index keys and selects positions. All logits are equal: greedy sampling gives token 0."""

    def __init__(self, shape: KvShape, vocab: int) -> None:
        assert shape.key is not None, "the model must have an indexer"
        random = torch.Generator().manual_seed(0)
        tokens = MAX_STEP_TOKENS + SEATS
        self._shape = shape
        self._logits = torch.zeros(SEATS, vocab)
        self._rows = torch.randn(tokens, shape.row.width, generator=random).to(shape.row.dtype)
        self._keys = torch.randn(tokens, shape.key.width, generator=random).to(shape.key.dtype)

    def forward(self, token_ids: Tensor, view: View) -> Tensor:
        count = token_ids.shape[0]
        for group in range(self._shape.groups):
            view.keys(group).store(view.segments.positions, self._keys[:count])
            positions = self._select(view, group)
            for layer in self._shape.layers_of(group):
                view.new_rows(layer).store(self._rows[:count])
                view.select(layer, positions).wait()
        return token_ids

    def logits(self, hidden: Tensor, indices: Tensor | None) -> Tensor:
        return self._logits[: hidden.shape[0] if indices is None else indices.shape[0]]

    def _select(self, view: View, group: int) -> Tensor:
        """Returns [tokens, topk] positions. In a step with a prompt, only the last token of each segment selects: other
        selections would have no effect."""
        segments = view.segments
        if segments.decoding:
            return self.positions(segments.positions, group)
        chosen = torch.full((segments.positions.shape[0], self._shape.topk), EMPTY)
        last = torch.tensor([span.last - 1 for span in segments])
        chosen[last] = self.positions(segments.positions[last], group)
        return chosen

    def positions(self, queries: Tensor, group: int) -> Tensor:
        """Returns the selections of queries at the positions `queries` [tokens]: [tokens, topk] ascending, then EMPTY.

        A quarter of a selection are the newest positions. The others are random, and each is kept for KEPT_STEPS steps.
        """
        newest = self._shape.topk // 4
        entry = torch.arange(self._shape.topk - newest)
        chosen_at = ((queries[:, None] - entry) // KEPT_STEPS * KEPT_STEPS + entry).clamp_min(1)
        mixed = (chosen_at * 0x9E3779B1 + entry * 0x85EBCA6B + group * 0xC2B2AE35) * 0x27D4EB2F165667C5
        random = (mixed >> 33 & 0x3FFFFFFF) % chosen_at
        chosen = torch.cat((random, queries[:, None] - torch.arange(newest)), dim=1).sort(dim=1).values
        invalid = chosen < 0
        invalid[:, 1:] |= chosen[:, 1:] == chosen[:, :-1]  # duplicates
        past_end = torch.iinfo(torch.int64).max
        chosen = chosen.masked_fill(invalid, past_end).sort(dim=1).values
        return chosen.masked_fill(chosen == past_end, EMPTY)


class SyntheticDemoModel:
    """The demo model with synthetic prompts. Its own weights are used only while `computes_decode` is set, and only in
    steps without prompts."""

    device, dtype = CPU, DTYPE

    def __init__(self, model: str) -> None:
        files = find_model(model)
        if not isinstance(files.spec.attention, MlaSpec):
            raise ConfigError(f"{model} has no indexer: tiers require a model that selects rows")
        weights = open_weights(files, DTYPE, CPU)
        self._decoder = Decoder(files.spec, weights)
        weights.finish()
        self.spec = files.spec
        self.kv_shape = self._decoder.kv_shape
        self.synthetic = SyntheticModel(self.kv_shape, self.spec.vocab)
        self.computes_decode = False
        self._step_model: Decoder | SyntheticModel = self.synthetic  # the model of the current step

    def forward(self, token_ids: Tensor, view: View) -> Tensor:
        self._step_model = self._decoder if self.computes_decode and view.segments.decoding else self.synthetic
        return self._step_model.forward(token_ids, view)

    def logits(self, hidden: Tensor, indices: Tensor | None) -> Tensor:
        return self._step_model.logits(hidden, indices)


class DemoEngine:
    """An engine around the demo model that keeps every request added to it."""

    def __init__(self, model: SyntheticDemoModel, tiers: TiersMode, device_gib: float, max_length: int) -> None:
        """Unless tiers are off, the host store is 8 times as large as the device memory, so device memory limits the
        number of tiered requests."""
        self._model = model
        config = EngineConfig(
            tiers=tiers,
            max_num_seqs=SEATS,
            max_num_batched_tokens=MAX_STEP_TOKENS,
            device_kv_gib=device_gib,
            host_kv_gib=None if tiers == "off" else 8 * device_gib,
            max_model_len=max_length,
            prefix_cache=False,  # all prompts have the same tokens, but none may share pages with another
        )
        self.budget = kv_budget(config, model.kv_shape, model.spec.context, CPU)
        card = model_card(config, model.spec, self.budget, CPU, DTYPE)
        executor = in_process_executor(config, model, self.budget, CPU, card.vocab)
        self.engine = assemble(config, card, model.kv_shape, self.budget, executor)
        self._input_processor = InputProcessor(card, seed=0)
        self.requests: list[Request] = []

    def add(self, prompt_tokens: int, answer_tokens: int) -> Request:
        """Adds a request that generates exactly `answer_tokens` tokens."""
        params = SamplingParams(temperature=0, max_tokens=answer_tokens, ignore_eos=True)
        (choice,) = self._input_processor.accept(str(len(self.requests)), [0] * prompt_tokens, params)
        request = choice.to_request()
        self.engine.replicas[0].scheduler.add(request)  # like `Engine.add`, which does not return the request
        self.requests.append(request)
        return request

    def step(self, computes_decode: bool = False) -> float:
        """Runs one step and returns its CPU seconds. `computes_decode` applies to this step."""
        self._model.computes_decode = computes_decode
        start = time.thread_time()
        self.engine.step()
        return time.thread_time() - start

    @property
    def decoding(self) -> int:
        return sum(request.phase is Phase.DECODE for request in self.requests)
