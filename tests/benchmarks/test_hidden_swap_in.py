"""The measurements of hidden_swap_in.py are correct at a small size, on a CPU."""

import argparse
from collections import Counter
from dataclasses import replace

import hidden_swap_in
import pytest
import torch
from decode_server import load_spec
from test_decode import small_spec

from hotset.kernels.swap_in import RowCopies, SwapPlan, cuda_impl
from hotset.models.attention.dsa_spec import MlaSpec
from hotset.tiers.hot_buffers import HotBuffers

CPU = torch.device("cpu")
CONTEXT = 1024


@pytest.mark.parametrize("share", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_same_requests_decode_with_copies_in_order_and_without_misses(
    share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"CHUNK": 256, "SEATS": 16, "ANSWER": 64, "WARM_UP_STEPS": 2}.items():
        monkeypatch.setattr(hidden_swap_in, name, value)
    monkeypatch.setattr(hidden_swap_in, "SETTLING_STEPS", 2)
    monkeypatch.setattr(hidden_swap_in, "HIDDEN_BARS", {CONTEXT: -1e9})
    monkeypatch.setattr(hidden_swap_in, "SPEED_BARS", {CONTEXT: 1e9})
    prefetch, copy = HotBuffers.prefetch, HotBuffers.copy
    copied: Counter[str] = Counter()

    def counted_prefetch(hot: HotBuffers, layer: int, swap: SwapPlan) -> torch.cuda.Event | None:
        copied["beside other kernels"] += 1
        return prefetch(hot, layer, swap)

    def counted_copy(hot: HotBuffers, layer: int, swap: SwapPlan) -> None:
        copied["in all"] += 1
        copy(hot, layer, swap)

    monkeypatch.setattr(HotBuffers, "prefetch", counted_prefetch)
    monkeypatch.setattr(HotBuffers, "copy", counted_copy)
    options = argparse.Namespace(contexts=[CONTEXT], copies=["16x128"], device_gib=0.0021, host_gib=0.004, steps=3)
    options.share = share
    spec = small_spec()
    assert isinstance(spec.attention, MlaSpec)
    index = replace(spec.attention.index, full_layers=tuple(range(0, spec.layers, share)))
    shared = replace(spec, attention=replace(spec.attention, index=index))
    rows = hidden_swap_in.measure_all(hidden_swap_in.load_rank(shared, CPU, torch.float32), options)
    off, auto = rows
    assert (off["tiers"], auto["tiers"], auto["copies"]) == ("off", "auto", "16x128")
    assert off["requests"] < auto["requests"] and auto["no misses ms"] > 0
    shown = auto["in order ms"] - auto["no misses ms"]
    assert auto["hidden"] == pytest.approx((auto["in order ms"] - auto["step ms"]) / shown)
    if share > 1:
        assert 0 < copied["beside other kernels"] < copied["in all"]
    else:
        assert not copied["in all"] and auto["hidden"] == 0
    hidden, speed = hidden_swap_in.bars(rows)
    assert hidden.met and not speed.met


def test_copies_get_the_given_blocks_and_threads_only_within_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(cuda_impl, "_launch_copy", lambda *_, early, tuning: launched.append(tuning))
    rows, entries = torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.int64)
    copies = RowCopies(entries, entries, torch.ones(1, dtype=torch.int32))
    with hidden_swap_in.copies_by("32x64"):
        cuda_impl.copy(copies, rows, rows)
    cuda_impl.copy(copies, rows, rows)
    given, tuned = launched
    assert (given.copy_blocks, given.copy_threads) == (32, 64) and tuned == cuda_impl.TUNED


@pytest.mark.parametrize("text", ["24", "24x", "0x128", "24x1024:", "x128"])
def test_shapes_of_copies_that_are_misspelt_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="16x128"):
        hidden_swap_in.copy_shape(text)
    assert hidden_swap_in.copy_shape("24x1024") == "24x1024"


def test_a_model_with_fewer_layers_has_indexers_in_the_same_layers() -> None:
    spec, whole = (
        load_spec("dsa-50b-dense", layers=10, layers_per_indexer=4),
        load_spec("dsa-50b-dense", layers_per_indexer=1),
    )
    assert isinstance(spec.attention, MlaSpec) and isinstance(whole.attention, MlaSpec)
    assert (spec.layers, spec.attention.index.full_layers) == (10, (0, 4, 8))
    assert (whole.layers, len(whole.attention.index.full_layers)) == (40, 40)
