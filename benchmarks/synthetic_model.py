"""An engine with real scheduling and real memory around a model whose prompts cost nothing: for benchmarks of tiers.

Computing the prompts of a full engine would take hours on a CPU. A stand-in writes made-up rows and index keys for
them instead, and selects positions about as local as the demo model's. Decoding is the demo model's own where asked.
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
from hotset.models.checkpoint import find_model, open_weights
from hotset.models.decoder import Decoder
from hotset.models.spec import MlaSpec
from hotset.schedule.request import Phase, Request

CPU = torch.device("cpu")
DTYPE = torch.float32
STEP_ROWS = 8192  # whole prompts in one step: nothing computes them
SEATS = 256
NEW_EVERY = (
    5  # steps for which the stand-in keeps a position: it misses 15 % in twice top-k slots, as the demo model does
)


class StandIn:
    """Writes made-up rows and keys, selects positions, answers token 0; computes nothing."""

    def __init__(self, shape: KvShape, vocab: int) -> None:
        assert shape.key is not None, "a model that selects"
        random = torch.Generator().manual_seed(0)
        most = STEP_ROWS + SEATS
        self._shape = shape
        self._logits = torch.zeros(SEATS, vocab)
        self._rows = torch.randn(most, shape.row.width, generator=random).to(shape.row.dtype)
        self._keys = torch.randn(most, shape.key.width, generator=random).to(shape.key.dtype)

    def forward(self, token_ids: Tensor, view: View, wanted: Tensor | None) -> Tensor:
        count = token_ids.shape[0]
        for group in range(self._shape.groups):
            view.keys(group).store(view.segments.positions, self._keys[:count])
            positions = self._select(view, group)
            for layer in self._shape.layers_of(group):
                view.new_rows(layer).store(self._rows[:count])
                view.select(layer, positions)
        return self._logits[: count if wanted is None else wanted.shape[0]]

    def _select(self, view: View, group: int) -> Tensor:
        """[query rows, topk]; of a prompt only the last row selects: what the others do would be forgotten."""
        segments = view.segments
        if segments.decoding:
            return self.positions(segments.positions, group)
        chosen = torch.full((segments.positions.shape[0], self._shape.topk), EMPTY)
        last = torch.tensor([span.last - 1 for span in segments])
        chosen[last] = self.positions(segments.positions[last], group)
        return chosen

    def positions(self, at: Tensor, group: int) -> Tensor:
        """For queries at positions `at` [rows]: [rows, topk] ascending, then EMPTY. A quarter are the newest positions;
        the others lie anywhere, and each is kept for NEW_EVERY steps."""
        newest = self._shape.topk // 4
        number = torch.arange(self._shape.topk - newest)
        since = ((at[:, None] - number) // NEW_EVERY * NEW_EVERY + number).clamp_min(1)
        mixed = (since * 0x9E3779B1 + number * 0x85EBCA6B + group * 0xC2B2AE35) * 0x27D4EB2F165667C5
        anywhere = (mixed >> 33 & 0x3FFFFFFF) % since
        chosen = torch.cat((anywhere, at[:, None] - torch.arange(newest)), dim=1).sort(dim=1).values
        unwanted = chosen < 0
        unwanted[:, 1:] |= chosen[:, 1:] == chosen[:, :-1]
        past = torch.iinfo(torch.int64).max
        chosen = chosen.masked_fill(unwanted, past).sort(dim=1).values
        return chosen.masked_fill(chosen == past, EMPTY)


class Demo:
    """The demo model, whose prompts the stand-in takes over, and its decoding too unless `computes`."""

    device = CPU

    def __init__(self, model: str) -> None:
        files = find_model(model)
        if not isinstance(files.spec.attention, MlaSpec):
            raise ConfigError(f"{model} has no indexer: tiers are for models that select their rows")
        weights = open_weights(files, DTYPE, CPU)
        self._decoder = Decoder(files.spec, weights)
        weights.finish()
        self.spec = files.spec
        self.kv_shape = self._decoder.kv_shape
        self.stand_in = StandIn(self.kv_shape, self.spec.vocab)
        self.computes = False

    def forward(self, token_ids: Tensor, view: View, wanted: Tensor | None) -> Tensor:
        model = self._decoder if self.computes and view.segments.decoding else self.stand_in
        return model.forward(token_ids, view, wanted)


class Watched:
    """An engine, and every request that it was given."""

    def __init__(self, demo: Demo, tiers: TiersMode, gib: float, longest: int) -> None:
        """A host store for as many rows as the device could keep hot."""
        self._demo = demo
        config = EngineConfig(
            tiers=tiers,
            max_num_seqs=SEATS,
            max_num_batched_tokens=STEP_ROWS,
            device_kv_gib=gib,
            host_kv_gib=None if tiers == "off" else 8 * gib,
            max_model_len=longest,
        )
        self.budget = kv_budget(config, demo.kv_shape, demo.spec.context, CPU)
        card = model_card(config, demo.spec, self.budget, CPU, DTYPE)
        executor = in_process_executor(config, demo, self.budget, CPU, card.vocab)
        self.engine = assemble(config, card, demo.kv_shape, self.budget, executor)
        self._intake = InputProcessor(card, seed=0)
        self.requests: list[Request] = []

    def add(self, prompt: int, answer: int) -> Request:
        """A request of `prompt` tokens that generates exactly `answer`."""
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        (choice,) = self._intake.accept(str(len(self.requests)), [0] * prompt, params)
        request = choice.to_request()
        self.engine.replicas[0].scheduler.add(request)  # as `Engine.add` does, which does not hand the request out
        self.requests.append(request)
        return request

    def step(self, computes: bool = False) -> float:
        """One step; its processor seconds."""
        self._demo.computes = computes
        start = time.thread_time()
        self.engine.step()
        return time.thread_time() - start

    @property
    def decoding(self) -> int:
        return sum(request.phase is Phase.DECODE for request in self.requests)
