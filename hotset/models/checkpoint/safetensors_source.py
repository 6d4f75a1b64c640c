"""Reads Hugging Face checkpoints: one `model.safetensors` file, or shards with or without an index.

Tensors are floating point, or fp8 matrices with one fp32 factor for each block (`weight_scale_inv`):
`value[i, j] = weight[i, j] * scale[i // FP8_BLOCK, j // FP8_BLOCK]`. Blocks at the lower and right edge may be partial.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hotset.base.errors import CheckpointError
from hotset.kernels.fp8 import Fp8Weight, Weight
from hotset.models.checkpoint.files import INDEX, header_bytes, read_weight_index, shard_paths
from hotset.models.checkpoint.fp8_tensors import check_scales, copy_fp8, expand, scale_shape
from hotset.models.checkpoint.source import (
    Progress,
    check_finite,
    check_shape,
    check_unused_tensors,
    copy_finite,
    sliced,
)
from hotset.models.formats.fp8_blocks import FP8_BLOCK, FP8_BLOCKS
from hotset.models.spec import ModelSpec
from hotset.models.split import TensorSlice

SCALE_SUFFIX = "_scale_inv"
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class SafetensorsSource:
    """Reads tensors from memory-mapped files, so that only the tensor being converted needs memory of its own.

    The constructor checks that every shard exists and is complete, so an incomplete checkpoint fails before any weight
    is loaded. `progress` gets the number of bytes that were read; of a slice, only its own bytes count.
    """

    def __init__(
        self,
        directory: Path,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device | str,
        progress: Progress | None = None,
    ) -> None:
        self._directory = directory
        self._spec = spec
        self._dtype = dtype
        self._device = torch.device(device)
        self._progress = progress
        self._file_of: dict[str, Path] = {}
        self._handles: dict[Path, Any] = {}
        self._names: dict[Path, frozenset[str]] = {}  # of the tensors in each file
        self._loaded: set[str] = set()
        self._skipped: set[str] = set()  # loaded by other workers
        self._bytes_loaded = 0
        index = read_weight_index(directory)
        files = shard_paths(directory, index)
        for path in files:
            self._open(path)
        if index is None:
            self._check_distinct(files)
        for name, shard in (index or {}).items():
            if name not in self._names[directory / shard]:
                raise CheckpointError(f"{directory / shard}: tensor {name} is missing, although {INDEX} lists it there")
            self._file_of[name] = directory / shard  # another shard may hold a tensor of the same name

    def _open(self, path: Path) -> None:
        try:
            header_bytes(path)  # raises an error above the limit
            self._handles[path] = safe_open(path, framework="pt", device="cpu")
            self._names[path] = frozenset(self._handles[path].keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged or cut short: {error}") from error
        self._file_of.update(dict.fromkeys(self._names[path], path))

    def _check_distinct(self, files: list[Path]) -> None:
        """Raises `CheckpointError` if two files hold a tensor of the same name, and no index says which one counts."""
        for path in files:
            repeated = sorted(name for name in self._names[path] if self._file_of[name] != path)
            if repeated:
                raise CheckpointError(
                    f"{self._title(repeated[0])} is also in {path}; without {INDEX}, each tensor must be in one file"
                )

    def load(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        out: torch.Tensor | None = None,
        tensor_slice: TensorSlice | None = None,
    ) -> torch.Tensor:
        """Implements `WeightSource`. Only the slice is read from the file."""
        stored = self._view(name, shape)
        device = self._device if out is None else out.device
        part = sliced(stored, tensor_slice)
        if stored.dtype == torch.float8_e4m3fn:
            values = torch.empty(part.shape, dtype=self._dtype, device=device) if out is None else out
            check_finite(self._title(name), values, expand(self._with_scales(name, stored), tensor_slice, values))
        elif stored.dtype in FLOATS:
            values = copy_finite(self._title(name), out, part, self._dtype, device)
        else:
            kind = str(stored.dtype).removeprefix("torch.")
            raise CheckpointError(f"{self._title(name)} is of type {kind}; supported: floats of at least 16 bits")
        self._report(part.nbytes)
        return values

    def is_fp8(self, name: str) -> bool:
        return FP8_BLOCKS in self._spec.weight_formats.kept_formats and FP8_BLOCKS.is_stored(name, self._stored_type)

    def load_weight(
        self, name: str, shape: tuple[int, ...], *, out: Weight | None = None, tensor_slice: TensorSlice | None = None
    ) -> Weight:
        if not self.is_fp8(name) or isinstance(out, torch.Tensor):
            assert not isinstance(out, Fp8Weight), f"{name} is not in fp8, but its place is"
            return self.load(name, shape, out=out, tensor_slice=tensor_slice)
        stored = self._with_scales(name, self._view(name, shape))
        weight = copy_fp8(self._title(name), out, stored, tensor_slice, self._device)
        self._report(weight.codes.nbytes)
        return weight

    def stored_bytes(self, name: str) -> int:
        scale_name = name + SCALE_SUFFIX
        scale_bytes = self._mapped(scale_name).nbytes if scale_name in self._file_of else 0
        return self._mapped(name).nbytes + scale_bytes

    def skip(self, name: str) -> None:
        self._skipped |= {name, name + SCALE_SUFFIX}

    def finish(self) -> None:
        unused = self._file_of.keys() - self._loaded - self._skipped
        self._handles.clear()
        check_unused_tensors(str(self._directory), unused, self._spec)

    def _stored_type(self, name: str) -> str | None:
        if name not in self._file_of:
            return None
        kind: str = self._handles[self._file_of[name]].get_slice(name).get_dtype()
        return kind

    def _view(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Returns the stored tensor as a view of the mapped file, after a check of its shape. Marks it as loaded."""
        stored = self._mapped(name)
        if shape is not None:
            check_shape(str(self._file_of[name]), name, tuple(stored.shape), shape)
        self._loaded.add(name)
        return stored

    def _mapped(self, name: str) -> torch.Tensor:
        """Returns the stored tensor as a view of the mapped file."""
        path = self._file_of.get(name)
        if path is None:
            raise CheckpointError(f"{self._directory}: tensor {name} is missing")
        try:
            stored: torch.Tensor = self._handles[path].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from error
        return stored

    def _with_scales(self, name: str, codes: torch.Tensor) -> Fp8Weight:
        """Returns the stored fp8 weight. Its codes are a view of the mapped file."""
        scale_name = name + SCALE_SUFFIX
        if codes.dim() != 2:
            raise CheckpointError(f"{self._title(name)} is fp8 of shape {list(codes.shape)}; supported: matrices")
        if scale_name not in self._file_of:
            raise CheckpointError(f"{self._title(name)} is fp8, but {scale_name} is missing; download the model again")
        stored = self._view(scale_name)
        expected = scale_shape(tuple(codes.shape))
        if tuple(stored.shape) != expected:
            raise CheckpointError(
                f"{self._title(scale_name)} has shape {list(stored.shape)}, "
                f"but blocks of {FP8_BLOCK} x {FP8_BLOCK} require {list(expected)}"
            )
        if not stored.is_floating_point():
            kind = str(stored.dtype).removeprefix("torch.")
            raise CheckpointError(f"{self._title(scale_name)} is of type {kind}; supported: floats")
        scales = stored.float()
        check_scales(self._title(scale_name), scales)
        self._bytes_loaded += stored.nbytes
        return Fp8Weight(codes, scales)

    def _title(self, name: str) -> str:
        return f"{self._file_of[name]}: tensor {name}"

    def _report(self, read_bytes: int) -> None:
        self._bytes_loaded += read_bytes
        if self._progress is not None:
            self._progress(self._bytes_loaded)
