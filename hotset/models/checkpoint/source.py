"""The protocol through which decoders load weights by name, and what the sources that implement it share."""

import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from hotset.base.errors import CheckpointError
from hotset.kernels.fp8 import SCALE_BLOCK, Fp8Weight, Weight, common_block_rows
from hotset.models.spec import ModelSpec
from hotset.models.split import TensorSlice

LOGGER = logging.getLogger("hotset.models")

Progress = Callable[[int], None]  # is called with the number of bytes that were read so far

BLOCK_BYTES = 1 << 20  # copied before it is checked; fits into the cache of a core

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def kept_shape(shape: tuple[int, ...], tensor_slice: TensorSlice | None) -> tuple[tuple[int, ...], int]:
    """Returns the shape and the `block_rows` of the slice of an fp8 weight of shape `shape`.

    A slice that begins inside a block of outputs keeps the scales of all blocks that it touches, so it has a scale for
    fewer outputs each.
    """
    if tensor_slice is None:
        return shape, SCALE_BLOCK
    return tensor_slice.shape(shape), common_block_rows(tensor_slice.first) if tensor_slice.dim == 0 else SCALE_BLOCK


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
        damaged, not of shape `shape`, or contains NaN or infinity. A tensor that is stored in fp8 is expanded.
        """
        ...

    def is_fp8(self, name: str) -> bool:
        """Returns whether `load_weight` returns the tensor `name` in fp8. False if there is no such tensor."""
        ...

    def load_weight(
        self, name: str, shape: tuple[int, ...], *, out: Weight | None = None, tensor_slice: TensorSlice | None = None
    ) -> Weight:
        """Returns the matrix `name` in fp8 if `is_fp8(name)`, else as `load` does. An `out` that is no `Fp8Weight`
        receives the expanded values.

        A slice along the outputs may begin anywhere; see `kept_shape`. Raises what `load` raises, `CheckpointError` for
        scales that are NaN, infinite, zero or negative, and `ConfigError` for a slice that divides a block of inputs.
        """
        ...

    def stored_bytes(self, name: str) -> int:
        """Returns the size of the whole tensor `name`, with its scales, in the files: 0 if it is not read from a file.

        Reads no values. Raises `CheckpointError` if the tensor is missing.
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

    def is_fp8(self, name: str) -> bool:
        return self._weights.is_fp8(name)

    def load_weight(
        self, name: str, shape: tuple[int, ...], *, out: Weight | None = None, tensor_slice: TensorSlice | None = None
    ) -> Weight:
        if isinstance(out, Fp8Weight):
            self._weights.skip(name)
            return out
        if out is not None or not self.is_fp8(name):
            return self.load(name, shape, out=out, tensor_slice=tensor_slice)
        self._weights.skip(name)
        kept, block_rows = kept_shape(shape, tensor_slice)
        return Fp8Weight.empty(kept, torch.device("meta"), block_rows)

    def stored_bytes(self, name: str) -> int:
        return self._weights.stored_bytes(name)

    def skip(self, name: str) -> None:
        self._weights.skip(name)

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
    total = torch.stack([values.new_zeros(()), *block_sums]).sum()
    if not math.isfinite(total.item()) and not bool(values.isfinite().all()):
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

    Layers beyond the model's last layer are reported in one log line. Four kinds of tensor are ignored: rotary
    frequencies, which are computed; the LM head of tied embeddings; the indexer of a layer that reuses another layer's
    selection; and the copies of embedding and LM head that belong to an MTP layer.
    """
    extra_layers: set[int] = set()
    foreign: list[str] = []
    for name in unused:
        layer = _LAYER.match(name)
        if spec.mtp is not None and name.startswith(_mtp_copies(spec)):
            continue
        if layer is not None and int(layer[1]) >= spec.layers:
            extra_layers.add(int(layer[1]))
        elif not (
            name.endswith("rotary_emb.inv_freq") or _is_tied_head(name, spec) or _is_unused_by_attention(name, spec)
        ):
            foreign.append(name)
    if foreign:
        examples = ", ".join(sorted(foreign)[:3])
        raise CheckpointError(
            f"{file}: {len(foreign)} tensors do not belong to a {spec.architecture} model: {examples}"
        )
    if extra_layers:
        listed = ", ".join(str(layer) for layer in sorted(extra_layers))
        LOGGER.info("%s: skipped layer %s (multi-token prediction, beyond num_hidden_layers)", file, listed)


def _mtp_copies(spec: ModelSpec) -> tuple[str, ...]:
    return tuple(f"model.layers.{spec.layers}.{name}.weight" for name in ("embed_tokens", "shared_head.head"))


def _is_tied_head(name: str, spec: ModelSpec) -> bool:
    return spec.tied_embeddings and name == "lm_head.weight"


def _is_unused_by_attention(name: str, spec: ModelSpec) -> bool:
    layer = _LAYER.match(name)
    return layer is not None and spec.attention.is_unused(name, int(layer[1]))
