"""Reads and writes trace files: the rows that a sparse-attention model selected at every step, in a compact format.

A file consists of (integers are little-endian):

    8 bytes    magic, b"HOTSTOPK"
    uint32     version, 1
    uint32     number of bytes of the header
    header     JSON: model, layers, k, requests, steps, context_lengths, page_rows, recorded, body_bytes, body_crc32
    body       LZMA (xz); decompressed it has `body_bytes` bytes and the checksum `body_crc32`

The body holds the selections ordered by request, layer and step. Adjacent steps overlap, so each step is stored as the
difference to the previous step (the first step: to the empty selection). Five streams of unsigned LEB128 varints follow
one another, each preceded by its length in bytes as a varint:

    removed    per step: the number of positions of the previous step that are not selected any more
    added      per step: the number of new positions
    ranks      per step: the ranks of the removed positions among the ascending positions of the previous step, encoded
               as the first rank and then the differences between adjacent ranks, minus 1
    firsts     per step that has new positions: the lowest of them
    gaps       per step: the differences between adjacent new positions, minus 1

At step s, the query of request r is the newest of `context_lengths[r] + s` rows. `hotset record` begins with the last
token of the prompt. In a context shorter than k, fewer than k positions are selected; in memory, EMPTY follows them.
"""

import json
import lzma
import struct
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.base.errors import ConfigError
from hotset.kernels import EMPTY

MAGIC = b"HOTSTOPK"
VERSION = 1
PREFIX = struct.Struct("<8sII")
STREAMS = 5
MAX_VARINT_BYTES = 5  # positions are below 2**31

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """Describes the model and the requests of a trace."""

    model: str
    layers: int
    k: int
    requests: int
    steps: int
    context_lengths: tuple[int, ...]  # rows of each request at its first step, including the new row
    page_rows: int
    recorded: dict[str, Any] = field(default_factory=dict)  # command, date, dtype and hardware of the recording

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.requests, self.steps, self.layers, self.k


@dataclass(frozen=True, slots=True)
class TopkTrace:
    """The selections and their description."""

    header: TraceHeader
    selections: NDArray[np.int32]  # [requests, steps, layers, k] ascending positions, then EMPTY

    def chosen(self, request: int, step: int, layer: int) -> NDArray[np.int32]:
        """Returns the ascending positions of one selection, without padding."""
        padded = self.selections[request, step, layer]
        positions: NDArray[np.int32] = padded[padded != EMPTY]
        return positions


def write_trace(path: Path, trace: TopkTrace) -> None:
    """Writes or overwrites the file.

    Raises ConfigError if the selections do not fit the header, or are not ascending, distinct and EMPTY-padded.
    """
    header, selections = trace.header, trace.selections
    if selections.shape != header.shape:
        raise ConfigError(f"{path}: selections have shape {selections.shape}, the header {header.shape}")
    if len(header.context_lengths) != header.requests:
        raise ConfigError(f"{path}: the header needs one context length per request")
    body = _pack(selections)
    fields_json = asdict(header) | {"body_bytes": len(body), "body_crc32": zlib.crc32(body)}
    text = json.dumps(fields_json).encode()
    path.write_bytes(PREFIX.pack(MAGIC, VERSION, len(text)) + text + lzma.compress(body))


def read_trace(path: Path) -> TopkTrace:
    """Reads a file that `write_trace` wrote. Raises ConfigError if the file is not such a trace."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: the top-k trace cannot be read: {error.strerror}") from error
    values, body_offset = _read_json(path, raw)
    header = _make_header(path, values)
    try:
        body = lzma.decompress(raw[body_offset:])
    except lzma.LZMAError as error:
        raise ConfigError(f"{path}: the body of the top-k trace is truncated or damaged: {error}") from error
    if len(body) != values["body_bytes"] or zlib.crc32(body) != values["body_crc32"]:
        raise ConfigError(f"{path}: the body of the top-k trace does not match its header")
    return TopkTrace(header, _unpack(path, body, header))


def _read_json(path: Path, raw: bytes) -> tuple[dict[str, Any], int]:
    """Returns the JSON of the header and the offset of the body."""
    if len(raw) < PREFIX.size or not raw.startswith(MAGIC):
        raise ConfigError(f"{path}: not a top-k trace: expected it to begin with {MAGIC!r}, found {raw[:8]!r}")
    _magic, version, length = PREFIX.unpack_from(raw)
    if version != VERSION:
        raise ConfigError(f"{path}: top-k trace of version {version}; expected version {VERSION}")
    body_offset = PREFIX.size + length
    try:
        values = json.loads(raw[PREFIX.size : body_offset])
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: expected a JSON header of {length} bytes: {error}") from error
    expected = {field.name for field in fields(TraceHeader)} | {"body_bytes", "body_crc32"}
    if not isinstance(values, dict) or set(values) != expected:
        raise ConfigError(f"{path}: expected a header with exactly the fields {', '.join(sorted(expected))}")
    return values, body_offset


def _make_header(path: Path, values: dict[str, Any]) -> TraceHeader:
    for name in ("layers", "k", "requests", "steps", "page_rows"):
        if not _is_count(values[name]):
            raise ConfigError(f"{path}: expected {name} to be an integer of at least 1, found {values[name]!r}")
    lengths = values["context_lengths"]
    if not isinstance(lengths, list) or len(lengths) != values["requests"] or not all(map(_is_count, lengths)):
        raise ConfigError(f"{path}: expected context_lengths to hold {values['requests']} integers of at least 1")
    arguments = {field.name: values[field.name] for field in fields(TraceHeader)}
    return TraceHeader(**arguments | {"context_lengths": tuple(lengths)})


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _pack(selections: NDArray[np.int32]) -> bytes:
    requests, _steps, layers, _k = selections.shape
    series = (selections[request, :, layer] for request in range(requests) for layer in range(layers))
    packed = [_to_varints(stream) for stream in _changes(series)]
    return b"".join(_to_varints(np.array([len(stream)])) + stream for stream in packed)


def _changes(series: Iterable[NDArray[np.int32]]) -> tuple[Integers, ...]:
    """Returns the five streams of all [steps, k] series."""
    streams: list[list[Integers]] = [[] for _ in range(STREAMS)]
    for steps in series:
        previous = np.empty(0, dtype=np.int64)
        for padded in steps:
            current = padded[padded != EMPTY].astype(np.int64)
            if (np.diff(current) <= 0).any():
                raise ConfigError("the positions of a selection must be ascending and distinct")
            removed = np.flatnonzero(~np.isin(previous, current, assume_unique=True))
            added = np.setdiff1d(current, previous, assume_unique=True)
            counts = np.array([len(removed)]), np.array([len(added)])
            for stream, values in zip(
                streams, (*counts, _to_gaps(removed), added[:1], np.diff(added) - 1), strict=True
            ):
                stream.append(values)
            previous = current
    return tuple(np.concatenate(stream) for stream in streams)


def _to_gaps(ascending: Integers) -> Integers:
    """Returns the first value, then the differences between adjacent values, minus 1."""
    return np.concatenate((ascending[:1], np.diff(ascending) - 1))


def _unpack(path: Path, body: bytes, header: TraceHeader) -> NDArray[np.int32]:
    try:
        return _replay(_split_streams(body), header)
    except (IndexError, ValueError, MemoryError) as error:
        raise ConfigError(f"{path}: the body does not hold the {header.shape} selections of its header") from error


def _split_streams(body: bytes) -> list[Integers]:
    streams, offset = [], 0
    for _ in range(STREAMS):
        start = offset
        while body[start] >= 0x80:
            start += 1
        start += 1
        size = int(_from_varints(body[offset:start])[0])
        offset = start + size
        streams.append(_from_varints(body[start:offset]))
    return streams


def _replay(streams: list[Integers], header: TraceHeader) -> NDArray[np.int32]:
    removed, added, ranks, firsts, gaps = streams
    if len(removed) != header.requests * header.layers * header.steps:
        raise ValueError("the number of selections does not match the header")
    out = np.full(header.shape, EMPTY, dtype=np.int32)
    next_rank = next_first = next_gap = number = 0
    for request in range(header.requests):
        for layer in range(header.layers):
            positions = np.empty(0, dtype=np.int64)
            for step in range(header.steps):
                num_removed, num_added = int(removed[number]), int(added[number])
                number += 1
                if num_removed:
                    rank_gaps = ranks[next_rank : next_rank + num_removed]
                    positions = np.delete(positions, np.cumsum(rank_gaps + 1) - 1)
                    next_rank += num_removed
                if num_added:
                    increments = np.concatenate(([firsts[next_first]], gaps[next_gap : next_gap + num_added - 1] + 1))
                    positions = np.sort(np.concatenate((positions, np.cumsum(increments))))
                    next_first, next_gap = next_first + 1, next_gap + num_added - 1
                if len(positions) and positions[-1] >= header.context_lengths[request] + step:
                    raise ValueError("a position is outside of the context")
                out[request, step, layer, : len(positions)] = positions
    if (number, next_rank, next_first, next_gap) != (len(removed), len(ranks), len(firsts), len(gaps)):
        raise ValueError("the streams have unused values")
    return out


def _to_varints(values: Integers) -> bytes:
    """Encodes as unsigned LEB128: seven bits per byte, lowest first; the top bit is set if another byte follows."""
    shifted = values[:, None] >> (7 * np.arange(MAX_VARINT_BYTES))  # [values, bytes]
    continues = (shifted >> 7) > 0
    present = np.concatenate((np.ones((len(values), 1), dtype=bool), continues[:, :-1]), axis=1)
    return bytes(((shifted & 0x7F) | (continues << 7))[present].astype(np.uint8))


def _from_varints(raw: bytes) -> Integers:
    octets = np.frombuffer(raw, dtype=np.uint8).astype(np.int64)
    if not len(octets):
        return octets
    ends = np.flatnonzero(octets < 0x80)
    if not len(ends) or ends[-1] != len(octets) - 1:
        raise ValueError("a varint is truncated")
    starts = np.concatenate(([0], ends[:-1] + 1))
    byte_index = np.arange(len(octets)) - np.repeat(starts, ends - starts + 1)
    if byte_index.max() >= MAX_VARINT_BYTES:
        raise ValueError("a varint is too long")
    return np.add.reduceat((octets & 0x7F) << (7 * byte_index), starts)
