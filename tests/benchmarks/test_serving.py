"""serving.py, with a shared prefix, hidden_swap_in.py and few_requests.py measure what they say, at a small size and on
a CPU."""

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import few_requests
import hidden_swap_in
import pytest
import serving
import torch
from decode_load import max_requests_with_prefix
from serving import ServingMemory, max_requests, measure
from serving_report import REUSE, reuse_rows
from step_profile import KernelRun
from test_one_rank import small_spec

from hotset.base.config import EngineConfig
from hotset.engine.sizing import KvBudget, hot_slots
from hotset.kernels.swap_in import RowCopies, SwapPlan, cuda_impl
from hotset.models.attention.dsa_spec import MlaSpec
from hotset.models.decoder import Decoder, worker_kv_shape
from hotset.models.spec import KvStorage
from hotset.tiers.hot_buffers import HotBuffers

CPU = torch.device("cpu")
CONTEXT, SHARED = 1024, 896
FP8 = KvStorage(fp8_rows=True, fp8_keys=True)


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """Replaces what needs a GPU, and makes everything small."""
    small = {"CUDA": CPU, "DTYPE": torch.float32, "CHUNK": 256, "SEATS": 16, "ANSWER": 64, "WARM_UP_STEPS": 2}
    for name, value in small.items():
        monkeypatch.setattr(serving, name, value)
    monkeypatch.setattr(serving, "graph_seconds", lambda *_: 1e-3)
    monkeypatch.setattr(serving, "gather_seconds", lambda *_: 0.0)
    monkeypatch.setattr(serving, "copy_bandwidth", lambda: 1e12)
    return Decoder(small_spec(), serving.CountedWeights(torch.float32, CPU), FP8)


def test_more_requests_decode_at_once_if_they_share_a_prefix(decoder: Decoder) -> None:
    options = argparse.Namespace(contexts=[CONTEXT], device_gib=0.0021, host_gib=0.00255)
    memory = ServingMemory.make(decoder, options)
    setup = memory.setup(decoder, 1000, "auto")
    fit, most = max_requests(setup, CONTEXT), max_requests(setup, CONTEXT, SHARED)
    geometry = setup.budget.geometry
    assert fit < most and most * geometry.tiered_pages(CONTEXT) > setup.budget.device_pages, "keys must be shared, too"
    (without,) = measure(setup, CONTEXT, [fit], 2)
    reused = measure(setup, CONTEXT, [fit, most], 2, SHARED)
    assert [row["requests"] for row in reused] == [fit, most] and reused[1]["tiered"] == most
    rows = [{"model": "small", "tiers": "auto"} | without]
    rows += [{"model": "small", "tiers": REUSE} | row for row in reused]
    (compared,) = reuse_rows(rows)
    best = max(reused, key=lambda row: row["tokens/s"])
    assert compared["requests, auto"] == fit and compared["requests, reuse"] == best["requests"]
    assert compared["tokens/s, ratio"] == best["tokens/s"] / without["tokens/s"]


@pytest.mark.parametrize("share", [1, 2])
def test_the_same_requests_decode_with_copies_in_order_and_without_misses(
    decoder: Decoder, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    spec = decoder.spec
    assert isinstance(spec.attention, MlaSpec)
    index = replace(spec.attention.index, full_layers=tuple(range(0, spec.layers, share)))
    shared = replace(spec, attention=replace(spec.attention, index=index))
    decoder = Decoder(shared, serving.CountedWeights(torch.float32, CPU), FP8)
    rows = hidden_swap_in.measure_all(decoder, 1000, options)
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


def test_contexts_of_128k_that_share_96k_fit_more_than_twice_as_often() -> None:
    spec = serving.load_spec("dsa-50b", 1)
    assert isinstance(spec.attention, MlaSpec)
    shape = worker_kv_shape(spec, torch.bfloat16, FP8)
    geometry = shape.geometry(64, hot_slots(EngineConfig(), shape.topk))
    gib, tokens = 1 << 30, 131072 + 512
    budget = KvBudget(geometry, 16 * gib // geometry.page_bytes, 80 * gib // (64 * shape.token_bytes), tokens)
    assert budget.requests(tokens) == 20
    shared = max_requests_with_prefix(budget, tokens, 98304)
    keys, rows = geometry.whole_key_pages(98304), 98304 // 64
    assert keys + shared * (geometry.tiered_pages(tokens) - keys) <= budget.device_pages
    assert rows + shared * (geometry.row_pages(tokens) - rows) <= budget.host_pages
    assert shared > 50


def test_copies_get_the_given_blocks_and_threads_and_later_their_own_again(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_some_layers_of_the_model_select_as_all_of_them_do() -> None:
    spec, whole = hidden_swap_in.load_layers(10, 4), hidden_swap_in.load_layers(None, 1)
    assert isinstance(spec.attention, MlaSpec) and isinstance(whole.attention, MlaSpec)
    assert (spec.layers, spec.attention.index.full_layers) == (10, (0, 4, 8))
    assert (whole.layers, len(whole.attention.index.full_layers)) == (40, 40)


def test_a_layer_of_one_request_is_shown_kernel_by_kernel(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [("score", 0, 5), ("select_best", 6, 18), ("attend", 20, 27), ("_few_tokens_kernel", 28, 37)]
    starts = [100 * n for n in range(5)]
    runs = [KernelRun(name, start + first, start + last) for start in starts for name, first, last in layers]

    def profiled(work: Callable[[], object]) -> list[KernelRun]:
        work()
        return runs

    monkeypatch.setattr(few_requests, "profiled", profiled)
    options = argparse.Namespace(contexts=[CONTEXT], device_gib=0.0021, host_gib=0.004, requests=[1, 2], steps=3)
    tables = few_requests.measure_all(decoder, 10_000_000, options)
    assert [row["requests"] for row in tables["Steps"]] == [1, 2]
    assert all(row["step / bytes"] > 0 for row in tables["Steps"])
    kernels = [(row["kernel"], row["start us"], row["us"], row["group"]) for row in tables["Layer"]]
    assert kernels == [
        ("score", 0, 5, "indexer"),
        ("select_best", 6, 12, "indexer"),
        ("attend", 20, 7, "attention"),
        ("_few_tokens_kernel", 28, 9, "linear"),
    ]
    groups = {row["group"]: row["ms"] for row in tables["Groups"]}
    assert groups["indexer"] == pytest.approx(5 * 17 / 1e3 / few_requests.PROFILED_STEPS)
    assert [row["verdict"] for row in tables["Bars"]] == ["MISSED"]  # the small model's bytes would take 10 us
