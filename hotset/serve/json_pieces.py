"""Writes long JSON bodies in pieces, so that only the piece that is being sent exists."""

from collections.abc import Iterator

from pydantic import BaseModel
from pydantic_core import to_json

PIECE_BYTES = 1 << 16


def json_pieces(body: BaseModel) -> Iterator[bytes]:
    """Yields the bytes of `body.model_dump_json()` in pieces. Each has at least PIECE_BYTES, but the last may have
    fewer. Iterators in the body are read only as far as they are written."""
    piece = bytearray()
    for part in _parts(body):
        piece += part
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)


def _parts(value: object) -> Iterator[bytes]:
    if isinstance(value, BaseModel):
        separator = b"{"
        for name, field in type(value).model_fields.items():
            item = getattr(value, name)
            if field.exclude_if is None or not field.exclude_if(item):
                yield separator + to_json(name) + b":"
                yield from _parts(item)
                separator = b","
        yield b"}"
    elif isinstance(value, Iterator):
        separator = b"["
        for item in value:
            yield separator
            yield from _parts(item)
            separator = b","
        yield b"]" if separator == b"," else b"[]"
    else:
        yield to_json(value, inf_nan_mode="null")
