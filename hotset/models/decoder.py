"""The decoder: embedding, layers of attention and MLP, logits. A `Split` selects the part that one worker holds."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.memory.device_pool import KvShape
from hotset.memory.view import View
from hotset.models.allowed_splits import check_data_parallel, check_tensor_parallel
from hotset.models.attention.kinds import KINDS
from hotset.models.checkpoint.weights import WeightSource
from hotset.models.collectives import SINGLE_RANK, Collectives
from hotset.models.decoder_layer import build_layer
from hotset.models.layer_step import Layer, Residual, StepInputs
from hotset.models.layers import Embedding, LmHead, ShardLoader, pack_linears, tensors_and_linears
from hotset.models.mtp import MtpLayer, MtpOutput
from hotset.models.rope import Rope
from hotset.models.spec import AS_COMPUTED, KvStorage, ModelSpec
from hotset.models.split import WHOLE_MODEL, Split


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
        self.on_layer: Callable[[], None] = lambda: None  # called after each layer and the LM head: a sign of life
        # For debugging: called with each layer's number in the whole model and the residual stream after it.
        self.on_residual: Callable[[int, Tensor], None] | None = None
        self._storage, self._split, self._collectives = storage, split, collectives
        loader = ShardLoader(weights, split, collectives)
        stage = split.layer_range(spec.layers)
        self.first, self.last = stage.start == 0, stage.stop == spec.layers
        self._layers: list[Layer] = [build_layer(loader, layer, layer - stage.start, spec) for layer in stage]
        self._kinds = _first_of_each_kind(self._layers)
        drafts = self.last and spec.mtp is not None
        self._embedding = Embedding(loader, spec) if self.first or drafts else None
        tied = self._embedding.weight if self._embedding is not None and spec.tied_embeddings else None
        self._head = LmHead(loader, spec, tied) if self.last else None
        self._mtp: MtpLayer | None = None
        if self.last and spec.mtp is not None:
            # Replicas draft for different numbers of requests, so each has all experts of this layer.
            mtp_loader = loader if split.dp_size == 1 else ShardLoader(weights, WHOLE_MODEL, SINGLE_RANK)
            self._mtp = MtpLayer(mtp_loader, len(stage), spec, spec.mtp)
        self.dtype = weights.dtype
        self.device = torch.empty(0, device=weights.device).device  # with the number of the GPU
        self._rope = Rope(spec.rope, self.dtype, self.device)
        if pack_weights:
            pack_linears(self)

    def drop_mtp(self) -> None:
        """Releases the MTP layer, and the embedding if only that layer used it. Does nothing without an MTP layer."""
        self.spec, self._mtp = replace(self.spec, mtp=None), None
        self._embedding = self._embedding if self.first else None

    @property
    def kv_shape(self) -> KvShape:
        """The shape of this worker's KV: its layers, numbered from 0, and its KV heads."""
        return worker_kv_shape(self.spec, self.dtype, self._storage, self._split)

    def forward(self, token_ids: Tensor, view: View) -> Tensor:
        """Returns the residual stream [tokens, hidden] after the last layer, for `logits`."""
        return self.run_layers(self.embed(token_ids), view)

    def forward_once(self, token_ids: Tensor, view: View) -> Tensor:
        """Does what `forward` does, but computes only one layer of each kind. The result has no meaning."""
        return self.run_layers(self.embed(token_ids), view, once=True)

    def embed(self, token_ids: Tensor) -> Tensor:  # [tokens] int64 -> [tokens, hidden]
        assert self._embedding is not None, "this stage does not hold the embedding"
        return self._embedding(token_ids)

    def run_layers(self, x: Tensor, view: View, *, once: bool = False) -> Tensor:
        """Returns the residual stream [tokens, hidden] after this worker's layers: one of each kind if `once`."""
        step = StepInputs(self._rope.at(view.segments.positions), view)
        residual, selected = Residual(x), None
        for index in self._kinds if once else range(len(self._layers)):
            number, layer = self._split.first_layer + index, self._layers[index]
            residual, selected = layer(residual, step, selected)
            self.on_layer()
            if self.on_residual is not None:
                self.on_residual(number, residual.total)
        return residual.total

    def logits(self, x: Tensor, indices: Tensor | None) -> Tensor:
        """Returns the logits [n, vocab] of the tokens at the n `indices` (None: all tokens), in the accumulation dtype.
        Every rank gets the whole vocabulary."""
        assert self._head is not None, "only the last stage holds the LM head"
        logits = self._head(x if indices is None else x[indices])
        self.on_layer()
        return logits

    def mtp_input(self, x: Tensor) -> Tensor:
        """Norms the residual stream `x` after the last layer. The first iteration of the MTP layer gets the result."""
        assert self._head is not None, "only the last stage holds the last norm"
        return self._head.norm(x)

    def run_mtp(
        self, token_ids: Tensor, hidden: Tensor, view: View, selected: Tensor | None = None
    ) -> MtpOutput:  # token_ids [tokens] int64, hidden [tokens, hidden]
        """Computes one iteration of the MTP layer. An entry with position p has the hidden state of position p and the
        token id of position p + 1. `selected` are the positions that the first iteration selected for these requests;
        None in the first iteration."""
        assert self._mtp is not None, "the model has no MTP layer"
        return self._mtp(self.embed(token_ids), hidden, self._rope.at(view.segments.positions), view, selected)

    def mtp_logits(self, normed: Tensor) -> Tensor:
        """Returns the logits [n, vocab] of the tokens at position p + 2, from rows of `MtpOutput.normed`."""
        assert self._head is not None, "only the last stage holds the LM head"
        return self._head.logits(normed)

    def idle_moe_step(self) -> None:
        """Data parallel: runs this rank's experts in a step in which only other ranks have tokens."""
        if self._split.dp_size <= 1:
            raise InternalError("tensor parallel ranks are never idle: they compute every token")
        no_tokens = torch.empty(0, self.hidden, dtype=self.dtype, device=self.device)
        for layer in self._layers:
            layer.idle(no_tokens)
            self.on_layer()


def _first_of_each_kind(layers: Sequence[Layer]) -> list[int]:
    """Returns the index of the first layer of each kind. Layers are of one kind if they have the same parts, with
    weights of the same shapes and types, so that a step runs the same kernels in all of them."""
    first: dict[object, int] = {}
    for index, layer in enumerate(layers):
        parts = (
            (part.shape, part.dtype) if isinstance(part, Tensor) else type(part) for part in tensors_and_linears(layer)
        )
        first.setdefault(tuple(parts), index)
    return list(first.values())


def worker_kv_shape(spec: ModelSpec, dtype: torch.dtype, storage: KvStorage, split: Split = WHOLE_MODEL) -> KvShape:
    """Returns the shape of one worker's KV. The MTP layer, if any, is the last layer of the last stage."""
    stage = split.layer_range(spec.layers)
    if spec.mtp is not None and stage.stop == spec.layers:
        stage, spec = range(stage.start, spec.layers + 1), spec.with_mtp_layer
    return KINDS[type(spec.attention)].kv_shape(spec, stage, split, dtype, storage)
