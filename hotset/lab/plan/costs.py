"""Predicts the time of a step on a GPU, by a cost model that was fitted to our own benchmarks.

A decode step reads weights, index keys and rows, and copies the rows that hot buffers miss. Each of these terms is a
number of bytes or products, divided by a rate of the GPU, times a coefficient. `COEFFICIENTS` holds all of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hotset.lab.plan.gpus import Gpu
from hotset.lab.plan.products import ProductRate, product_rates, prompt_work
from hotset.memory.device_pool import KvShape
from hotset.models.feed_forward import ROUTED
from hotset.models.model_tensors import embedding_bytes, routed_expert_bytes, worker_weight_bytes
from hotset.models.spec import ModelSpec
from hotset.models.split import Split


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Every measured constant of the cost model."""

    # Shares of a data sheet's rates that are reached on an H200 (docs/benchmarks-kernels.md; swap_in.py).
    copy_share: float = 0.85  # device memory: 4.08 of 4.8 TB/s
    bus_share: float = 0.86  # copies from pinned host memory: 55 of 64 GB/s
    bf16_share: float = 0.77  # large matrix products: 764 of 989 TFLOP/s
    fp8_share: float = 0.60  # the same in fp8: 1195 of 1979 TFLOP/s
    fp32_tflops: float = 50.0  # routers and head weights, which are small
    # Fitted by benchmarks/fit_costs.py to 24 decode steps on an H200, within 8.3 % of each.
    layer_us: float = 113.5  # time of a layer in addition to reading its bytes: small kernels and the gaps between them
    keys: float = 2.33  # scoring and top-k: factor on the time to read the index keys
    attention: float = 5.59  # sparse attention: factor on the time of its products at the rate of large products
    swap_first: float = 1.25  # copies of missing rows in layers that select: factor on the time of their bytes
    swap_shared: float = 0.77  # the same in layers that reuse a selection, whose copies overlap with other work
    # Qwen3-8B, 32 requests of 512 tokens: 7.6 ms per step, 4.0 ms of bytes, 36 layers.
    gqa_layer_us: float = 100.0
    # Factor on the time of a prompt's products. At 32k tokens: 1.95 (DeepSeek-V3.2) and 2.08 (GLM-5.2; one_rank.py).
    prefill: float = 2.0
    # Not measured: we had no machine with several GPUs. A small all-reduce within one GPU takes 7 to 32 us.
    collective_us: float = 20.0


COEFFICIENTS = Coefficients()
# LRU misses by hot slots / top-k, as published for SGLang's HiSparse: GLM-5.1, LongBench v2 at 100k tokens, k = 2048.
MISS_RATES = {1.0: 0.30, 2.0: 0.134, 4.0: 0.067}


def miss_rate(slots_per_topk: float) -> float:
    """Returns the expected share of selected rows that a hot buffer misses.

    Between and beyond the published sizes, the logarithm of the rate is linear in the logarithm of the size.
    """
    sizes = sorted(MISS_RATES)
    upper = next((index for index, size in enumerate(sizes) if size >= slots_per_topk), len(sizes) - 1)
    low, high = sizes[max(0, upper - 1)], sizes[max(1, upper)]
    slope = math.log(MISS_RATES[high] / MISS_RATES[low]) / math.log(high / low)
    return float(min(1.0, MISS_RATES[low] * (slots_per_topk / low) ** slope))


@dataclass(frozen=True, slots=True)
class StepTime:
    """The predicted parts of one decode step, in seconds, and what it copies from the host."""

    weights_s: float
    keys_s: float  # indexer: scores and top-k
    attention_s: float
    layers_s: float  # small kernels
    swap_s: float  # the part of copies from the host for which the step waits
    links_s: float  # collectives between GPUs
    missed_rows: float  # of all requests, in all layers
    swap_bytes: float
    bus_s: float  # the time of these bytes at the speed of a large copy

    @property
    def seconds(self) -> float:
        return self.weights_s + self.keys_s + self.attention_s + self.layers_s + self.swap_s + self.links_s

    @property
    def bus_share(self) -> float:
        """The share of the bus's bandwidth that swap-ins use."""
        return self.bus_s / self.seconds


class DecodeRates(NamedTuple):
    """How the time of a decode step depends on the mean length of its requests, and on how many of them are tiered."""

    fixed_s: float  # weights, small kernels and collectives
    position_s: float  # for each token of the mean length
    selected_s: float  # for each token of the mean length that is selected
    swapped_s: float  # for each selected token and tiered request
    topk: float  # the most tokens that are selected

    def seconds(self, context: float, tiered: int) -> float:
        """Returns the time of a step without `fixed_s`."""
        selected = min(context, self.topk)
        return self.position_s * context + (self.selected_s + self.swapped_s * tiered) * selected


class RankCosts:
    """The costs of one worker, which computes the requests of its replica in the layers of its pipeline stage."""

    def __init__(self, spec: ModelSpec, split: Split, shape: KvShape, gpu: Gpu, slots: int, dtype_bytes: int) -> None:
        self._spec, self._split, self._shape, self._gpu = spec, split, shape, gpu
        rates = COEFFICIENTS
        self._copy = gpu.tb_per_s * 1e12 * rates.copy_share
        self._bus = gpu.bus_gb_per_s * 1e9 * rates.bus_share
        self._flops = {
            "bf16": gpu.bf16_tflops * 1e12 * rates.bf16_share,
            "fp8": max(gpu.bf16_tflops * rates.bf16_share, gpu.fp8_tflops * rates.fp8_share) * 1e12,
            "fp32": rates.fp32_tflops * 1e12,
        }
        self._experts = routed_expert_bytes(spec, split, dtype_bytes)
        self._dense = (
            worker_weight_bytes(spec, split, dtype_bytes) - embedding_bytes(spec, split, dtype_bytes) - self._experts
        )
        layers = split.layer_range(spec.layers)
        self._collectives = 0 if split.size == 1 else 2 * len(layers)  # of one step
        if split.dp_size > 1:
            self._collectives = 2 * len(set(layers) & set(spec.moe.layers)) if spec.moe else 0
        self._miss_rate = miss_rate(slots / shape.topk) if slots else 0.0
        self._row_bytes, self._key_bytes = shape.row.row_bytes, shape.key.row_bytes if shape.key else 0
        self._decode_rates: dict[int, DecodeRates] = {}
        rates_of_prompts = product_rates(spec, split)
        self._routed = self._total_rate([rate for rate in rates_of_prompts if rate.name == ROUTED])
        self._unrouted = self._total_rate([rate for rate in rates_of_prompts if rate.name != ROUTED])

    def decode(self, requests: int, context: float, tiered: int = 0) -> StepTime:
        """Returns the time of a step in which `requests` requests decode one token each. `tiered` of them are tiered.

        `context` is their mean length. The other data parallel ranks are taken to compute as many requests.
        """
        shape, attention, rates = self._shape, self._spec.attention, COEFFICIENTS
        weights_s = (self._dense + self._experts * self._used_experts(requests)) / self._copy
        links_s = self._links_seconds(requests)
        if attention.topk is None:
            rows = requests * context * self._row_bytes * shape.layers
            layers_s = shape.layers * rates.gqa_layer_us * 1e-6
            return StepTime(weights_s, 0.0, rows / self._copy, layers_s, 0.0, links_s, 0.0, 0.0, 0.0)
        keys = requests * context * self._key_bytes * shape.groups
        selected = min(context, attention.topk)
        products = requests * shape.layers * selected * attention.row_flops(self._split)
        missed_rows = tiered * shape.layers * selected * self._miss_rate
        bus_s = missed_rows * self._row_bytes / self._bus
        selecting = shape.groups / shape.layers
        return StepTime(
            weights_s=weights_s,
            keys_s=rates.keys * keys / self._copy,
            attention_s=rates.attention * products / self._flops["bf16"],
            layers_s=shape.layers * rates.layer_us * 1e-6,
            swap_s=bus_s * (rates.swap_first * selecting + rates.swap_shared * (1 - selecting)),
            links_s=links_s,
            missed_rows=missed_rows,
            swap_bytes=missed_rows * self._row_bytes,
            bus_s=bus_s,
        )

    def decode_rates(self, requests: int) -> DecodeRates:
        """Returns the times of `decode` as rates. Each part of a step is constant or proportional to a length."""
        if (known := self._decode_rates.get(requests)) is not None:
            return known
        topk = self._spec.attention.topk
        context = float(topk or 1)
        step = self.decode(requests, context, 1)
        rates = DecodeRates(
            step.weights_s + step.layers_s + step.links_s,
            step.keys_s / context,
            step.attention_s / context,
            step.swap_s / context,
            math.inf if topk is None else topk,
        )
        self._decode_rates[requests] = rates
        return rates

    def prompt_step_seconds(
        self, chunks: Sequence[tuple[int, int]], expert_share: float = 1.0, decodes: int = 0
    ) -> float:
        """Returns the time of a step that computes `chunks`, tokens [first, last) of prompts.

        It takes the products of the chunks, or the time to read the weights if that is longer, and the collectives. The
        latter also carry the tokens of `decodes` requests, which decode beside the chunks. For `expert_share`, see
        `prefill_seconds`.
        """
        tokens = decodes + sum([last - first for first, last in chunks])
        products = sum([self.prefill_seconds(*chunk, expert_share) for chunk in chunks])
        return max(self.decode_rates(tokens).fixed_s, products + self._links_seconds(tokens))

    def prefill_seconds(self, first: int, last: int, expert_share: float = 1.0) -> float:
        """Returns the time of the products of tokens [first, last) of a prompt.

        The experts of this rank receive the prompt tokens of all data parallel ranks. `expert_share` is their number,
        divided by what it would be if every rank had as many as this one.
        """
        work = prompt_work(self._spec, first, last)
        return COEFFICIENTS.prefill * (self._unrouted.flops(work) + expert_share * self._routed.flops(work))

    def _total_rate(self, rates: Sequence[ProductRate]) -> ProductRate:
        """Returns the sum of rates, in seconds instead of operations."""
        seconds = [1 / self._flops[rate.kind] for rate in rates]
        return ProductRate(
            "all",
            "bf16",
            each=sum(rate.each * s for rate, s in zip(rates, seconds, strict=True)),
            token=sum(rate.token * s for rate, s in zip(rates, seconds, strict=True)),
            pair=sum(rate.pair * s for rate, s in zip(rates, seconds, strict=True)),
            selected=sum(rate.selected * s for rate, s in zip(rates, seconds, strict=True)),
        )

    def _used_experts(self, requests: int) -> float:
        """Returns the expected share of this rank's experts that a step uses, if routing is even."""
        if self._spec.moe is None:
            return 0.0
        tokens = requests * self._split.dp_size
        return 1.0 - (1 - self._spec.moe.experts_per_token / self._spec.moe.experts) ** tokens

    def _links_seconds(self, tokens: int) -> float:
        """Returns the time of all-reduces (tensor parallel), or of gathers and scatters for experts (data parallel).

        `tokens` are those of the data parallel rank that has the most: the gathers pad the tokens of the others.
        """
        ranks = self._split.size
        nbytes = self._collectives * tokens * self._spec.hidden * 2 * (ranks - 1.0)
        if self._split.dp_size == 1:
            nbytes *= 2 / ranks
        return nbytes / (self._gpu.link_gb_per_s * 1e9) + self._collectives * COEFFICIENTS.collective_us * 1e-6
