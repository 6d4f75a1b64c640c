"""Reads the files of Hugging Face checkpoints: one `model.safetensors`, or shards with or without an index."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hotset.base.errors import CheckpointError
from hotset.kernels.weights import Weight
from hotset.models.checkpoint.files import INDEX, header_bytes, read_weight_index, shard_paths
from hotset.models.checkpoint.stored_tensors import check_shape, check_unused_tensors
from hotset.models.formats import readable_formats
from hotset.models.formats.weight_format import PLAIN, QuantisedFormat, WeightFormat
from hotset.models.model_tensors import tensor_names
from hotset.models.spec import ModelSpec

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class SafetensorsSource:
    """Reads tensors from memory-mapped files. The type of a stored tensor decides its format.

    The constructor checks that every shard exists and is complete, so an incomplete checkpoint fails before any weight
    is loaded.
    """

    def __init__(self, directory: Path, spec: ModelSpec) -> None:
        self._directory = directory
        self._spec = spec
        self._formats = readable_formats(spec.weight_formats)
        self._file_of: dict[str, Path] = {}
        self._handles: dict[Path, Any] = {}
        self._names: dict[Path, frozenset[str]] = {}  # the names of the tensors in each file
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
                    f"{self.title(repeated[0])} is also in {path}; without {INDEX}, each tensor must be in one file"
                )

    def format_of(self, name: str) -> WeightFormat:
        return next((format for format in self._formats if format.is_stored(name, self._stored_type)), PLAIN)

    def read(self, name: str, shape: tuple[int, ...]) -> Weight:
        format = self.format_of(name)
        if isinstance(format, QuantisedFormat):
            parts = {part: self._tensor(part) for part in format.stored_names(name) if part in self._file_of}
            return format.codec().read(name, shape, parts, self.title)
        stored = self._tensor(name)
        check_shape(self.title(name), tuple(stored.shape), shape)
        if stored.dtype not in FLOATS:
            kind = str(stored.dtype).removeprefix("torch.")
            raise CheckpointError(f"{self.title(name)} is of type {kind}; supported: floats of at least 16 bits")
        return stored

    def stored_bytes(self, name: str) -> int:
        stored_names = self.format_of(name).stored_names(name)
        return sum(self._tensor(stored).nbytes for stored in stored_names if stored == name or stored in self._file_of)

    def title(self, name: str) -> str:
        return f"{self._file_of[name]}: tensor {name}"

    def finish(self) -> None:
        names = tensor_names(self._spec)
        used = {stored for name in names for stored in self.format_of(name).stored_names(name)}
        self._handles.clear()
        check_unused_tensors(str(self._directory), self._file_of.keys() - used, self._spec)

    def _stored_type(self, name: str) -> str | None:
        if name not in self._file_of:
            return None
        kind: str = self._handles[self._file_of[name]].get_slice(name).get_dtype()
        return kind

    def _tensor(self, name: str) -> torch.Tensor:
        """Returns the stored tensor as a view of the mapped file."""
        path = self._file_of.get(name)
        if path is None:
            raise CheckpointError(f"{self._directory}: tensor {name} is missing")
        try:
            stored: torch.Tensor = self._handles[path].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from error
        return stored
