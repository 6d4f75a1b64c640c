"""Loads weights by name for decoders: in the format in which they are stored, and only the slice of one rank."""

import math
from typing import Literal

import torch
from torch import Tensor

from hotset.kernels.weights import QuantisedWeight, Weight
from hotset.models.checkpoint.dummy_source import DummySource
from hotset.models.checkpoint.files import ModelFiles
from hotset.models.checkpoint.gguf_source import GgufSource
from hotset.models.checkpoint.parallel_reader import ParallelReader
from hotset.models.checkpoint.safetensors_source import SafetensorsSource
from hotset.models.checkpoint.stored_tensors import Progress, TensorSource, copy_finite, sliced
from hotset.models.formats.weight_format import PLAIN, PLAIN_WEIGHTS, QuantisedFormat, WeightFormat, WeightFormats
from hotset.models.split import TensorSlice

META = torch.device("meta")


class WeightSource:
    """Provides weights by the names of Hugging Face checkpoints, in one dtype and on one device.

    `read_bytes` is the number of bytes that were read, and is reported to `progress`. A slice counts only its own
    bytes. On the meta device, weights have no memory, and nothing is read.
    """

    def __init__(
        self,
        tensor_source: TensorSource,
        dtype: torch.dtype,
        device: torch.device | str,
        formats: WeightFormats = PLAIN_WEIGHTS,
        progress: Progress | None = None,
    ) -> None:
        self.tensor_source, self.formats = tensor_source, formats
        self.dtype, self.device = dtype, torch.device(device)
        self._progress = progress
        self._kept = formats.kept_formats
        self._counted: set[str] = set()  # the tensors whose bytes `read_bytes` contains
        self.read_bytes = 0

    def load(
        self, name: str, shape: tuple[int, ...], *, out: Tensor | None = None, tensor_slice: TensorSlice | None = None
    ) -> Tensor:
        """Returns the tensor `name` in the source's dtype and on its device; the caller owns it.

        With `out` (which may be a view of a merged weight), the values are converted directly to the dtype of `out` and
        written to it, and `out` is returned. With `tensor_slice`, only that slice is returned; `shape` is still the
        shape of the whole tensor. Raises `CheckpointError`, with file and tensor name, if the tensor is missing,
        damaged, not of shape `shape`, or contains NaN or infinity. A quantised tensor is expanded.
        """
        stored = self._read(name, shape, tensor_slice)
        if out is None:
            out = torch.empty(_kept_shape(shape, tensor_slice), dtype=self.dtype, device=self.device)
        self._fill(out, name, shape, stored, tensor_slice)
        return out

    def load_weight(
        self, name: str, shape: tuple[int, ...], *, out: Weight | None = None, tensor_slice: TensorSlice | None = None
    ) -> Weight:
        """Returns the matrix `name` in the format `format_of(name)`. A plain `out` receives the expanded values.

        A slice along the outputs may begin anywhere. Raises the errors of `load`, `CheckpointError` for codes or scales
        that are not valid, and `ConfigError` for a slice that divides a block of inputs.
        """
        format = self.format_of(name)
        if isinstance(out, Tensor) or not isinstance(format, QuantisedFormat):
            assert not isinstance(out, QuantisedWeight), f"{name} is plain, but its target is not"
            return self.load(name, shape, out=out, tensor_slice=tensor_slice)
        stored = self._read(name, shape, tensor_slice)
        if out is None:
            boundaries = () if tensor_slice is None or tensor_slice.dim != 0 else (tensor_slice.first,)
            out = format.codec().empty(_kept_shape(shape, tensor_slice), self.device, boundaries)
        self._fill(out, name, shape, stored, tensor_slice)
        return out

    def format_of(self, name: str) -> WeightFormat:
        """Returns the format in which `load_weight` returns the matrix `name`. PLAIN if there is no such tensor."""
        format = self.tensor_source.format_of(name) if self._kept else PLAIN
        return format if format in self._kept else PLAIN

    def finish(self) -> None:
        """Ends loading. Raises `CheckpointError` if the files hold tensors that do not belong to the model."""
        self.tensor_source.finish()

    def planned(self) -> "WeightSource":
        """Returns a source of the same weights without memory, which counts the bytes that this one would read.

        Build a decoder from it first: what it loads, this one reads ahead. A missing tensor raises `CheckpointError`;
        shapes and values are not checked.
        """
        return WeightSource(self.tensor_source, self.dtype, META, self.formats)

    def _read(self, name: str, shape: tuple[int, ...], tensor_slice: TensorSlice | None) -> Weight | None:
        """Returns the stored tensor, or the rows of it that contain the slice. On the meta device, announces instead
        that the tensor will be read, and returns None."""
        rows = self.tensor_source.format_of(name).rows_around(tensor_slice, shape[0])
        if self.device == META:
            self.tensor_source.announce(name, shape, rows)
            return None
        return self.tensor_source.read(name, shape, rows)

    def _fill(
        self,
        target: Weight,
        name: str,
        shape: tuple[int, ...],
        stored: Weight | None,
        tensor_slice: TensorSlice | None,
    ) -> None:
        """Copies the stored tensor, or its slice, to `target`, and counts its bytes."""
        if stored is not None:
            self._copy(target, name, stored, tensor_slice)
        if name not in self._counted:
            self._counted.add(name)
            stored_bytes = self.tensor_source.stored_bytes(name)
            self.read_bytes += stored_bytes * math.prod(target.shape) // max(1, math.prod(shape))
        if self._progress is not None:
            self._progress(self.read_bytes)

    def _copy(self, target: Weight, name: str, stored: Weight, tensor_slice: TensorSlice | None) -> None:
        format, title = self.tensor_source.format_of(name), self.tensor_source.title(name)
        if tensor_slice is not None and tensor_slice.dim == 0:  # `stored` begins at a block before the slice
            first = tensor_slice.first % format.output_block
            tensor_slice = TensorSlice(0, first, first + tensor_slice.size)
        if not isinstance(format, QuantisedFormat):
            assert isinstance(target, Tensor) and isinstance(stored, Tensor), f"{name} is plain, but its target is not"
            copy_finite(title, target, sliced(stored, tensor_slice))
        elif isinstance(target, Tensor):
            format.codec().expand(title, target, stored, tensor_slice)
        else:
            format.check_input_slice(title, stored.shape[1], tensor_slice)
            format.codec().copy(title, target, stored, tensor_slice)


def open_weights(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    load_format: Literal["auto", "dummy"] = "auto",
    seed: int = 0,
    progress: Progress | None = None,
    ranks: int = 1,
) -> WeightSource:
    """Opens the weights of a model; the caller must call `finish()`. `seed` applies to `load_format="dummy"` only.

    `ranks` workers hold the same layers, or parts of them.
    Matrices stay in the formats that `files.spec.weight_formats` keeps. All others are expanded to `dtype`.
    """
    if load_format == "dummy":
        return dummy_weights(dtype, device, seed, files.spec.weight_formats)
    spec = files.spec
    tensors: TensorSource
    if files.gguf is not None:
        tensors = GgufSource(files.gguf, spec)
    else:
        reader = ParallelReader(torch.device(device)) if torch.device(device).type == "cuda" else None
        tensors = SafetensorsSource(files.path, spec, reader, ranks)
    return WeightSource(tensors, dtype, device, spec.weight_formats, progress)


def dummy_weights(
    dtype: torch.dtype, device: torch.device | str, seed: int = 0, formats: WeightFormats = PLAIN_WEIGHTS
) -> WeightSource:
    """Returns random weights. Needs no files."""
    return WeightSource(DummySource(torch.device(device), seed, formats), dtype, device, formats)


def _kept_shape(shape: tuple[int, ...], tensor_slice: TensorSlice | None) -> tuple[int, ...]:
    return shape if tensor_slice is None else tensor_slice.shape(shape)
