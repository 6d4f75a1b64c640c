"""The table of the kinds of attention: the layer that computes each kind, and the shape of its KV."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hotset.memory.device_pool import KvShape
from hotset.models.attention.dsa import DsaAttention, dsa_kv_shape
from hotset.models.attention.dsa_spec import MlaSpec
from hotset.models.attention.gqa import GqaAttention, gqa_kv_shape
from hotset.models.attention.gqa_spec import GqaSpec
from hotset.models.attention.spec import AttentionSpec
from hotset.models.layer_step import Attention
from hotset.models.layers import ShardLoader
from hotset.models.spec import KvStorage, ModelSpec
from hotset.models.split import Split


@dataclass(frozen=True, slots=True)
class AttentionKind:
    # (loader, layer of the whole model, its number in this worker's views, model) -> the attention of that layer
    layer: Callable[[ShardLoader, int, int, ModelSpec], Attention]
    # (model, layers, split, dtype, storage) -> the shape of what this rank stores for these layers
    kv_shape: Callable[[ModelSpec, range, Split, torch.dtype, KvStorage], KvShape]


KINDS: Mapping[type[AttentionSpec], AttentionKind] = {
    GqaSpec: AttentionKind(GqaAttention, gqa_kv_shape),
    MlaSpec: AttentionKind(DsaAttention, dsa_kv_shape),
}
