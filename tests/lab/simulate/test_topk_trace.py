"""Trace files survive a round trip, and damaged ones are refused."""

import json
import lzma
import random
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError
from hotset.kernels import EMPTY
from hotset.lab.simulate.recorder import decode, load
from hotset.lab.simulate.topk_trace import MAGIC, TopkTrace, TraceHeader, read_trace, write_trace

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "models" / "demo-dsa"
SHIPPED = ROOT / "data" / "topk" / "demo-dsa.topk"


def make_trace(shape: tuple[int, int, int, int], contexts: tuple[int, ...], seed: int, keep: float) -> TopkTrace:
    """Returns selections in which each step keeps about the share `keep` of the positions of the previous step.

    In contexts shorter than k, all positions are selected, and EMPTY follows them.
    """
    requests, steps, layers, k = shape
    generator = random.Random(seed)
    selections = np.full(shape, EMPTY, dtype=np.int32)
    for request, context in enumerate(contexts):
        for layer in range(layers):
            positions: list[int] = []
            for step in range(steps):
                length = context + step
                kept = {position for position in positions if generator.random() < keep}
                others = [position for position in range(length) if position not in kept]
                positions = sorted(kept | set(generator.sample(others, min(k, length) - len(kept))))
                selections[request, step, layer, : len(positions)] = positions
    return TopkTrace(TraceHeader("synthetic", layers, k, requests, steps, contexts, 4, {"why": "test"}), selections)


SMALL = make_trace((2, 5, 2, 4), (2, 300), seed=0, keep=0.5)


@examples(25)
@given(
    contexts=st.lists(st.integers(1, 400), min_size=1, max_size=3),
    steps=st.integers(1, 6),
    layers=st.integers(1, 3),
    k=st.integers(1, 20),
    keep=st.sampled_from((0.0, 0.5, 1.0)),
    seed=st.integers(0, 1 << 20),
)
def test_a_trace_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    contexts: list[int],
    steps: int,
    layers: int,
    k: int,
    keep: float,
    seed: int,
) -> None:
    path = tmp_path_factory.getbasetemp() / "round.topk"
    trace = make_trace((len(contexts), steps, layers, k), tuple(contexts), seed, keep)
    write_trace(path, trace)
    read = read_trace(path)
    assert read.header == trace.header
    np.testing.assert_array_equal(read.selections, trace.selections)


def test_the_largest_positions_survive(tmp_path: Path) -> None:
    selections = np.array([0, 127, 128, 16384, 2**31 - 2, 2**31 - 1], dtype=np.int32).reshape(1, 1, 1, 6)
    trace = TopkTrace(TraceHeader("synthetic", 1, 6, 1, 1, (2**31,), 64), selections)
    write_trace(tmp_path / "far.topk", trace)
    np.testing.assert_array_equal(read_trace(tmp_path / "far.topk").selections, selections)


def test_selections_that_are_not_ascending_are_not_written(tmp_path: Path) -> None:
    selections = np.array([3, 2], dtype=np.int32).reshape(1, 1, 1, 2)
    with pytest.raises(ConfigError, match="ascending"):
        write_trace(tmp_path / "x.topk", TopkTrace(TraceHeader("synthetic", 1, 2, 1, 1, (9,), 64), selections))


def with_header(raw: bytes, **changes: object) -> bytes:
    """Returns the file with other values in its header. None removes a field."""
    length = struct.unpack_from("<I", raw, 12)[0]
    header = json.loads(raw[16 : 16 + length]) | changes
    text = json.dumps({name: value for name, value in header.items() if value is not None}).encode()
    return raw[:12] + struct.pack("<I", len(text)) + text + raw[16 + length :]


def with_body(raw: bytes, body: bytes) -> bytes:
    length = struct.unpack_from("<I", raw, 12)[0]
    changed = with_header(raw[: 16 + length], body_bytes=len(body), body_crc32=zlib.crc32(body))
    return changed + lzma.compress(body)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda raw: b"", "not a top-k trace"),
        (lambda raw: b"PK\x03\x04" + raw, "not a top-k trace: expected it to begin with b'HOTSTOPK'"),
        (lambda raw: MAGIC + struct.pack("<I", 7) + raw[12:], "version 7; expected version 1"),
        (lambda raw: raw[:40], "expected a JSON header"),
        (lambda raw: raw[:12] + struct.pack("<I", 3000) + b"[" * 3000, "expected a JSON header"),
        (lambda raw: with_header(raw, k=None), "expected a header with exactly the fields"),
        (lambda raw: with_header(raw, colour="red"), "expected a header with exactly the fields"),
        (lambda raw: with_header(raw, steps=0), "expected steps to be an integer of at least 1, found 0"),
        (lambda raw: with_header(raw, layers="two"), "expected layers to be an integer"),
        (lambda raw: with_header(raw, context_lengths=[5]), "expected context_lengths to hold 2"),
        (lambda raw: with_header(raw, steps=6), "the body does not hold"),
        (lambda raw: with_header(raw, steps=4), "the body does not hold"),
        (lambda raw: with_header(raw, k=3), "the body does not hold"),
        (lambda raw: with_header(raw, k=1 << 50), "the body does not hold"),
        (lambda raw: with_header(raw, context_lengths=[1, 300]), "the body does not hold"),
        (lambda raw: with_header(raw, body_crc32=1), "does not match its header"),
        (lambda raw: raw[:-9], "truncated or damaged"),
        (lambda raw: raw[:-60] + b"\0" * 60, "truncated or damaged"),
        (lambda raw: with_body(raw, b""), "the body does not hold"),
        (lambda raw: with_body(raw, b"\xff" * 9), "the body does not hold"),
        (lambda raw: with_body(raw, b"\x01\x01" * 5), "the body does not hold"),
    ],
)
def test_a_damaged_trace_is_refused_with_its_path(tmp_path: Path, damage, expected: str) -> None:
    path = tmp_path / "trace.topk"
    write_trace(path, SMALL)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError) as raised:
        read_trace(path)
    assert expected in str(raised.value)
    assert str(path) in str(raised.value)


def test_each_step_is_recorded_under_its_own_request_and_length() -> None:
    """Contexts shorter than k select all of their rows, so the expected selection of each step is known."""
    steps, lengths = 6, [60, 97, 33]
    config = EngineConfig(
        model=str(MODEL), load_format="dummy", device="cpu", max_num_seqs=3, device_kv_tokens=1024, max_model_len=128
    )
    _files, model, engine = load(config)
    decode(engine, [list(range(5, 5 + length)) for length in lengths], steps, temperature=0.7, seed=0)
    recorded = model.selections(lengths, steps, k=128)
    for request, length in enumerate(lengths):
        for step in range(steps):
            for layer in range(6):
                row = recorded[request, step, layer]
                assert row[row != EMPTY].tolist() == list(range(length + step))


@pytest.mark.slow
def test_the_shipped_trace_has_the_documented_shape_and_size() -> None:
    assert SHIPPED.stat().st_size <= 6_000_000
    trace = read_trace(SHIPPED)
    header = trace.header
    assert header.requests >= 8
    assert header.steps >= 512
    assert (header.layers, header.k, header.page_rows) == (6, 128, 64)
    assert min(header.context_lengths) >= 4096
    assert (trace.selections != EMPTY).all()
    assert (np.diff(trace.selections, axis=-1) > 0).all()
    newest = np.array(header.context_lengths)[:, None] + np.arange(header.steps)
    assert (trace.selections[..., -1] < newest[:, :, None]).all()
