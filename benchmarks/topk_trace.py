"""The trace file: which rows a sparse-attention model selected, step by step, small enough to ship.

A file is, in this order (integers little-endian):

    8 bytes    magic, b"HOTSTOPK"
    uint32     version, 1
    uint32     bytes of the header
    header     JSON: model, layers, k, requests, steps, context_lengths, page_rows, recorded, body_bytes, body_crc32
    body       LZMA (xz); unpacked it is `body_bytes` long and has the checksum `body_crc32`

The body takes the selections of one request and layer after another, steps in order. Adjacent steps overlap, so each
step is the change from the step before it (the first: from nothing). Five streams of unsigned LEB128 varints stand one
behind the other, each preceded by its length in bytes as a varint:

    removed    per step: how many positions of the step before are gone
    added      per step: how many positions are new
    ranks      the gone ones, as ranks among the ascending positions of the step before: first rank, then gaps - 1
    firsts     the lowest new position of each step that has one
    gaps       the distance from each further new position to the one below it, - 1

At step s the query of request r is the newest of `context_lengths[r] + s` rows. A context shorter than k selects fewer
than k positions; in memory the rest is EMPTY.
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
VARINT_MOST_BYTES = 5  # positions are below 2**31

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What the selections are of."""

    model: str
    layers: int
    k: int
    requests: int
    steps: int
    context_lengths: tuple[int, ...]  # per request: rows that its first step could choose from, its own included
    page_rows: int
    recorded: dict[str, Any] = field(default_factory=dict)  # how: command, date, device, sampling; for people

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.requests, self.steps, self.layers, self.k


@dataclass(frozen=True, slots=True)
class TopkTrace:
    """Selections with what they are of."""

    header: TraceHeader
    selections: NDArray[np.int32]  # [requests, steps, layers, k] ascending positions, then EMPTY

    def chosen(self, request: int, step: int, layer: int) -> NDArray[np.int32]:
        """The ascending positions of one selection, without padding."""
        row = self.selections[request, step, layer]
        present: NDArray[np.int32] = row[row != EMPTY]
        return present


def write_trace(path: Path, trace: TopkTrace) -> None:
    """Writes the file, over what was there. The selections must be ascending, distinct and EMPTY-padded."""
    header, selections = trace.header, trace.selections
    assert selections.shape == header.shape, f"{selections.shape} is not the {header.shape} of the header"
    assert len(header.context_lengths) == header.requests, "a context length per request"
    body = _pack(selections)
    about = asdict(header) | {"body_bytes": len(body), "body_crc32": zlib.crc32(body)}
    text = json.dumps(about).encode()
    path.write_bytes(PREFIX.pack(MAGIC, VERSION, len(text)) + text + lzma.compress(body))


def read_trace(path: Path) -> TopkTrace:
    """Reads a file that `write_trace` wrote. ConfigError, naming the file and what was expected, for any other."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: the top-k trace cannot be read: {error.strerror}") from error
    about, body_at = _read_about(path, raw)
    header = _make_header(path, about)
    try:
        body = lzma.decompress(raw[body_at:])
    except lzma.LZMAError as error:
        raise ConfigError(f"{path}: the body of the top-k trace is truncated or damaged: {error}") from error
    if len(body) != about["body_bytes"] or zlib.crc32(body) != about["body_crc32"]:
        raise ConfigError(f"{path}: the body of the top-k trace is not the one that its header describes")
    return TopkTrace(header, _unpack(path, body, header))


def _read_about(path: Path, raw: bytes) -> tuple[dict[str, Any], int]:
    """The header's JSON, and where the body begins."""
    if len(raw) < PREFIX.size or not raw.startswith(MAGIC):
        raise ConfigError(f"{path}: not a top-k trace: expected it to begin with {MAGIC!r}, found {raw[:8]!r}")
    _magic, version, length = PREFIX.unpack_from(raw)
    if version != VERSION:
        raise ConfigError(f"{path}: top-k trace of version {version}; expected version {VERSION}")
    body_at = PREFIX.size + length
    try:
        about = json.loads(raw[PREFIX.size : body_at])
    except ValueError as error:
        raise ConfigError(f"{path}: expected a JSON header of {length} bytes: {error}") from error
    wanted = {each.name for each in fields(TraceHeader)} | {"body_bytes", "body_crc32"}
    if not isinstance(about, dict) or set(about) != wanted:
        raise ConfigError(f"{path}: expected a header with exactly the fields {', '.join(sorted(wanted))}")
    return about, body_at


def _make_header(path: Path, about: dict[str, Any]) -> TraceHeader:
    for name in ("layers", "k", "requests", "steps", "page_rows"):
        if not _is_count(about[name]):
            raise ConfigError(f"{path}: expected {name} to be a whole number of at least 1, found {about[name]!r}")
    lengths = about["context_lengths"]
    if not isinstance(lengths, list) or len(lengths) != about["requests"] or not all(map(_is_count, lengths)):
        raise ConfigError(f"{path}: expected context_lengths to hold {about['requests']} whole numbers of at least 1")
    values = {each.name: about[each.name] for each in fields(TraceHeader)}
    return TraceHeader(**values | {"context_lengths": tuple(lengths)})


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _pack(selections: NDArray[np.int32]) -> bytes:
    requests, _steps, layers, _k = selections.shape
    series = (selections[request, :, layer] for request in range(requests) for layer in range(layers))
    packed = [_to_varints(stream) for stream in _changes(series)]
    return b"".join(_to_varints(np.array([len(each)])) + each for each in packed)


def _changes(series: Iterable[NDArray[np.int32]]) -> tuple[Integers, ...]:
    """The five streams of many [steps, k] series."""
    streams: list[list[Integers]] = [[] for _ in range(STREAMS)]
    none = np.empty(0, dtype=np.int64)
    for steps in series:
        before = none
        for row in steps:
            now = row[row != EMPTY].astype(np.int64)
            assert (np.diff(now) > 0).all(), "positions must be ascending and distinct"
            gone = np.flatnonzero(~np.isin(before, now, assume_unique=True))
            new = np.setdiff1d(now, before, assume_unique=True)
            parts = (np.array([len(gone)]), np.array([len(new)]), _spaced(gone), new[:1], np.diff(new) - 1)
            for stream, part in zip(streams, parts, strict=True):
                stream.append(part)
            before = now
    return tuple(np.concatenate(stream) for stream in streams)


def _spaced(ascending: Integers) -> Integers:
    """The first value, then the gaps - 1."""
    return np.concatenate((ascending[:1], np.diff(ascending) - 1))


def _unpack(path: Path, body: bytes, header: TraceHeader) -> NDArray[np.int32]:
    try:
        return _replay(_split_streams(body), header)
    except (IndexError, ValueError, MemoryError) as error:
        raise ConfigError(f"{path}: the body does not hold the {header.shape} selections of its header") from error


def _split_streams(body: bytes) -> list[Integers]:
    streams, at = [], 0
    for _ in range(STREAMS):
        begin = at
        while body[begin] >= 0x80:
            begin += 1
        begin += 1
        size = int(_from_varints(body[at:begin])[0])
        at = begin + size
        streams.append(_from_varints(body[begin:at]))
    return streams


def _replay(streams: list[Integers], header: TraceHeader) -> NDArray[np.int32]:
    removed, added, ranks, firsts, gaps = streams
    if len(removed) != header.requests * header.layers * header.steps:
        raise ValueError("a count per selection")
    out = np.full(header.shape, EMPTY, dtype=np.int32)
    rank_at = first_at = gap_at = number = 0
    for request in range(header.requests):
        for layer in range(header.layers):
            now = np.empty(0, dtype=np.int64)
            for step in range(header.steps):
                gone, new = int(removed[number]), int(added[number])
                number += 1
                if gone:
                    taken = ranks[rank_at : rank_at + gone]
                    now = np.delete(now, np.cumsum(taken + 1) - 1)
                    rank_at += gone
                if new:
                    steps_up = np.concatenate(([firsts[first_at]], gaps[gap_at : gap_at + new - 1] + 1))
                    now = np.sort(np.concatenate((now, np.cumsum(steps_up))))
                    first_at, gap_at = first_at + 1, gap_at + new - 1
                if len(now) and now[-1] >= header.context_lengths[request] + step:
                    raise ValueError("a position past the context")
                out[request, step, layer, : len(now)] = now
    if (number, rank_at, first_at, gap_at) != (len(removed), len(ranks), len(firsts), len(gaps)):
        raise ValueError("values are left over")
    return out


def _to_varints(values: Integers) -> bytes:
    """Unsigned LEB128: seven bits a byte, lowest first; the top bit says that another byte follows."""
    shifts = 7 * np.arange(VARINT_MOST_BYTES)
    parts = values[:, None] >> shifts  # [values, bytes]
    follows = (parts >> 7) > 0
    present = np.concatenate((np.ones((len(values), 1), dtype=bool), follows[:, :-1]), axis=1)
    return bytes(((parts & 0x7F) | (follows << 7))[present].astype(np.uint8))


def _from_varints(raw: bytes) -> Integers:
    octets = np.frombuffer(raw, dtype=np.uint8).astype(np.int64)
    if not len(octets):
        return octets
    ends = np.flatnonzero(octets < 0x80)
    if not len(ends) or ends[-1] != len(octets) - 1:
        raise ValueError("a varint is cut off")
    starts = np.concatenate(([0], ends[:-1] + 1))
    place = np.arange(len(octets)) - np.repeat(starts, ends - starts + 1)
    if place.max() >= VARINT_MOST_BYTES:
        raise ValueError("a varint is too long")
    return np.add.reduceat((octets & 0x7F) << (7 * place), starts)
