"""The protocol between decoders, which name tensors, and checkpoints, which store them; and sources without files."""

import hashlib
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from hotset.base.errors import CheckpointError
from hotset.models.spec import MlaSpec, ModelSpec

LOGGER = logging.getLogger("hotset.models")

Progress = Callable[[int, int], None]  # (bytes loaded, bytes in total)

DUMMY_STD = 0.02

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The entries [first, last) along dimension `dim`: what one of several workers holds of a tensor."""

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

        With `out` (which may be a view of a merged weight), the values are converted straight to its dtype, written
        there, and `out` is returned. With `tensor_slice`, only that slice is returned and kept; `shape` is still the
        shape of the whole tensor. Raises `CheckpointError`, naming file and tensor, if the tensor is missing, damaged
        or not of `shape`.
        """
        ...

    def skip(self, name: str) -> None:
        """Records that the tensor belongs to the model and that another worker loads it."""
        ...

    def finish(self) -> None:
        """Closes the files. Raises `CheckpointError` if they hold tensors that do not belong to the model."""
        ...


class SkippedWeights:
    """A source for the parts of a model that other workers hold: what is built from it has shapes but no memory.

    It marks every requested tensor as skipped. So the code that loads weights is the only place that lists their names.
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

    Each tensor is drawn from its name and one seed, so the order of loading and the dtype do not change it.
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
        """Draws the whole tensor even if only a slice is returned, so that all workers hold slices of the same one."""
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
    """Returns a view of the slice; None stands for the whole tensor."""
    return values if tensor_slice is None else tensor_slice.of(values)


def copy_to(out: torch.Tensor | None, values: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copies `values` to `out`, or to a new tensor of `dtype` on `device`, so that no view keeps a mapped file open."""
    target = torch.empty(values.shape, dtype=dtype, device=device) if out is None else out
    return target.copy_(values)


def check_shape(file: str, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise CheckpointError(
            f"{file}: tensor {name} has shape {list(found)}, the configuration requires {list(expected)}"
        )


def check_unused_tensors(file: str, unused: Iterable[str], spec: ModelSpec) -> None:
    """Raises `CheckpointError` if the checkpoint holds tensors that no worker loads and that nothing explains.

    Whole layers beyond the last one are reported in one log line. Rotary frequencies (they are computed), the head of
    tied embeddings and the indexers of layers that reuse another layer's indexer are ignored.
    """
    extra_layers: set[int] = set()
    unexplained: list[str] = []
    for name in unused:
        layer = _LAYER.match(name)
        if layer is not None and int(layer[1]) >= spec.layers:
            extra_layers.add(int(layer[1]))
        elif not (name.endswith("rotary_emb.inv_freq") or _is_tied_head(name, spec) or _is_shared_indexer(name, spec)):
            unexplained.append(name)
    if unexplained:
        examples = ", ".join(sorted(unexplained)[:3])
        raise CheckpointError(
            f"{file}: {len(unexplained)} tensors belong to no part of a {spec.architecture} model: {examples}"
        )
    if extra_layers:
        listed = ", ".join(str(layer) for layer in sorted(extra_layers))
        LOGGER.warning("%s: skipped layer %s (multi-token prediction, beyond num_hidden_layers)", file, listed)


def _is_tied_head(name: str, spec: ModelSpec) -> bool:
    return spec.tied_embeddings and name == "lm_head.weight"


def _is_shared_indexer(name: str, spec: ModelSpec) -> bool:
    layer = _LAYER.match(name)
    if layer is None or ".self_attn.indexer." not in name or not isinstance(spec.attention, MlaSpec):
        return False
    return int(layer[1]) not in spec.attention.index.full_layers
