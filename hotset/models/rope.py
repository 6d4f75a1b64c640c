"""Rotary position embedding: the frequencies of each kind of scaling, and the angles of one step."""

import math

import torch
from torch import Tensor

from hotset.kernels.rope import Rotation
from hotset.models.spec import RopeSpec


class Rope:
    """Computes angles in float32 (float64 for a float64 model) and rounds cosines and sines to the model's dtype."""

    def __init__(self, spec: RopeSpec, dtype: torch.dtype, device: torch.device) -> None:
        precision = torch.float64 if dtype == torch.float64 else torch.float32
        self._dtype = dtype
        self._frequencies = inverse_frequencies(spec, precision).to(device)
        self._amplitude = amplitude(spec)

    def at(self, positions: Tensor) -> Rotation:  # [tokens] int64
        angles = positions[:, None, None].to(self._frequencies.dtype) * self._frequencies
        return Rotation(
            (angles.cos() * self._amplitude).to(self._dtype), (angles.sin() * self._amplitude).to(self._dtype)
        )


def inverse_frequencies(spec: RopeSpec, precision: torch.dtype) -> Tensor:
    exponents = torch.arange(0, spec.dim, 2, dtype=precision) / spec.dim
    plain = 1.0 / spec.theta**exponents
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, plain)
    if spec.kind == "yarn":
        return _yarn(spec, plain)
    return plain


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Stretches long waves by `factor`, keeps short ones, and blends those between."""
    turns = spec.original_context * plain / (2 * math.pi)  # how often each wave fits into the original context
    keep = ((turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / spec.factor


def _yarn(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Blends like `_llama3`, but linearly in the dimension.

    The blend goes from the dimension with `beta_fast` turns per original context to the one with `beta_slow`.
    """

    def dimension_of(turns: float) -> float:
        return spec.dim * math.log(spec.original_context / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension_of(spec.beta_fast), dimension_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    span = high - low if high != low else 0.001
    stretch = ((torch.arange(spec.dim // 2, dtype=plain.dtype) - low) / span).clamp(0, 1)
    return plain * (1 - stretch) + plain / spec.factor * stretch


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def amplitude(spec: RopeSpec) -> float:
    """Returns the factor by which YaRN multiplies cosines and sines; it is 1 for every other kind."""
    if spec.kind != "yarn":
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return _mscale(spec.factor, spec.mscale) / _mscale(spec.factor, spec.mscale_all_dim)
    return _mscale(spec.factor, 1.0)


def softmax_gain(spec: RopeSpec) -> float:
    """Returns the factor by which MLA models scale attention scores, in addition to 1/sqrt(head dim)."""
    if spec.kind == "default" or not spec.mscale_all_dim:
        return 1.0
    return _mscale(spec.factor, spec.mscale_all_dim) ** 2
