"""A model: embedding, layers of attention and feed-forward, logits. The spec names the kinds, the split the part."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.kernels.rope import Rotation
from hotset.memory.device_pool import KvShape
from hotset.memory.view import View
from hotset.models.checkpoint.source import Elsewhere, WeightSource
from hotset.models.collectives import SINGLE_RANK, Collectives
from hotset.models.dsa import DsaAttention, dsa_kv_shape
from hotset.models.gqa import GqaAttention, gqa_kv_shape
from hotset.models.layers import Embedding, Head, Loader, Mlp, Moe, RmsNorm, feed_forward
from hotset.models.rope import Rope
from hotset.models.spec import AS_COMPUTED, GqaSpec, ModelSpec, Storage
from hotset.models.split import WHOLE_MODEL, Split, check_data_parallel, check_tensor_parallel


@dataclass(frozen=True, slots=True)
class _Layer:
    before: RmsNorm
    attention: GqaAttention | DsaAttention
    between: RmsNorm
    mlp: Mlp | Moe

    def __call__(
        self,
        x: Tensor,
        delta: Tensor | None,
        rotation: Rotation,
        view: View,
        seats: Tensor | None,
        selected: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The residual stream is x + delta: each norm makes the sum that the part before it left open.

        Returns both anew [rows, hidden], and the positions that a layer sharing this one's selection reuses.
        """
        x, normed = (x, self.before(x)) if delta is None else self.before.after_adding(x, delta)
        attended, selected = self.attention(normed, rotation, view, selected)
        x, normed = self.between.after_adding(x, attended)
        return x, self.mlp(normed, seats), selected


class Decoder:
    """`forward` turns token ids into logits, reading and writing KV through the view.

    A stage of a pipeline does part of that: the first begins with `embed`, every one goes `through` its layers, the
    last ends with `logits`. Views number the layers and index groups of the stage from 0.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightSource,
        storage: Storage = AS_COMPUTED,
        split: Split = WHOLE_MODEL,
        collectives: Collectives = SINGLE_RANK,
    ) -> None:
        """Takes every weight of its part of the model, in the source's dtype and on its device.

        `collectives`: those of this stage. Raises `ConfigError` if so many cannot share the model.
        """
        mine = (collectives.rank, collectives.size)
        assert mine == (split.rank, split.size), f"rank {collectives.rank} of {collectives.size} for {split}"
        check_tensor_parallel(spec, split.tp_size)
        check_data_parallel(spec, split.dp_size)
        self.spec = spec
        self.hidden = spec.hidden
        self._storage, self._split, self._collectives = storage, split, collectives
        here = Loader(weights, split, collectives)
        elsewhere = Loader(Elsewhere(weights), split, collectives)
        stage = split.stage(spec.layers)
        self.first, self.last = stage.start == 0, stage.stop == spec.layers
        self._layers: list[_Layer] = []
        for layer in range(spec.layers):
            made = _make_layer(here if layer in stage else elsewhere, layer, layer - stage.start, spec)
            if layer in stage:
                self._layers.append(made)
        embedding = Embedding(here if self.first else elsewhere, spec)
        tied = embedding.weight if self.first and spec.tied_embeddings else None
        head = Head(here if self.last else elsewhere, spec, tied)
        self._embedding, self._head = embedding if self.first else None, head if self.last else None
        like = self._layers[0].before.weight
        self.dtype, self.device = like.dtype, like.device
        self._rope = Rope(spec.rope, like.dtype, like.device)

    @property
    def kv_shape(self) -> KvShape:
        """Of this worker's part: its layers, numbered from 0, and its KV heads."""
        attention, stage = self.spec.attention, self._split.stage(self.spec.layers)
        if isinstance(attention, GqaSpec):
            return gqa_kv_shape(len(stage), attention, self._split, self.dtype)
        return dsa_kv_shape(stage, attention, self.dtype, self._storage)

    def forward(self, token_ids: Tensor, view: View, wanted: Tensor | None) -> Tensor:
        """Logits [wanted rows, vocab] of the query rows numbered in `wanted` (None: all)."""
        return self.logits(self.through(self.embed(token_ids), view), wanted)

    def embed(self, token_ids: Tensor) -> Tensor:  # [rows] int64 -> [rows, hidden]
        assert self._embedding is not None, "the embedding is at the first stage"
        return self._embedding(token_ids)

    def through(self, x: Tensor, view: View) -> Tensor:
        """The residual stream [rows, hidden] after this worker's layers."""
        rotation = self._rope.at(view.segments.positions)
        seats = self._seats(x.shape[0], view.padded_seats)
        delta: Tensor | None = None
        selected: Tensor | None = None
        for layer in self._layers:
            x, delta, selected = layer(x, delta, rotation, view, seats, selected)
        return x if delta is None else x + delta

    def logits(self, x: Tensor, wanted: Tensor | None) -> Tensor:
        """[wanted rows, vocab], in the accumulation dtype: the whole vocabulary, on every rank that divides it."""
        assert self._head is not None, "the head is at the last stage"
        return self._head(x if wanted is None else x[wanted])

    def idle_moe_step(self) -> None:
        """Data parallel: takes part in a step in which this rank has no rows of its own, for the others' sake."""
        assert self._split.dp_size > 1, "tensor parallel ranks compute every token"
        seats = self._seats(0, None)
        nothing = torch.empty(0, self.hidden, dtype=self.dtype, device=self.device)
        for layer in self._layers:
            if isinstance(layer.mlp, Moe):
                layer.mlp.routed(nothing, seats)

    def _seats(self, rows: int, padded: Tensor | None) -> Tensor | None:
        """Seats of all rows that this worker's experts see: once in a step, all ranks' where they divide requests.

        A rank cannot tell whether others have padded theirs, so every one sends its own.
        """
        if self._split.dp_size == 1 or not any(isinstance(layer.mlp, Moe) for layer in self._layers):
            return padded
        own = torch.zeros(rows, dtype=torch.int64, device=self.device) if padded is None else padded
        return self._collectives.all_gather_tokens(own[:, None])[:, 0]


def _make_layer(loader: Loader, layer: int, number: int, spec: ModelSpec) -> _Layer:
    """`layer`: in the whole model; `number`: among this worker's layers."""

    def norm(name: str) -> RmsNorm:
        return RmsNorm(loader.weights.take(f"model.layers.{layer}.{name}.weight", (spec.hidden,)), spec.norm_eps)

    before = norm("input_layernorm")
    like = before.weight
    attention: GqaAttention | DsaAttention
    if isinstance(spec.attention, GqaSpec):
        attention = GqaAttention(loader, layer, number, spec, spec.attention, like)
    else:
        attention = DsaAttention(loader, layer, number, spec, spec.attention)
    return _Layer(before, attention, norm("post_attention_layernorm"), feed_forward(loader, layer, spec, like))
