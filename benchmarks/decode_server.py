"""The models that `decode.py` measures: random weights, one real rank beside simulated ones, and an engine."""

import json
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
from decode_load import max_requests_with_prefix
from torch import Tensor
from torch.nn import functional as F

from hotset.base.config import EngineConfig, TiersMode
from hotset.engine import build
from hotset.engine.core import Engine
from hotset.engine.decode_graphs import RunnerModel
from hotset.engine.drafts.settings import DraftSettings
from hotset.engine.runner import Runner
from hotset.engine.sizing import KvBudget
from hotset.engine.workers.executor import InProcessExecutor
from hotset.kernels import EMPTY
from hotset.memory.device_pool import DevicePool
from hotset.memory.host_store import HostStore
from hotset.models.attention.dsa_spec import MlaSpec
from hotset.models.checkpoint.weights import WeightSource, dummy_weights
from hotset.models.decoder import Decoder
from hotset.models.families import read_spec
from hotset.models.layers import Moe
from hotset.models.spec import KvStorage, ModelSpec
from hotset.models.split import Split
from hotset.models.weight_plan import plan_weights, weight_bytes
from hotset.tiers.kv_memory import KvMemory
from hotset.tiers.prefix_cache import PrefixCache

CONFIGS = Path(__file__).parents[1] / "hotset" / "lab" / "plan" / "configs"
FP8_KV = KvStorage(fp8_rows=True, fp8_keys=True)
PEER_TOKENS = 512  # different tokens of each peer; more tokens repeat them
PEER_LOGITS_BELOW = 100.0  # how much lower the logits of peers are


def load_spec(
    name: str, *, layers: int | None = None, layers_per_indexer: int | None = None, with_mtp: bool = False
) -> ModelSpec:
    """Reads a configuration in hotset/lab/plan/configs. By default, the model is as published.

    `layers` keeps only the first layers, `layers_per_indexer` sets how many layers share an indexer's selection, and
    `with_mtp` adds an MTP layer.
    """
    path = CONFIGS / f"{name}.json"
    fields = json.loads(path.read_text()) | ({"num_nextn_predict_layers": 1} if with_mtp else {})
    spec = read_spec(fields, {}, str(path), with_mtp=with_mtp)
    assert isinstance(spec.attention, MlaSpec)
    layers, index = layers or spec.layers, spec.attention.index
    full = tuple(layer for layer in index.full_layers if layer < layers)
    if layers_per_indexer is not None:
        full = tuple(range(0, layers, layers_per_indexer))
    attention = replace(spec.attention, index=replace(index, full_layers=full))
    moe = spec.moe and replace(spec.moe, layers=tuple(layer for layer in spec.moe.layers if layer < layers))
    return replace(spec, layers=layers, attention=attention, moe=moe)


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One call of a collective operation."""

    name: str
    link_bytes: float  # bytes that each rank sends over the links between GPUs; it receives as many


class SimulatedRanks:
    """Implements `Collectives` for rank 0 of `size` ranks. The other ranks (peers) do not exist.

    Results have the shapes of real ones, and as many bytes are moved within the device as a real call would write:

    - `all_gather_tokens` returns the tokens of this rank, then those of the peers: fixed random numbers with a variance
      of 1, as after a norm. The tokens of peer n have the routes of this rank's tokens, shifted by n times the number
      of experts per rank. So the experts of this rank receive as many tokens as from `size` ranks.
    - `reduce_scatter` adds up the parts of all ranks' tokens, in place of the partial sums of the peers.
    - `all_reduce` copies. `broadcast` returns its argument: this is rank 0.
    - `all_gather_columns` returns the logits of this rank, then lower ones for the peers. So this rank holds the
      embedding of every sampled token. Otherwise the embeddings would be 0, and all requests would choose the same
      experts.

    Each operation uses a torch operation that no other part of a decode step uses (cat, sum, copysign), so that a
    profile shows its time.
    """

    def __init__(self, size: int, hidden: int, experts: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rank, self.size = 0, size
        self._hidden = hidden
        expert, shift = torch.arange(experts, device=device), torch.arange(size, device=device) * (experts // size)
        # [ranks, experts + 1]: the last column is that of EMPTY, -1.
        self._shifted_ids = F.pad((expert + shift[:, None]) % experts, (0, 1), value=EMPTY)
        self.tokens_per_rank: Sequence[int] = ()
        self.calls: list[CollectiveCall] = []  # the caller clears it; replays of graphs add no calls
        random = torch.Generator(device).manual_seed(0)
        self._peers = torch.randn(size - 1, PEER_TOKENS, hidden, generator=random, device=device).to(dtype)

    def all_reduce(self, x: Tensor) -> Tensor:
        self._record("all_reduce", 2 * (self.size - 1) / self.size * x.nbytes)
        return torch.copysign(x, x)

    def all_gather_columns(self, x: Tensor) -> Tensor:
        self._record("all_gather_columns", (self.size - 1) * x.nbytes)
        return torch.cat([x, *[x - PEER_LOGITS_BELOW] * (self.size - 1)], dim=1)

    def all_gather_tokens(self, *tensors: Tensor) -> Sequence[Tensor]:
        self._record("all_gather_tokens", (self.size - 1) * sum(tensor.nbytes for tensor in tensors))
        return [self._gather_tokens(tensor) for tensor in tensors]

    def _gather_tokens(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return self._shifted_ids[:, x].flatten(0, 1)
        if x.shape[1] != self._hidden:
            return x.repeat(self.size, 1)
        tokens = x.shape[0]
        counts = [PEER_TOKENS] * (tokens // PEER_TOKENS) + [tokens % PEER_TOKENS]
        return torch.cat([x, *(peer[:count] for peer in self._peers for count in counts if count)])

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self._record("reduce_scatter", (self.size - 1) / self.size * x.nbytes)
        return x.reshape(self.size, -1, x.shape[1]).sum(0)

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def barrier(self) -> None:
        pass

    def _record(self, name: str, link_bytes: float) -> None:
        self.calls.append(CollectiveCall(name, link_bytes))


def random_weights(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> WeightSource:
    """Returns a source of random weights, in fp8 where the model's checkpoint has fp8."""
    return dummy_weights(dtype, device, formats=spec.weight_formats)


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """The bytes of one rank's weights."""

    total: int
    embedding: int  # a step reads only a few of its rows
    experts: int  # routed experts; a step reads only the experts that its tokens use

    @staticmethod
    def of(decoder: Decoder) -> "WeightBytes":
        mlps = [layer.mlp for layer in decoder._layers]
        assert decoder._embedding is not None, "a pipeline stage is not a whole rank"
        return WeightBytes(
            total=weight_bytes(decoder),
            embedding=decoder._embedding.weight.nbytes,
            experts=sum(mlp._gate_up.nbytes + mlp._down.nbytes for mlp in mlps if isinstance(mlp, Moe)),
        )


def planned_bytes(spec: ModelSpec, split: Split, dtype: torch.dtype, device: torch.device) -> int:
    """Returns the bytes of one rank's weights, without loading any."""
    source = random_weights(spec, dtype, device)
    return plan_weights(spec, source, FP8_KV, split, pack_weights=False).device_bytes


class SharedHostPages(PrefixCache):
    """Grants the same host pages to several requests, so that more contexts can be measured than host memory holds.

    It grants `capacity` pages in all. Page ids run from 0 to `host_pages` - 1 and then start again. A context gets
    consecutive pages. Requests that share a page overwrite each other's rows, so the rows must be random numbers.
    """

    def __init__(self, capacity: int, host_pages: int) -> None:
        super().__init__(capacity)
        self._host_pages = host_pages
        self._next = 0

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        if count > self._free:
            return None
        first, self._next = self._next, (self._next + count) % self._host_pages
        self._free -= count
        return [(first + index) % self._host_pages for index in range(count)]

    def release(self, pages: Iterable[int]) -> None:
        self._free += len(list(pages))
        assert self._free <= self.capacity, f"{self._free} of {self.capacity} pages are free"

    def audit(self) -> None:
        """Does nothing: pages have several owners."""


class RankServer:
    """The KV memory and the runner of one model. Engines that are used one after another share its graphs.

    If `config.speculate` is set, the engines draft with the model's MTP layer.
    """

    def __init__(
        self, model: RunnerModel, spec: ModelSpec, config: EngineConfig, budget: KvBudget, host: HostStore | None
    ) -> None:
        device = model.device
        on_gpu = device.type == "cuda"
        self._config, self._budget, self._spec, self._dtype = config, budget, spec, model.dtype
        self.memory = KvMemory(
            DevicePool(model.kv_shape, budget.geometry, budget.device_pages, device),
            host,
            config.max_num_seqs,
            budget.max_model_len,
        )
        if on_gpu:
            self.memory.warm_up()
        self.runner = Runner(
            model,
            self.memory,
            config.max_num_seqs,
            budget.max_model_len,
            spec.vocab,
            graphs=on_gpu,
            drafts=DraftSettings.of(config),
        )

    def max_requests(self, tokens: int, shared_pages: bool = False) -> int:
        """Returns how many contexts of `tokens` tokens fit on the device and, unless pages are shared, on the host."""
        budget = replace(self._budget, host_pages=self._granted_pages) if shared_pages else self._budget
        return min(budget.requests(tokens), self._config.max_num_seqs)

    def max_requests_with_prefix(self, tokens: int, shared_prefix: int) -> int:
        """Returns how many contexts of `tokens` tokens fit if the prefix cache holds their common prefix once."""
        return min(max_requests_with_prefix(self._budget, tokens, shared_prefix), self._config.max_num_seqs)

    def engine(
        self, shared_pages: bool = False, tiers: TiersMode | None = None, *, prefix_cache: bool = False
    ) -> Engine:
        """Returns an engine without requests. Only the newest one may be used. `tiers` replaces the configured mode."""
        config = replace(self._config, tiers=tiers or self._config.tiers, prefix_cache=prefix_cache)
        budget, device = self._budget, self.memory.pool.device
        card = build.model_card(config, self._spec, budget, device, self._dtype)
        executor = InProcessExecutor(self.runner)
        shared = patch.object(build, "PrefixCache", lambda pages: SharedHostPages(self._granted_pages, pages))
        with shared if shared_pages else nullcontext():
            return build.assemble(config, card, self.memory.pool.shape, budget, executor)

    @property
    def _granted_pages(self) -> int:
        """The number of pages that requests can hold if pages are shared: enough for all seats."""
        return self._config.max_num_seqs * self._budget.geometry.row_pages(self._budget.max_model_len)
