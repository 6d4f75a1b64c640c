"""The random number of each draw: a hash of the request's seed and the token's position."""

import torch
from torch import Tensor


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_STRIDE = _signed(0x9E3779B97F4A7C15)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))


def _splitmix64(words: Tensor) -> Tensor:
    """Applies the finaliser of SplitMix64 to int64 words, with wrap-around and logical shifts."""
    for shift, factor in _ROUNDS:
        words = (words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return words ^ ((words >> 31) & ((1 << 33) - 1))


def draw_key(seed: int) -> int:
    """Returns the key of a seed for `uniforms`; neighbouring seeds have unrelated keys."""
    return int(_splitmix64(torch.tensor([seed], dtype=torch.int64)).item())


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Returns numbers in [0, 1), [n] float64. They depend on key and position only and are the same on every device."""
    words = _splitmix64(keys + positions * _STRIDE)
    return ((words >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53
