"""Random weights for a configuration without a checkpoint."""

import hashlib

import torch

from hotset.kernels.fp8 import Fp8Weight, Weight
from hotset.models.checkpoint.fp8_tensors import copy_fp8, expand, scale_shape
from hotset.models.checkpoint.source import copy_to, sliced
from hotset.models.formats.fp8_blocks import FP8_BLOCKS
from hotset.models.formats.weight_format import PLAIN_WEIGHTS, WeightFormats
from hotset.models.split import TensorSlice

DUMMY_STD = 0.02
FINITE_CODES = 254  # the codes of e4m3 that are not NaN
FP8_RMS = 100.06  # the root mean square of all finite codes


class DummySource:
    """Random weights for a configuration without a checkpoint.

    Weights of norms are 1. The values of any other tensor depend on its name and shape, the seed and the type of
    device, but not on the order of loading. All dtypes round the same float32 values. The matrices that are in fp8
    according to `formats` have random codes and scales, with about the same standard deviation.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device | str, seed: int = 0, formats: WeightFormats = PLAIN_WEIGHTS
    ) -> None:
        self._dtype = dtype
        self._device = torch.device(device)
        self._seed = seed
        self._formats = formats

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
        if self.is_fp8(name):
            sliced_shape = shape if tensor_slice is None else tensor_slice.shape(shape)
            target = torch.empty(sliced_shape, dtype=self._dtype, device=device) if out is None else out
            expand(self._draw_fp8(name, shape, device), tensor_slice, target)
            return target
        values = torch.randn(shape, generator=self._generator(name, device), dtype=torch.float32, device=device)
        return copy_to(out, sliced(values.mul_(DUMMY_STD), tensor_slice), self._dtype, device)

    def is_fp8(self, name: str) -> bool:
        return self._formats.of(name) == FP8_BLOCKS

    def load_weight(
        self, name: str, shape: tuple[int, ...], *, out: Weight | None = None, tensor_slice: TensorSlice | None = None
    ) -> Weight:
        if not self.is_fp8(name) or isinstance(out, torch.Tensor):
            assert not isinstance(out, Fp8Weight), f"{name} is not in fp8, but its place is"
            return self.load(name, shape, out=out, tensor_slice=tensor_slice)
        device = self._device if out is None else out.device
        return copy_fp8(name, out, self._draw_fp8(name, shape, device), tensor_slice, device)

    def stored_bytes(self, name: str) -> int:
        return 0

    def skip(self, name: str) -> None:
        """Does nothing: there is no file whose tensors must all be used."""

    def finish(self) -> None:
        """Does nothing: no file is open."""

    def _generator(self, name: str, device: torch.device) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))

    def _draw_fp8(self, name: str, shape: tuple[int, ...], device: torch.device) -> Fp8Weight:
        """Draws every finite code with the same probability, and scales that differ by a factor of up to 3."""
        generator = self._generator(name, device)
        codes = torch.randint(FINITE_CODES, shape, generator=generator, dtype=torch.uint8, device=device)
        codes += codes >= 0x7F  # skips 0x7F and 0xFF, which are NaN
        scales = torch.rand(scale_shape(shape), generator=generator, device=device).add_(0.5).mul_(DUMMY_STD / FP8_RMS)
        return Fp8Weight(codes.view(torch.float8_e4m3fn), scales)
