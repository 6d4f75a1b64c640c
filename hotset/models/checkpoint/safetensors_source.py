"""Reads the files of Hugging Face checkpoints: one `model.safetensors`, or shards with or without an index."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hotset.base.errors import CheckpointError
from hotset.kernels.weights import Weight
from hotset.models.checkpoint.files import INDEX, header_bytes, read_header, read_weight_index, shard_paths
from hotset.models.checkpoint.parallel_reader import FileRange, ParallelReader
from hotset.models.checkpoint.stored_tensors import check_shape, check_unused_tensors
from hotset.models.formats import readable_formats
from hotset.models.formats.weight_format import PLAIN, QuantisedFormat, WeightFormat
from hotset.models.model_tensors import tensor_names
from hotset.models.spec import ModelSpec
from hotset.models.tensors import is_of_expert

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class SafetensorsSource:
    """Reads tensors from memory-mapped files, or with a reader. The type of a stored tensor decides its format.

    The constructor checks that every shard exists and is complete, so an incomplete checkpoint fails before any weight
    is loaded.
    """

    def __init__(self, directory: Path, spec: ModelSpec, reader: ParallelReader | None = None, ranks: int = 1) -> None:
        """Owns `reader`, which brings tensors to its device; without one, they are views of the mapped files. `ranks`
        workers read these files, each its own slices."""
        self._directory = directory
        self._spec = spec
        self._reader, self._ranks = reader, ranks
        self._views: dict[
            str, torch.Tensor
        ] = {}  # those that were asked for: making one takes a tenth of a millisecond
        self._first_bytes: dict[Path, dict[str, int]] = {}  # of the tensors in each file, if there is a reader
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

    def announce(self, name: str, shape: tuple[int, ...], rows: range | None) -> None:
        if self._reader is None:
            return
        for part in self._parts(name):
            mapped = self._mapped(part)
            if tuple(mapped.shape) == shape or part != name:  # else `read` raises an error
                self._reader.announce(self._range(part, mapped, rows if part == name else None))

    def read(self, name: str, shape: tuple[int, ...], rows: range | None = None) -> Weight:
        format, mapped = self.format_of(name), self._mapped(name)
        check_shape(self.title(name), tuple(mapped.shape), shape)
        if not isinstance(format, QuantisedFormat) and mapped.dtype not in FLOATS:
            kind = str(mapped.dtype).removeprefix("torch.")
            raise CheckpointError(f"{self.title(name)} is of type {kind}; supported: floats of at least 16 bits")
        if self._reader is not None:
            self._reader.release()  # what the last call returned is not valid any more
        parts = {part: self._tensor(part, rows if part == name else None) for part in self._parts(name)}
        if isinstance(format, QuantisedFormat):
            return format.codec().read(name, shape, parts, self.title, rows)
        return parts[name]

    def _parts(self, name: str) -> list[str]:
        """Returns the names of the stored tensors of a weight, as far as there are any: its own name is the first."""
        return [part for part in self.format_of(name).stored_names(name) if part == name or part in self._file_of]

    def stored_bytes(self, name: str) -> int:
        return sum(self._mapped(part).nbytes for part in self._parts(name))

    def title(self, name: str) -> str:
        return f"{self._file_of[name]}: tensor {name}"

    def finish(self) -> None:
        names = tensor_names(self._spec)
        used = {stored for name in names for stored in self.format_of(name).stored_names(name)}
        self._handles.clear()
        self._views.clear()
        if self._reader is not None:
            self._reader.close()
        check_unused_tensors(str(self._directory), self._file_of.keys() - used, self._spec)

    def _stored_type(self, name: str) -> str | None:
        if name not in self._file_of:
            return None
        kind: str = self._handles[self._file_of[name]].get_slice(name).get_dtype()
        return kind

    def _tensor(self, name: str, rows: range | None) -> torch.Tensor:
        """Returns the stored tensor, or some of its rows."""
        mapped = self._mapped(name)
        if self._reader is None:
            return mapped if rows is None else mapped[rows.start : rows.stop]
        stored = self._reader.read(self._range(name, mapped, rows))
        return stored.view(mapped.dtype).view(mapped.shape if rows is None else (len(rows), *mapped.shape[1:]))

    def _range(self, name: str, mapped: torch.Tensor, rows: range | None) -> FileRange:
        """Returns the bytes of a tensor, or of some of its rows, in its file."""
        path = self._file_of[name]
        if path not in self._first_bytes:
            begin = 8 + header_bytes(path)
            header = read_header(path)
            self._first_bytes[path] = {key: begin + header[key]["data_offsets"][0] for key in self._names[path]}
        first, nbytes = self._first_bytes[path][name], mapped.nbytes
        if rows is not None:
            row_bytes = nbytes // mapped.shape[0]
            first, nbytes = first + rows.start * row_bytes, len(rows) * row_bytes
        own = self._ranks == 1 or rows is not None or is_of_expert(name)
        return FileRange(path, first, nbytes, self.title(name), shared=not own)

    def _mapped(self, name: str) -> torch.Tensor:
        """Returns the stored tensor as a view of the mapped file, of which no byte has been read."""
        if name in self._views:
            return self._views[name]
        path = self._file_of.get(name)
        if path is None:
            raise CheckpointError(f"{self._directory}: tensor {name} is missing")
        try:
            stored: torch.Tensor = self._handles[path].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from error
        self._views[name] = stored
        return stored
