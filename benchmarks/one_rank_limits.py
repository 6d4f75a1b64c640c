"""What one rank must read, multiply and send: bytes of a decode step, products of a prefill, traffic between GPUs.

Times follow from rates that are measured in the same run (`measure_rates`), except for the links between GPUs, of which
one GPU has none.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from gpu_timing import copy_bandwidth, matrix_rate, seconds_of
from one_rank_model import CollectiveCall, WeightBytes
from torch.nn import functional as F

from hotset.kernels.fast_path import kernels_of
from hotset.kernels.fp8 import Fp8Weight
from hotset.kernels.quantise import quantise
from hotset.memory.device_pool import KvShape
from hotset.models.spec import MlaSpec, ModelSpec
from hotset.models.split import Split

NVLINK_BYTES_PER_S = 450e9  # of one H200, in each direction

ProductType = Literal["fp8", "bf16", "fp32"]


@dataclass(frozen=True, slots=True)
class Rates:
    """What the GPU reaches in this run."""

    copy: float  # bytes per second, read plus written
    fp8: float  # FLOP per second of a large matrix product
    bf16: float
    fp32: float

    def of(self, kind: ProductType) -> float:
        return {"fp8": self.fp8, "bf16": self.bf16, "fp32": self.fp32}[kind]


def measure_rates() -> Rates:
    return Rates(copy_bandwidth(), _fp8_rate(), matrix_rate(), matrix_rate(torch.float32))


def _fp8_rate() -> float:
    """Returns the FLOP per second of the library's product of activations and weights in fp8, without quantisation."""
    size = 8192
    product = partial(F.scaled_mm, **fp8_operands(size, torch.device("cuda")), output_dtype=torch.bfloat16)
    return 2 * size**3 / seconds_of([product], cold=False)


def fp8_operands(size: int, device: torch.device) -> dict[str, Any]:
    """Returns the arguments with which a linear layer of `size` x `size` random weights calls the library."""
    weight = Fp8Weight.empty((size, size), device)
    weight.codes.copy_(torch.randn(size, size, device=device))
    weight.scales.fill_(1.0)
    x = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    operands: dict[str, Any] = kernels_of("linear", "triton_fp8").library_arguments(quantise(x), weight)
    return operands


def step_bytes(
    shape: KvShape, weights: WeightBytes, *, requests: int, context: int, used_experts: float
) -> dict[str, float]:
    """Returns the bytes that a decode step must read.

    `used_experts` is the share of the rank's routed experts that the tokens of the step use.
    """
    assert shape.key is not None
    return {
        "weights": weights.total - weights.embedding - (1 - used_experts) * weights.experts,
        "index keys": float(requests * context * shape.key.row_bytes * shape.groups),
        "rows": float(requests * min(context, shape.topk) * shape.row.row_bytes * shape.layers),
    }


@dataclass(frozen=True, slots=True)
class Product:
    """The matrix products of one kind in a prefill, on one rank."""

    name: str
    kind: ProductType
    flops: float


def prefill_products(spec: ModelSpec, split: Split, tokens: int) -> list[Product]:
    """Returns the products that compute a prompt of `tokens` tokens on one rank.

    With data parallelism every rank computes a prompt of its own, and its experts receive the tokens of all ranks. The
    router is counted for the rank's own tokens, because each token must be routed once, wherever that happens.
    """
    assert isinstance(spec.attention, MlaSpec)
    mla, index, moe, hidden = spec.attention, spec.attention.index, spec.moe, spec.hidden
    heads = len(split.tp_shard(mla.heads))
    dense: ProductType = "fp8" if spec.fp8_weights else "bf16"
    down = hidden * (mla.q_lora_rank + mla.kv_lora_rank + mla.rope_dim)
    up = mla.q_lora_rank * heads * (mla.nope_dim + mla.rope_dim)
    projections = spec.layers * (down + up + heads * mla.v_dim * hidden)
    indexers = len(index.full_layers) * index.head_dim * (index.heads * mla.q_lora_rank + hidden)
    absorbed = spec.layers * heads * mla.kv_lora_rank * (mla.nope_dim + mla.v_dim)
    rows = sum(min(position + 1, index.topk) for position in range(tokens))
    attention = spec.layers * rows * heads * (2 * mla.kv_lora_rank + mla.rope_dim)
    scores = len(index.full_layers) * tokens * (tokens + 1) // 2 * index.heads * index.head_dim
    head_weights = len(index.full_layers) * index.heads * hidden
    products = [
        Product("attention projections", dense, 2.0 * tokens * projections),
        Product("indexer projections", dense, 2.0 * tokens * indexers),
        Product("absorbed kv_b", "bf16", 2.0 * tokens * absorbed),
        Product("sparse attention", "bf16", 2.0 * attention),
        Product("index scores", "bf16", 2.0 * scores),
        Product("head weights", "fp32", 2.0 * tokens * head_weights),
        Product("LM head", "bf16", 2.0 * hidden * split.vocabulary_shard_size(spec.vocab)),
    ]
    moe_layers = len(moe.layers) if moe else 0
    mlp = (spec.layers - moe_layers) * len(split.tp_shard(spec.mlp_width))
    products.append(Product("dense MLP", dense, 6.0 * tokens * hidden * mlp))
    if moe is not None:
        shared = len(split.tp_shard(moe.width * moe.shared))
        pairs = tokens * split.dp_size * moe.experts_per_token * len(split.experts(moe.experts)) / moe.experts
        products += [
            Product("shared experts", dense, 6.0 * tokens * hidden * moe_layers * shared),
            Product("routed experts", dense, 6.0 * pairs * hidden * moe_layers * moe.width),
            Product("router", "fp32", 2.0 * tokens * hidden * moe_layers * moe.experts),
        ]
    return products


def link_bytes(calls: Iterable[CollectiveCall]) -> dict[str, float]:
    """Returns the bytes that each rank sends, and as many that it receives, by the kind of collective."""
    totals: dict[str, float] = defaultdict(float)
    for call in calls:
        totals[call.name] += call.link_bytes
    return dict(totals)


def link_seconds(calls: Iterable[CollectiveCall]) -> float:
    """Returns the time that the bytes of these calls take on the links between GPUs, without any latency."""
    return sum(link_bytes(calls).values()) / NVLINK_BYTES_PER_S
