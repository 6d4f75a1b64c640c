"""The container format GGUF: metadata and a table of tensors over one memory-mapped file.

The reader of the `gguf` package takes seconds for the strings of a vocabulary, so this module reads the container
itself; `gguf_source.py` uses the package for the quantised number formats. Layout, little-endian:

    magic "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata: key string | type u32 | value          (string: length u64, bytes; array: type u32, count u64, values)
    tensors:  name string | dimensions u32 | extent u64 each, fastest first | type u32 | offset u64
    padding to `general.alignment` | tensor data, offsets counted from here
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hotset.base.errors import CheckpointError
from hotset.base.units import ceil_div

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4

STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The location of one tensor in the file. `shape` is in the usual order, slowest dimension first."""

    name: str
    shape: tuple[int, ...]
    type_id: int  # ggml's number of the format
    offset: int  # in bytes from the beginning of the file


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open file. The mapping closes when this object and all arrays that view it are deleted."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    mapped: mmap.mmap


def open_gguf(path: Path) -> GgufFile:
    """Maps the file and reads everything but its tensor data. Raises `CheckpointError` for a damaged file.

    Keeps the result for the next call, because start-up needs it several times.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return _open(path, (state.st_ino, state.st_size, state.st_mtime_ns))


@lru_cache(maxsize=1)
def _open(path: Path, version: tuple[int, ...]) -> GgufFile:
    """`version` changes with the file, so that a changed file is read again."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        return _parse(path, mapped)
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise CheckpointError(f"{path} is damaged or cut short: {error}") from error


def _parse(path: Path, mapped: mmap.mmap) -> GgufFile:
    cursor = _Cursor(mapped)
    if mapped[:4] != MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file")
    cursor.position = 4
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise CheckpointError(f"{path}: GGUF version is {version}; supported: 2 and 3, little-endian")
    tensor_count, metadata_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    table = [cursor.tensor() for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}; supported: a whole number from 1")
    start = ceil_div(cursor.position, alignment) * alignment
    tensors = (GgufTensor(t.name, t.shape, t.type_id, start + t.offset) for t in table)
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in tensors}, mapped)


class _Cursor:
    """Reads consecutive values. Raises `struct.error` or `IndexError` past the end of the file."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self.position = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._mapped, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        (length,) = LENGTH.unpack_from(self._mapped, self.position)
        self.position += LENGTH.size
        return self._bytes(length).decode("utf-8")

    def value(self, type_id: int, depth: int = 0) -> Any:
        if type_id == STRING:
            return self.string()
        if type_id == ARRAY and depth < MAX_ARRAY_DEPTH:
            return self._array(self.scalar("I"), self.scalar("Q"), depth + 1)
        if type_id not in SCALARS:
            raise struct.error(f"unknown metadata type {type_id}")
        return self.scalar(SCALARS[type_id])

    def _array(self, item_type: int, count: int, depth: int) -> list[Any]:
        if item_type == STRING:
            return [self.string() for _ in range(count)]
        if item_type not in SCALARS:
            return [self.value(item_type, depth) for _ in range(count)]
        code = SCALARS[item_type]
        raw = self._bytes(count * struct.calcsize("<" + code))
        return [item for (item,) in struct.iter_unpack("<" + code, raw)]

    def tensor(self) -> GgufTensor:
        name = self.string()
        dimensions: int = self.scalar("I")
        if dimensions > MAX_DIMENSIONS:
            raise struct.error(f"tensor {name} has {dimensions} dimensions")
        extents = [self.scalar("Q") for _ in range(dimensions)]
        return GgufTensor(name, tuple(reversed(extents)), type_id=self.scalar("I"), offset=self.scalar("Q"))

    def _bytes(self, length: int) -> bytes:
        end = self.position + length
        if end > len(self._mapped):
            raise IndexError(f"a value of {length} bytes reaches past the end of the file")
        raw = self._mapped[self.position : end]
        self.position = end
        return raw
