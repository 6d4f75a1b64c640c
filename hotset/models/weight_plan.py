"""Plans what one worker loads, before anything is read: its decoder is built from tensors without memory."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from hotset.kernels.linear import Fp32Linear, Linear, packed
from hotset.memory.device_pool import KvShape
from hotset.models.checkpoint.planned import PlannedSource
from hotset.models.checkpoint.source import WeightSource
from hotset.models.collectives import planning_collectives
from hotset.models.decoder import Decoder
from hotset.models.spec import KvStorage, ModelSpec
from hotset.models.split import Split


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """What one worker's weights take, and the shape of its KV."""

    device_bytes: int  # on the worker's device
    read_bytes: int  # of the files
    kv_shape: KvShape


def plan_weights(
    spec: ModelSpec,
    weights: WeightSource,
    storage: KvStorage,
    split: Split,
    dtype: torch.dtype,
    device: torch.device,
) -> WeightPlan:
    """Plans the loading of one worker's weights from `weights` to `device`. Reads only the names, shapes and formats of
    the stored tensors. Raises `CheckpointError` if a tensor is missing."""
    source = PlannedSource(weights, dtype)
    decoder = Decoder(spec, source, storage, split, planning_collectives(split.rank, split.size))
    return WeightPlan(weight_bytes(decoder, device), source.read_bytes, decoder.kv_shape)


def weight_bytes(decoder: Decoder, device: torch.device) -> int:
    """Returns the bytes that the decoder's weights take on `device`. The decoder itself may be on the meta device."""
    packs = packed.supports(torch.empty(1, 1, dtype=decoder.dtype, device=device))
    packed_bytes = 0
    storages: dict[int, int] = {}  # several tensors can be views of one storage
    for part in _tensors_and_linears(decoder):
        if isinstance(part, Tensor):
            storage = part.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        elif packs and isinstance(part.weight, Tensor):
            packed_bytes += part.weight.nbytes
    return sum(storages.values()) + packed_bytes


def _tensors_and_linears(part: object) -> Iterator[Tensor | Linear]:
    """Yields every tensor and every linear layer in `part` and its attributes. Leaves out packed copies of weights."""
    children: list[object] = []
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, Linear):
        yield part
        children = [part.weight, part.bias]
    elif isinstance(part, Fp32Linear):
        children = [part.weight]
    elif isinstance(part, list | tuple):
        children = list(part)
    elif is_dataclass(part):
        children = [getattr(part, field.name) for field in fields(part)]
    elif type(part).__module__.startswith("hotset.models."):
        children = list(vars(part).values())
    for child in children:
        yield from _tensors_and_linears(child)
