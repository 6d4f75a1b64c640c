"""The decoder: embedding, layers of attention and MLP, logits. A `Split` selects the part that one worker holds."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.kernels.rope import Rotation
from hotset.memory.device_pool import KvShape
from hotset.memory.view import View
from hotset.models.checkpoint.source import SkippedWeights, WeightSource
from hotset.models.collectives import SINGLE_RANK, Collectives
from hotset.models.dsa import DsaAttention, dsa_kv_shape
from hotset.models.gqa import GqaAttention, gqa_kv_shape
from hotset.models.layers import Embedding, LmHead, Mlp, Moe, RmsNorm, ShardLoader, feed_forward, pack_linears
from hotset.models.rope import Rope
from hotset.models.spec import AS_COMPUTED, GqaSpec, KvStorage, ModelSpec
from hotset.models.split import WHOLE_MODEL, Split, check_data_parallel, check_tensor_parallel


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: RmsNorm
    attention: GqaAttention | DsaAttention
    post_attention_norm: RmsNorm
    mlp: Mlp | Moe

    def __call__(
        self,
        x: Tensor,
        delta: Tensor | None,
        rotation: Rotation,
        view: View,
        selected: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Computes one layer. The residual stream is x + delta; the next norm computes that sum.

        Returns the new x and delta [tokens, hidden], and the selected positions, which the next layers of the index
        group reuse (None in a GQA model).
        """
        x, normed = (x, self.input_norm(x)) if delta is None else self.input_norm.add_then_norm(x, delta)
        attended, selected = self.attention(normed, rotation, view, selected)
        x, normed = self.post_attention_norm.add_then_norm(x, attended)
        return x, self.mlp(normed, view.padded_seats), selected


class Decoder:
    """Turns token ids into logits, and reads and writes KV through a view.

    `forward` runs all layers of a whole model. In a pipeline, the first stage calls `embed`, and every stage calls
    `run_layers`. `logits` then applies the LM head. Views number the layers and index groups of a stage from 0.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightSource,
        storage: KvStorage = AS_COMPUTED,
        split: Split = WHOLE_MODEL,
        collectives: Collectives = SINGLE_RANK,
        *,
        pack_weights: bool = True,
    ) -> None:
        """Loads this worker's weights, in the dtype and on the device of the source.

        `collectives` connect the ranks of this stage. With `pack_weights`, linear layers on a CPU in float32 get a
        second copy of their weights, which is faster. Raises `ConfigError` if the ranks cannot divide the model evenly.
        """
        if (collectives.rank, collectives.size) != (split.rank, split.size):
            raise InternalError(
                f"the collectives are those of rank {collectives.rank} of {collectives.size}, the split is {split}"
            )
        check_tensor_parallel(spec, split.tp_size)
        check_data_parallel(spec, split.dp_size)
        self.spec = spec
        self.hidden = spec.hidden
        self.on_layer: Callable[[], None] = lambda: None  # called after each layer and LM head; a long step advances
        # For debugging: called with each layer's number in the whole model and the residual stream after it.
        self.on_residual: Callable[[int, Tensor], None] | None = None
        self._storage, self._split, self._collectives = storage, split, collectives
        loader = ShardLoader(weights, split, collectives)
        skipping = ShardLoader(SkippedWeights(weights), split, collectives)
        stage = split.layer_range(spec.layers)
        self.first, self.last = stage.start == 0, stage.stop == spec.layers
        self._layers: list[_Layer] = []
        for layer in range(spec.layers):
            built = _build_layer(loader if layer in stage else skipping, layer, layer - stage.start, spec)
            if layer in stage:
                self._layers.append(built)
        embedding = Embedding(loader if self.first else skipping, spec)
        tied = embedding.weight if self.first and spec.tied_embeddings else None
        head = LmHead(loader if self.last else skipping, spec, tied)
        self._embedding, self._head = embedding if self.first else None, head if self.last else None
        like = self._layers[0].input_norm.weight
        self.dtype, self.device = like.dtype, like.device
        self._rope = Rope(spec.rope, like.dtype, like.device)
        if pack_weights:
            pack_linears(self)

    @property
    def kv_shape(self) -> KvShape:
        """The shape of this worker's KV: its layers, numbered from 0, and its KV heads."""
        attention, stage = self.spec.attention, self._split.layer_range(self.spec.layers)
        if isinstance(attention, GqaSpec):
            return gqa_kv_shape(len(stage), attention, self._split, self.dtype)
        return dsa_kv_shape(stage, attention, self.dtype, self._storage)

    def forward(self, token_ids: Tensor, view: View) -> Tensor:
        """Returns the residual stream [tokens, hidden] after the last layer, for `logits`."""
        return self.run_layers(self.embed(token_ids), view)

    def embed(self, token_ids: Tensor) -> Tensor:  # [tokens] int64 -> [tokens, hidden]
        assert self._embedding is not None, "only the first stage holds the embedding"
        return self._embedding(token_ids)

    def run_layers(self, x: Tensor, view: View) -> Tensor:
        """Returns the residual stream [tokens, hidden] after this worker's layers."""
        rotation = self._rope.at(view.segments.positions)
        delta: Tensor | None = None
        selected: Tensor | None = None
        for number, layer in enumerate(self._layers, self._split.first_layer):
            x, delta, selected = layer(x, delta, rotation, view, selected)
            self.on_layer()
            if self.on_residual is not None:
                self.on_residual(number, x + delta)
        return x if delta is None else x + delta

    def logits(self, x: Tensor, indices: Tensor | None) -> Tensor:
        """Returns the logits [n, vocab] of the tokens at the n `indices` (None: all tokens), in the accumulation dtype.
        Every rank gets the whole vocabulary."""
        assert self._head is not None, "only the last stage holds the LM head"
        logits = self._head(x if indices is None else x[indices])
        self.on_layer()
        return logits

    def idle_moe_step(self) -> None:
        """Data parallel: runs this rank's experts in a step in which only other ranks have tokens."""
        if self._split.dp_size <= 1:
            raise InternalError("tensor parallel ranks are never idle: they compute every token")
        no_tokens = torch.empty(0, self.hidden, dtype=self.dtype, device=self.device)
        for layer in self._layers:
            if isinstance(layer.mlp, Moe):
                layer.mlp.routed(no_tokens, None)
            self.on_layer()


def _build_layer(loader: ShardLoader, layer: int, local_layer: int, spec: ModelSpec) -> _Layer:
    """Builds layer `layer` of the whole model, which this worker's views number `local_layer`."""

    def norm(name: str) -> RmsNorm:
        return RmsNorm(loader.weights.load(f"model.layers.{layer}.{name}.weight", (spec.hidden,)), spec.norm_eps)

    input_norm = norm("input_layernorm")
    like = input_norm.weight
    attention: GqaAttention | DsaAttention
    if isinstance(spec.attention, GqaSpec):
        attention = GqaAttention(loader, layer, local_layer, spec, spec.attention, like)
    else:
        attention = DsaAttention(loader, layer, local_layer, spec, spec.attention, like)
    return _Layer(input_norm, attention, norm("post_attention_layernorm"), feed_forward(loader, layer, spec, like))
