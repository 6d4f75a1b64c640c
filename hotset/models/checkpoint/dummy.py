"""Random weights, for a configuration without a checkpoint."""

import hashlib

import torch

from hotset.models.checkpoint.source import TensorSlice, part_of, place

WEIGHT_STD = 0.02


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
