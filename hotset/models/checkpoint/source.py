"""The protocol between decoders, which know names and shapes, and checkpoints, which know files and bytes."""

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

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

WEIGHT_STD = 0.02  # of random weights

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Entries [first, last) along dimension `dim`: what one of several workers holds of a tensor."""

    dim: int
    first: int
    last: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of the part, where the tensor is of shape `whole`."""
        return (*whole[: self.dim], self.last - self.first, *whole[self.dim + 1 :])

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """A view."""
        return values.narrow(self.dim, self.first, self.last - self.first)


class WeightSource(Protocol):
    """Weights by the names of Hugging Face checkpoints."""

    def take(
        self, name: str, shape: tuple[int, ...], *, out: torch.Tensor | None = None, part: TensorSlice | None = None
    ) -> torch.Tensor:
        """The tensor `name`, in the source's dtype, on its device, owned by the caller.

        `out`: written there instead, converted straight to the dtype of `out` (perhaps a slice of a fused weight), and
        returned. `part`: only that much of it, and no more is kept; `shape` is the whole tensor's all the same.
        Raises `CheckpointError`, naming file and tensor, if it is missing, damaged or not of `shape`.
        """
        ...

    def leave(self, name: str) -> None:
        """Notes that the tensor belongs to the model and another worker takes it."""
        ...

    def finish(self) -> None:
        """Closes the files. Raises `CheckpointError` if they hold tensors that are no part of the model."""
        ...


class Elsewhere:
    """A source for the parts of a model that other workers hold: whatever is built from it has shapes but no memory.

    It leaves every tensor that it is asked for. So the code that takes weights is also what knows their names.
    """

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights

    def take(
        self, name: str, shape: tuple[int, ...], *, out: torch.Tensor | None = None, part: TensorSlice | None = None
    ) -> torch.Tensor:
        self._weights.leave(name)
        return torch.empty(shape if part is None else part.shape(shape), device="meta") if out is None else out

    def leave(self, name: str) -> None:
        self._weights.leave(name)

    def finish(self) -> None:
        """Nothing is open."""


class DummySource:
    """Draws each tensor from its name and one seed, so that the order of taking and the dtype do not matter."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> None:
        self._dtype = dtype
        self._device = torch.device(device)
        self._seed = seed

    def take(
        self, name: str, shape: tuple[int, ...], *, out: torch.Tensor | None = None, part: TensorSlice | None = None
    ) -> torch.Tensor:
        """A part is drawn with its whole, so that all workers have parts of the same tensor."""
        device = self._device if out is None else out.device
        if name.endswith("norm.weight"):
            return place(part_of(torch.ones(shape, device=device), part), out, self._dtype, device)
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        values = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
        return place(part_of(values.mul_(WEIGHT_STD), part), out, self._dtype, device)

    def leave(self, name: str) -> None:
        """Nothing is counted."""

    def finish(self) -> None:
        """Nothing is open."""


def part_of(values: torch.Tensor, part: TensorSlice | None) -> torch.Tensor:
    """A view; None: the whole."""
    return values if part is None else part.of(values)


def place(values: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copies `values` into `out`, or into a fresh tensor, so that nothing keeps a mapped file alive."""
    target = torch.empty(values.shape, dtype=dtype, device=device) if out is None else out
    return target.copy_(values)


def check_shape(file: str, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise CheckpointError(
            f"{file}: tensor {name} has shape {list(found)}, the configuration asks for {list(wanted)}"
        )


def account_for_rest(file: str, left: Iterable[str], spec: ModelSpec) -> None:
    """Judges what no worker takes: one log line for whole extra layers, `CheckpointError` for unexplained tensors.

    Fine without a word: rotary frequencies (computed anew), the head of tied embeddings, and the indexers of layers
    that reuse another's.
    """
    extra_layers: set[int] = set()
    unexplained: list[str] = []
    for name in left:
        layer = _LAYER.match(name)
        if layer is not None and int(layer[1]) >= spec.layers:
            extra_layers.add(int(layer[1]))
        elif not (name.endswith("rotary_emb.inv_freq") or _is_tied_head(name, spec) or _is_shared_indexer(name, spec)):
            unexplained.append(name)
    if unexplained:
        few = ", ".join(sorted(unexplained)[:3])
        raise CheckpointError(
            f"{file}: {len(unexplained)} tensors belong to no part of a {spec.architecture} model: {few}"
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
