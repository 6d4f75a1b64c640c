"""Random weights for a configuration without a checkpoint."""

import hashlib

import torch

from hotset.kernels.weights import Weight
from hotset.models.checkpoint.stored_tensors import rows_of
from hotset.models.formats.weight_format import QuantisedFormat, WeightFormat, WeightFormats

DUMMY_STD = 0.02


class DummySource:
    """Random tensors, in the formats in which a checkpoint would store them.

    Weights of norms are 1. The values of any other tensor depend on its name and shape, the seed and the type of
    device, but not on the order of loading. All formats have about the same standard deviation. A tensor is drawn whole
    even for a slice, so that all workers have slices of the same tensor.
    """

    def __init__(self, device: torch.device, seed: int, formats: WeightFormats) -> None:
        self._device, self._seed, self._formats = device, seed, formats

    def format_of(self, name: str) -> WeightFormat:
        return self._formats.of(name)

    def announce(self, name: str, shape: tuple[int, ...], rows: range | None) -> None:
        """Does nothing: there is no file to read ahead."""

    def read(self, name: str, shape: tuple[int, ...], rows: range | None = None) -> Weight:
        return rows_of(self._draw(name, shape), rows)

    def _draw(self, name: str, shape: tuple[int, ...]) -> Weight:
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device)
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        if isinstance(format := self.format_of(name), QuantisedFormat):
            return format.codec().random(shape, DUMMY_STD, generator)
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=self._device).mul_(DUMMY_STD)

    def stored_bytes(self, name: str) -> int:
        return 0

    def title(self, name: str) -> str:
        return f"random tensor {name}"

    def finish(self) -> None:
        """Does nothing: there is no file whose tensors must all be used."""
