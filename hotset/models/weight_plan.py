"""Plans what one worker loads before it reads anything: its decoder is built from tensors without memory."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.kernels.linear import packed
from hotset.memory.device_pool import KvShape
from hotset.models.checkpoint.weights import WeightSource
from hotset.models.collectives import planning_collectives
from hotset.models.decoder import Decoder
from hotset.models.layers import tensors_and_linears
from hotset.models.spec import KvStorage, ModelSpec
from hotset.models.split import Split


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The memory that one worker's weights take, and the shape of its KV."""

    device_bytes: int  # on the worker's device
    read_bytes: int  # of the files
    kv_shape: KvShape
    packed_bytes: int = 0  # bytes of `device_bytes` that are second, packed copies


def plan_weights(
    spec: ModelSpec,
    weights: WeightSource,
    storage: KvStorage,
    split: Split,
    *,
    pack_weights: bool = True,
) -> WeightPlan:
    """Plans the loading of one worker's weights from `weights`. Reads only the names, shapes and formats of
    the stored tensors. Raises `CheckpointError` if a tensor is missing."""
    source = weights.planned()
    decoder = Decoder(spec, source, storage, split, planning_collectives(split.rank, split.size))
    packed_bytes = _packed_bytes(decoder, weights.device) if pack_weights else 0
    return WeightPlan(weight_bytes(decoder) + packed_bytes, source.read_bytes, decoder.kv_shape, packed_bytes)


def weight_bytes(decoder: Decoder) -> int:
    """Returns the bytes of the decoder's weights without packed copies. The decoder may be on the meta device."""
    storages: dict[int, int] = {}  # several tensors can be views of one storage
    for part in tensors_and_linears(decoder):
        if isinstance(part, Tensor):
            storage = part.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _packed_bytes(decoder: Decoder, device: torch.device) -> int:
    """Returns the bytes of the packed copies that the decoder's linear layers will have on `device`."""
    if not packed.supports(torch.empty(1, 1, dtype=decoder.dtype, device=device)):
        return 0
    weights = (part.weight for part in tensors_and_linears(decoder) if not isinstance(part, Tensor))
    return sum(weight.nbytes for weight in weights if isinstance(weight, Tensor))
