"""The cost model agrees with measured steps, and its parts agree with independent counts."""

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from hotset.lab.plan.costs import MISS_RATES, RankCosts, miss_rate
from hotset.lab.plan.gpus import H200
from hotset.lab.plan.model_configs import find_config
from hotset.lab.plan.products import product_rates, prompt_work
from hotset.models.decoder import worker_kv_shape
from hotset.models.model_tensors import embedding_bytes, routed_expert_bytes, worker_weight_bytes
from hotset.models.spec import AS_COMPUTED, KvStorage
from hotset.models.split import WHOLE_MODEL, Split

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from decode_figures import Figure, read_figures

FP8 = KvStorage(fp8_rows=True, fp8_keys=True)


def costs_of(model: str, split: Split = WHOLE_MODEL, storage: KvStorage = AS_COMPUTED) -> RankCosts:
    spec = find_config(model).spec
    shape = worker_kv_shape(spec, torch.bfloat16, storage, split)
    return RankCosts(spec, split, shape, H200, 2 * shape.topk, 2)


@pytest.mark.parametrize("figure", read_figures(), ids=lambda f: f"{f.model}-{f.context}-{f.requests}")
def test_tokens_per_second_are_within_15_percent_of_the_benchmarks(figure: Figure) -> None:
    step = figure.predicted()
    # The benchmark of one rank simulated the links between GPUs.
    predicted = figure.requests / (step.seconds - step.links_s)
    assert predicted == pytest.approx(figure.tokens_per_s, rel=0.15)


@pytest.mark.parametrize(("model", "seconds"), [("deepseek-v3.2", 8.31), ("glm-5.2", 6.38)])
def test_a_prompt_of_32k_takes_about_as_long_as_on_one_rank_of_eight(model: str, seconds: float) -> None:
    costs = costs_of(model, Split(dp_size=8), FP8)
    assert costs.prefill_seconds(0, 32768) == pytest.approx(seconds, rel=0.15)


def test_chunks_of_a_prompt_add_up_to_the_whole_prompt() -> None:
    for model in ("deepseek-v3.2", "qwen3-8b"):
        spec, bounds = find_config(model).spec, (0, 1000, 2048, 5001, 9000)
        chunks = [prompt_work(spec, *pair) for pair in pairwise(bounds)]
        for rate in product_rates(spec, Split()):
            if rate.name != "LM head":  # computed once for each chunk
                assert sum(map(rate.flops, chunks)) == pytest.approx(rate.flops(prompt_work(spec, 0, 9000))), rate.name


def test_selected_rows_of_a_prompt_are_counted_token_by_token() -> None:
    spec = find_config("deepseek-v3.2").spec
    heads, width = 128, 2 * 512 + 64
    for first, last in ((0, 100), (1500, 3000), (4000, 4100)):
        rows = sum(min(position + 1, 2048) for position in range(first, last))
        (rate,) = (rate for rate in product_rates(spec, Split()) if rate.name == "sparse attention")
        assert rate.flops(prompt_work(spec, first, last)) == 2 * 61 * rows * heads * width


def test_miss_rates_are_the_published_ones_and_fall_with_the_size_of_the_buffer() -> None:
    for size, rate in MISS_RATES.items():
        assert miss_rate(size) == pytest.approx(rate)
    rates = [miss_rate(size / 10) for size in range(5, 160)]
    assert rates == sorted(rates, reverse=True) and max(rates) <= 1


def test_a_step_copies_the_missing_rows_of_tiered_requests_only() -> None:
    costs = costs_of("glm-5.2", Split(dp_size=8), FP8)
    resident, tiered = costs.decode(10, 32768), costs.decode(10, 32768, tiered=4)
    assert (resident.swap_bytes, resident.missed_rows) == (0, 0)
    assert tiered.missed_rows == pytest.approx(4 * 78 * 2048 * 0.134)
    assert tiered.swap_bytes == pytest.approx(tiered.missed_rows * 656)
    assert tiered.seconds - tiered.swap_s == pytest.approx(resident.seconds)
    assert 0 < tiered.bus_share < 1


def test_experts_that_no_token_uses_are_not_read() -> None:
    spec, split = find_config("dsa-50b").spec, Split()
    layers, experts, used, width = 40, 64, 6, 1536
    assert routed_expert_bytes(spec, split, 2) == layers * experts * 3 * 4096 * width * 2
    assert routed_expert_bytes(spec, Split(dp_size=8), 2) == routed_expert_bytes(spec, split, 2) // 8
    assert embedding_bytes(spec, split, 2) == 32768 * 4096 * 2
    read = worker_weight_bytes(spec, split, 2) - embedding_bytes(spec, split, 2)
    step = costs_of("dsa-50b").decode(1, 1024)
    unused = routed_expert_bytes(spec, split, 2) * (1 - used / experts)
    assert step.weights_s == pytest.approx((read - unused) / (4.8e12 * 0.85))


def test_tensor_parallel_ranks_divide_weights_and_attention_and_wait_for_links() -> None:
    one, eight = costs_of("llama-3.3-70b"), costs_of("llama-3.3-70b", Split(tp_size=8))
    alone, split = one.decode(16, 8192), eight.decode(16, 8192)
    assert split.weights_s == pytest.approx(alone.weights_s / 8, rel=0.01)
    assert split.attention_s == pytest.approx(alone.attention_s / 8)
    assert (alone.links_s, split.links_s > 0) == (0, True)


def test_tensor_parallel_ranks_divide_no_rows_no_index_keys_and_no_indexer() -> None:
    one, eight = (costs_of("deepseek-v3.2", split, FP8) for split in (Split(), Split(tp_size=8)))
    alone, split = one.decode(16, 65536, 16), eight.decode(16, 65536, 16)
    assert (split.swap_bytes, split.bus_s) == (alone.swap_bytes, alone.bus_s)
    assert split.keys_s == alone.keys_s
    assert split.attention_s == pytest.approx(alone.attention_s / 8)
    spec = find_config("deepseek-v3.2").spec
    whole, shard = (
        {rate.name: rate for rate in product_rates(spec, split) if rate.name in ("index scores", "indexer projections")}
        for split in (Split(), Split(tp_size=8))
    )
    assert len(whole) == 2 and whole == shard


def test_collectives_of_a_chunk_carry_as_many_rows_of_each_rank_as_the_longest_has() -> None:
    spec, moe_layers, hidden = find_config("deepseek-v3.2").spec, 58, 7168
    costs = costs_of("deepseek-v3.2", Split(dp_size=8), FP8)
    of_others = 7 * 1024 * hidden * 2  # bytes that a rank receives in one all_gather, or in one reduce_scatter
    links_s = 2 * moe_layers * (of_others / 450e9 + 20e-6)
    for chunks, decodes in (([(0, 1024)], 0), ([(5000, 5500), (0, 500)], 24)):
        products = sum(costs.prefill_seconds(*chunk, 1 / 8) for chunk in chunks)
        assert costs.prompt_step_seconds(chunks, 1 / 8, decodes) == pytest.approx(products + links_s)
    assert spec.moe is not None and len(spec.moe.layers) == moe_layers
    # A prompt of a few tokens takes as long as it takes to read the weights.
    assert costs.prompt_step_seconds([(0, 4)]) == costs.decode_rates(4).fixed_s > 3 * costs.prefill_seconds(0, 4)


def test_a_bus_of_half_the_speed_is_busy_for_twice_as_long() -> None:
    spec, split = find_config("deepseek-v3.2").spec, Split(dp_size=8)
    shape = worker_kv_shape(spec, torch.bfloat16, FP8, split)
    fast, slow = (
        RankCosts(spec, split, shape, replace(H200, bus_gb_per_s=speed), 4096, 2).decode(32, 32768, 32)
        for speed in (64.0, 32.0)
    )
    assert slow.bus_s == pytest.approx(2 * fast.bus_s)
    assert slow.seconds - fast.seconds == pytest.approx(fast.swap_s)


@pytest.mark.parametrize("name", ["glm-5.2", "qwen3-8b"])
def test_rates_of_decode_steps_give_the_times_of_decode_steps(name: str) -> None:
    spec, split = find_config(name).spec, Split()
    shape = worker_kv_shape(spec, torch.bfloat16, KvStorage(), split)
    costs = RankCosts(spec, split, shape, H200, 4096 if name == "glm-5.2" else 0, 2)
    for requests, context, tiered in ((1, 100.0, 0), (7, 5000.5, 3), (64, 2048.0, 64)):
        tiered = tiered if name == "glm-5.2" else 0
        rates = costs.decode_rates(requests)
        seconds = rates.fixed_s + rates.seconds(context, tiered)
        assert seconds == pytest.approx(costs.decode(requests, context, tiered).seconds, rel=1e-9)
