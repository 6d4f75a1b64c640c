"""Full grouped-query attention (GQA): Llama, Qwen3."""

import torch
from torch import Tensor

from hotset.kernels.gqa_append import HeadNorms, gqa_append
from hotset.kernels.paged_attention import paged_attention
from hotset.kernels.rows import gqa_row
from hotset.memory.device_pool import KvShape
from hotset.models.attention.gqa_spec import GqaSpec
from hotset.models.layer_step import StepInputs
from hotset.models.layers import ShardLoader
from hotset.models.spec import KvStorage, ModelSpec
from hotset.models.split import Split


class GqaAttention:
    """One layer's attention. A row holds K of every local KV head after rope, then V of every local KV head."""

    def __init__(self, loader: ShardLoader, layer: int, local_layer: int, model: ModelSpec) -> None:
        """Loads layer `layer` of the whole model, which this worker's views number `local_layer`."""
        spec = model.attention
        assert isinstance(spec, GqaSpec)
        self._layer, self._head_dim = local_layer, spec.head_dim
        self._heads, self._kv_heads = len(loader.split.tp_shard(spec.heads)), len(loader.split.kv_heads(spec.kv_heads))
        tensors = spec.tensors(model.hidden, layer, loader.split)
        self._qkv = loader.merged_linear([tensors.q, tensors.k, tensors.v])
        self._out = loader.row_parallel(tensors.out)
        self._head_norms: HeadNorms | None = None
        if tensors.q_norm is not None and tensors.k_norm is not None:
            self._head_norms = HeadNorms(loader.load(tensors.q_norm), loader.load(tensors.k_norm), model.norm_eps)

    def __call__(self, x: Tensor, step: StepInputs, previous: Tensor | None) -> tuple[Tensor, None]:
        view = step.view
        qkv = self._qkv(x).view(x.shape[0], self._heads + 2 * self._kv_heads, self._head_dim)
        new = view.new_rows(self._layer)
        q = gqa_append(qkv, self._kv_heads, self._head_norms, step.rotation, new.layout, new.rows, new.row_ids)
        scale = self._head_dim**-0.5
        attended = paged_attention(q, view.context(self._layer), view.segments, self._kv_heads, scale)
        return self._out(attended.flatten(1)), None


def gqa_kv_shape(model: ModelSpec, layers: range, split: Split, dtype: torch.dtype, storage: KvStorage) -> KvShape:
    """Returns the KV shape of these layers with this rank's KV heads."""
    spec = model.attention
    assert isinstance(spec, GqaSpec)
    return KvShape(len(layers), gqa_row(len(split.kv_heads(spec.kv_heads)), spec.head_dim, dtype))
