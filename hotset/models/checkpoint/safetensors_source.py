"""Reads Hugging Face checkpoints: one `model.safetensors` file, or shards with an index.

Tensors are floating point, or fp8 with one fp32 factor for each block of a matrix (`weight_scale_inv`):
`value[i, j] = weight[i, j] * scale[i // block_rows, j // block_columns]`. Blocks at the lower and right edge may be
partial.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hotset.base.errors import CheckpointError
from hotset.base.units import ceil_div
from hotset.models.checkpoint.files import INDEX, read_weight_index, shard_paths
from hotset.models.checkpoint.source import (
    Progress,
    TensorSlice,
    check_finite,
    check_shape,
    check_unused_tensors,
    copy_finite,
    copy_to,
    sliced,
)
from hotset.models.config_fields import ConfigFields, read_json
from hotset.models.spec import ModelSpec

SCALE_SUFFIX = "_scale_inv"
DEFAULT_BLOCK = (128, 128)
MAX_BLOCK = 1 << 16
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class SafetensorsSource:
    """Reads tensors from memory-mapped files, so that only the tensor being converted needs memory of its own.

    The constructor checks that every shard exists and is complete, so an incomplete checkpoint fails before any weight
    is loaded.
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
        self._block = _fp8_block(directory / "config.json")
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
        self._bytes_total = sum(path.stat().st_size for path in files)
        for name, shard in (index or {}).items():
            if name not in self._names[directory / shard]:
                raise CheckpointError(f"{directory / shard}: tensor {name} is missing, although {INDEX} lists it there")
            self._file_of[name] = directory / shard  # another shard may hold a tensor of the same name

    def _open(self, path: Path) -> None:
        try:
            self._handles[path] = safe_open(path, framework="pt", device="cpu")
            self._names[path] = frozenset(self._handles[path].keys())
            self._file_of.update(dict.fromkeys(self._names[path], path))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged or cut short: {error}") from error

    def load(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        out: torch.Tensor | None = None,
        tensor_slice: TensorSlice | None = None,
    ) -> torch.Tensor:
        """Implements `WeightSource`.

        Only the slice is read from the file, except for an fp8 tensor, which is dequantised before it is sliced.
        """
        stored = self._view(name)
        check_shape(str(self._file_of[name]), name, tuple(stored.shape), shape)
        device = self._device if out is None else out.device
        if stored.dtype == torch.float8_e4m3fn:
            values = self._dequantised(name, stored, out, tensor_slice)
        elif stored.dtype in FLOATS:
            values = copy_finite(self._title(name), out, sliced(stored, tensor_slice), self._dtype, device)
        else:
            kind = str(stored.dtype).removeprefix("torch.")
            raise CheckpointError(f"{self._title(name)} is of type {kind}; supported: floats of at least 16 bits")
        self._report()
        return values

    def skip(self, name: str) -> None:
        self._skipped |= {name, name + SCALE_SUFFIX}

    def finish(self) -> None:
        unused = self._file_of.keys() - self._loaded - self._skipped
        self._handles.clear()
        check_unused_tensors(str(self._directory), unused, self._spec)
        if self._progress is not None:
            self._progress(self._bytes_total, self._bytes_total)

    def _view(self, name: str) -> torch.Tensor:
        """Returns the stored tensor as a view of the mapped file."""
        path = self._file_of.get(name)
        if path is None:
            raise CheckpointError(f"{self._directory}: tensor {name} is missing")
        try:
            stored: torch.Tensor = self._handles[path].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from error
        if name not in self._loaded:
            self._loaded.add(name)
            self._bytes_loaded += stored.nbytes
        return stored

    def _dequantised(
        self, name: str, stored: torch.Tensor, out: torch.Tensor | None, tensor_slice: TensorSlice | None
    ) -> torch.Tensor:
        shape = tuple(stored.shape)
        scale = self._scale(name, shape)
        device, dtype = (self._device, self._dtype) if out is None else (out.device, out.dtype)
        whole = tensor_slice is None or tensor_slice.shape(shape) == shape
        target = out if whole and out is not None else torch.empty(shape, dtype=dtype, device=device)
        sums = dequantise_blocks(stored.to(device), scale.to(device), self._block, target)
        check_finite(self._title(name), target, sums)
        return target if whole else copy_to(out, sliced(target, tensor_slice), dtype, device)

    def _scale(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        scale_name = name + SCALE_SUFFIX
        if scale_name not in self._file_of:
            raise CheckpointError(f"{self._file_of[name]}: tensor {name} is fp8, but {scale_name} is missing")
        if len(shape) != 2:
            raise CheckpointError(
                f"{self._file_of[name]}: tensor {name} is fp8 of shape {list(shape)}; supported: matrices"
            )
        scale = self._view(scale_name)
        expected = scale_shape(shape, self._block)
        if tuple(scale.shape) != expected:
            raise CheckpointError(
                f"{self._file_of[scale_name]}: tensor {scale_name} has shape {list(scale.shape)}, "
                f"but blocks of {self._block[0]} x {self._block[1]} require {list(expected)}"
            )
        scale = scale.float()
        check_finite(self._title(scale_name), scale, [scale.sum()])
        return scale

    def _title(self, name: str) -> str:
        return f"{self._file_of[name]}: tensor {name}"

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(self._bytes_loaded, self._bytes_total)


def _fp8_block(config_path: Path) -> tuple[int, int]:
    """Returns the rows and columns of an fp8 block. Raises `CheckpointError` for every other kind of quantisation."""
    if not config_path.is_file():
        return DEFAULT_BLOCK
    quantisation = ConfigFields(read_json(config_path), str(config_path)).section("quantization_config")
    quantisation.choice("quant_method", "fp8", ("fp8",))
    block = quantisation.get("weight_block_size")
    if block is None:
        return DEFAULT_BLOCK
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 0 < n <= MAX_BLOCK for n in block):
        quantisation.refuse("weight_block_size", f"two whole numbers from 1 to {MAX_BLOCK}")
    return block[0], block[1]


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Returns the shape of the scale of a matrix of shape `shape`: one factor per block."""
    rows, columns = shape
    return ceil_div(rows, block[0]), ceil_div(columns, block[1])


def dequantise_blocks(
    weight: torch.Tensor,  # [rows, columns] float8_e4m3fn
    scale: torch.Tensor,  # [row blocks, column blocks] float32
    block: tuple[int, int],
    out: torch.Tensor,  # [rows, columns], any float dtype
) -> list[torch.Tensor]:
    """Writes the values to `out`, one row of blocks at a time, so that fp32 values of the whole tensor never exist.

    Returns the sum of the values in each row of blocks.
    """
    assert tuple(scale.shape) == scale_shape(tuple(weight.shape), block), (
        "the caller passed a scale that does not fit the weight"
    )
    per_column = scale.repeat_interleave(block[1], dim=1)[:, : weight.shape[1]]
    sums = []
    for index in range(scale.shape[0]):
        rows = slice(index * block[0], (index + 1) * block[0])
        sums.append(out[rows].copy_(weight[rows].float() * per_column[index]).sum())
    return sums
