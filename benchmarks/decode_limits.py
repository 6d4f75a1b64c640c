"""The bytes that one rank must read and send in a decode step, and the rates of this GPU.

Times follow from rates that are measured in the same run (`measure_rates`). The rate of links between GPUs is NVLink's
published one, because a single GPU has no links.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from decode_server import CollectiveCall, WeightBytes
from gpu_timing import copy_bandwidth, matrix_rate, seconds_of
from torch.nn import functional as F

from hotset.kernels.fast_path import kernels_of
from hotset.kernels.fp8 import SCALE_BLOCK, Fp8Weight
from hotset.kernels.quantise import QuantisedTokens
from hotset.memory.device_pool import KvShape
from hotset.models.formats.weight_format import ProductType

NVLINK_BYTES_PER_S = 450e9  # of one H200, in each direction


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates that the GPU reaches in this run."""

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
    codes = torch.randn(size, size, device=device).to(weight.codes.dtype)
    x = QuantisedTokens(codes, torch.ones(size // SCALE_BLOCK, size, device=device).t())
    operands: dict[str, Any] = kernels_of("linear", "triton_fp8").library_arguments(x, weight)
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


def link_bytes(calls: Iterable[CollectiveCall]) -> dict[str, float]:
    """Returns the bytes that each rank sends, by the kind of collective. Each rank receives as many."""
    totals: dict[str, float] = defaultdict(float)
    for call in calls:
        totals[call.name] += call.link_bytes
    return dict(totals)


def link_seconds(calls: Iterable[CollectiveCall]) -> float:
    """Returns the time that the bytes of these calls take on the links between GPUs, without any latency."""
    return sum(link_bytes(calls).values()) / NVLINK_BYTES_PER_S
