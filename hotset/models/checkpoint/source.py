"""The protocol through which decoders load weights by name, and the sources that do not read files."""

import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hotset.base.errors import CheckpointError
from hotset.models.spec import MlaSpec, ModelSpec

LOGGER = logging.getLogger("hotset.models")

Progress = Callable[[int, int], None]  # (bytes loaded, bytes in total)

DUMMY_STD = 0.02
BLOCK_BYTES = 1 << 20  # copied before it is checked; fits into the cache of a core

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The entries [first, last) of a tensor along dimension `dim`: the slice that one worker holds."""

    dim: int
    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the slice of a tensor of shape `whole`."""
        return (*whole[: self.dim], self.size, *whole[self.dim + 1 :])

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Returns a view of the slice of `values`."""
        return values.narrow(self.dim, self.first, self.size)


class WeightSource(Protocol):
    """Provides weights by the names of Hugging Face checkpoints."""

    def load(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        out: torch.Tensor | None = None,
        tensor_slice: TensorSlice | None = None,
    ) -> torch.Tensor:
        """Returns the tensor `name` in the source's dtype and on its device; the caller owns it.

        With `out` (which may be a view of a merged weight), the values are converted directly to the dtype of `out` and
        written to it, and `out` is returned. With `tensor_slice`, only that slice is returned; `shape` is still the
        shape of the whole tensor. Raises `CheckpointError`, with file and tensor name, if the tensor is missing,
        damaged, not of shape `shape`, or contains NaN or infinity.
        """
        ...

    def skip(self, name: str) -> None:
        """Records that the tensor belongs to the model and that another worker loads it."""
        ...

    def finish(self) -> None:
        """Ends loading. Raises `CheckpointError` if the files hold tensors that do not belong to the model."""
        ...


class SkippedWeights:
    """A source for the parts of a model that other workers hold. It returns tensors without memory, or `out` unchanged.

    Every requested tensor is marked as skipped, so only the code that loads weights lists their names.
    """

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights

    def load(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        out: torch.Tensor | None = None,
        tensor_slice: TensorSlice | None = None,
    ) -> torch.Tensor:
        self._weights.skip(name)
        if out is not None:
            return out
        return torch.empty(shape if tensor_slice is None else tensor_slice.shape(shape), device="meta")

    def skip(self, name: str) -> None:
        self._weights.skip(name)

    def finish(self) -> None:
        """Does nothing: no file is open."""


class DummySource:
    """Random weights for a configuration without a checkpoint.

    Weights of norms are 1. The values of any other tensor depend on its name and shape, the seed and the type of
    device, but not on the order of loading. All dtypes round the same float32 values.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> None:
        self._dtype = dtype
        self._device = torch.device(device)
        self._seed = seed

    def load(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        out: torch.Tensor | None = None,
        tensor_slice: TensorSlice | None = None,
    ) -> torch.Tensor:
        """Draws the whole tensor even for a slice, so that all workers have slices of the same tensor."""
        device = self._device if out is None else out.device
        if name.endswith("norm.weight"):
            return copy_to(out, sliced(torch.ones(shape, device=device), tensor_slice), self._dtype, device)
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        values = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
        return copy_to(out, sliced(values.mul_(DUMMY_STD), tensor_slice), self._dtype, device)

    def skip(self, name: str) -> None:
        """Does nothing: there is no file whose tensors must all be used."""

    def finish(self) -> None:
        """Does nothing: no file is open."""


def sliced(values: torch.Tensor, tensor_slice: TensorSlice | None) -> torch.Tensor:
    """Returns a view of the slice, or the whole tensor if `tensor_slice` is None."""
    return values if tensor_slice is None else tensor_slice.of(values)


def copy_to(out: torch.Tensor | None, values: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copies `values` to `out`, or to a new tensor of `dtype` on `device`, so that no view keeps a mapped file open."""
    target = torch.empty(values.shape, dtype=dtype, device=device) if out is None else out
    return target.copy_(values)


def copy_finite(
    tensor: str, out: torch.Tensor | None, values: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Copies like `copy_to`. Raises `CheckpointError` if the result contains NaN or infinity.

    On a CPU, each block is checked while it is in the cache, so the check reads no memory again. `tensor` is the file
    and the name of the tensor, for the error message.
    """
    target = torch.empty(values.shape, dtype=dtype, device=device) if out is None else out
    block_bytes = BLOCK_BYTES if target.device.type == "cpu" else target.nbytes
    rows = max(1, block_bytes * target.shape[0] // max(1, target.nbytes))
    blocks = zip(target.split(rows), values.split(rows), strict=True)
    check_finite(tensor, target, [block.copy_(stored).sum() for block, stored in blocks])
    return target


def check_finite(tensor: str, values: torch.Tensor, block_sums: Sequence[torch.Tensor]) -> None:
    """Raises `CheckpointError` if `values` contain NaN or infinity. `block_sums` are sums that add up to theirs.

    A sum that contains NaN or infinity is not finite. A sum of finite values can overflow too, so the values decide.
    """
    if not math.isfinite(torch.stack(list(block_sums)).sum().item()) and not bool(values.isfinite().all()):
        bad = int((~values.isfinite()).sum())
        kind = str(values.dtype).removeprefix("torch.")
        raise CheckpointError(f"{tensor}: {bad} of {values.numel()} values are NaN or infinite as {kind}")


def check_shape(file: str, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise CheckpointError(
            f"{file}: tensor {name} has shape {list(found)}, but the configuration requires {list(expected)}"
        )


def check_unused_tensors(file: str, unused: Iterable[str], spec: ModelSpec) -> None:
    """Raises `CheckpointError` if `unused` contains tensors that do not belong to the model.

    Layers beyond the model's last layer are reported in one log line. Three kinds of tensor are ignored: rotary
    frequencies, which are computed; the LM head of tied embeddings; and the indexer of a layer that reuses another
    layer's selection.
    """
    extra_layers: set[int] = set()
    foreign: list[str] = []
    for name in unused:
        layer = _LAYER.match(name)
        if layer is not None and int(layer[1]) >= spec.layers:
            extra_layers.add(int(layer[1]))
        elif not (name.endswith("rotary_emb.inv_freq") or _is_tied_head(name, spec) or _is_unused_indexer(name, spec)):
            foreign.append(name)
    if foreign:
        examples = ", ".join(sorted(foreign)[:3])
        raise CheckpointError(
            f"{file}: {len(foreign)} tensors do not belong to a {spec.architecture} model: {examples}"
        )
    if extra_layers:
        listed = ", ".join(str(layer) for layer in sorted(extra_layers))
        LOGGER.warning("%s: skipped layer %s (multi-token prediction, beyond num_hidden_layers)", file, listed)


def _is_tied_head(name: str, spec: ModelSpec) -> bool:
    return spec.tied_embeddings and name == "lm_head.weight"


def _is_unused_indexer(name: str, spec: ModelSpec) -> bool:
    layer = _LAYER.match(name)
    if layer is None or ".self_attn.indexer." not in name or not isinstance(spec.attention, MlaSpec):
        return False
    return int(layer[1]) not in spec.attention.index.full_layers
