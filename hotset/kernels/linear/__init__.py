"""Matrix products with a fixed weight: `Linear`, `Fp32Linear` and `per_head_matmul`."""

import torch
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.kernels.fast_path import FAST_DTYPES, kernels_of
from hotset.kernels.linear import packed, reference
from hotset.kernels.norm import rms_norm
from hotset.kernels.weights import QuantisedWeight, Weight

# The kernels for few tokens multiply with one token after the other. Beyond these numbers, cuBLAS is faster.
MAX_FEW_TOKENS, MAX_FEW_VALUES = 2, 8192  # values: of all tokens
MAX_FEW_TOKENS_PER_HEAD = 4
MAX_FP32_TOKENS = 256  # the largest batch for which the kernel of `Fp32Linear` is faster than torch


class Linear:
    """Computes x @ weight.T + bias for a weight [out, in] and an optional bias [out].

    A quantised weight is multiplied as `quantised_linear` in `reference.py` specifies: if it is in fp8, x is quantised
    too. On a GPU in bfloat16 or float32, such a product has kernels that a graph can capture, in the module that the
    weight names (`triton_fp8.py`). Two streams must not use the same instance at the same time, because its calls share
    counters. A product of very few tokens in bfloat16 has a kernel, too.

    After `pack`, on a CPU in float32, oneDNN computes small batches (2 to 64 tokens) with a copy of the weight in
    blocked order (`packed.py`). BLAS would pack the weight again at every call (8 tokens, 3072 x 576, two Neoverse-N1
    cores: 0.87 ms with BLAS, 0.62 ms with the copy, 2026-11-15). The price is a second copy of the weight in memory.
    """

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._packed: Tensor | None = None
        self._counters: Tensor | None = None  # only for a quantised weight on a GPU
        if isinstance(weight, QuantisedWeight):
            if not weight.is_contiguous():
                raise InternalError("a quantised weight must be contiguous")
            if weight.device.type == "cuda":
                self._counters = kernels_of("linear", weight.kernels).make_counters(weight)

    def pack(self) -> None:
        """Adds the packed copy of the weight. Does nothing if the weight or this build of torch has none."""
        if isinstance(self.weight, Tensor) and packed.supports(self.weight):
            self._packed = packed.pack(self.weight)

    def __call__(self, x: Tensor) -> Tensor:  # [tokens, in] -> [tokens, out]
        if isinstance(self.weight, QuantisedWeight):
            return self._quantised_product(x, self.weight)
        if self._packed is not None and packed.is_faster(x):
            return packed.linear(x, self._packed, self.bias)
        if self._has_few_tokens(x):
            out: Tensor = kernels_of("linear", "triton_few").linear(x, self.weight, self.bias)
            return out
        return reference.linear(x, self.weight, self.bias)

    def of_normed(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:  # [tokens, in] -> [tokens, out]
        """Returns the product with the RMS norm of x. For few tokens, one launch computes both."""
        if self._has_few_tokens(x):
            kernels = kernels_of("linear", "triton_few")
            out: Tensor = kernels.linear_of_normed(x, gain, eps, self.weight, self.bias)
            return out
        return self(rms_norm(x, gain, eps))

    def and_fp32(self, x: Tensor, other: "Fp32Linear") -> tuple[Tensor, Tensor | None]:
        """Returns the product and, if one launch can compute both, that of `other` with the same x."""
        if other.weight.dtype == torch.float32 and self._has_few_tokens(x):
            kernels = kernels_of("linear", "triton_few")
            both: tuple[Tensor, Tensor] = kernels.linear_and_fp32(x, self.weight, self.bias, other.weight, other.scale)
            return both
        return self(x), None

    def _has_few_tokens(self, x: Tensor) -> bool:
        """Returns whether the kernel for few tokens supports the product."""
        return (
            isinstance(self.weight, Tensor)
            and _are_few_bf16_tokens(x, self.weight, MAX_FEW_TOKENS)
            and x.numel() <= MAX_FEW_VALUES
            and self.weight.is_contiguous()
        )

    def _quantised_product(self, x: Tensor, weight: QuantisedWeight) -> Tensor:
        if self._counters is not None and x.dtype in FAST_DTYPES:
            out: Tensor = kernels_of("linear", weight.kernels).linear(x, weight, self.bias, self._counters)
            return out
        return reference.quantised_linear(x, weight, self.bias)


def _are_few_bf16_tokens(x: Tensor, weight: Tensor, most: int) -> bool:
    """Returns whether x [tokens, ..., in] has at most so many tokens, and a type that `triton_few.py` supports."""
    return x.is_cuda and x.dtype == weight.dtype == torch.bfloat16 and x.shape[0] <= most and x.stride(-1) == 1


class Fp32Linear:
    """Computes scale * x @ weight.T for a weight [out, in] in the accumulation dtype, fast for a few dozen outputs.

    The weight is never rounded: all products and sums use the accumulation dtype. On a GPU, batches of up to
    MAX_FP32_TOKENS tokens have a kernel that a graph can capture, in which a token gets the same bits in every batch.
    `Linear.and_fp32` adds in another order.
    Two streams must not use the same instance at the same time, because its calls share counters.
    """

    def __init__(self, weight: Tensor, scale: float) -> None:
        self.weight, self.scale = weight, scale
        self._counters: Tensor | None = None  # only on a GPU
        if weight.is_cuda and weight.dtype == torch.float32:
            self._counters = kernels_of("linear").make_counters(weight, MAX_FP32_TOKENS)

    def __call__(self, x: Tensor) -> Tensor:  # [tokens, in], any stride between tokens -> [tokens, out]
        if self._counters is not None and x.dtype in FAST_DTYPES and x.shape[0] <= MAX_FP32_TOKENS:
            out: Tensor = kernels_of("linear").fp32_linear(x, self.weight, self.scale, self._counters)
            return out
        return reference.fp32_linear(x, self.weight, self.scale)


def per_head_matmul(
    x: Tensor,  # [tokens, heads, in]; tokens and heads may have any stride
    weight: Tensor,  # [heads, in, out]
) -> Tensor:  # [tokens, heads, out]
    """Computes out[t, h] = x[t, h] @ weight[h].

    On a GPU, the result is contiguous, so its heads can be flattened without a copy.
    """
    if x.is_cuda:
        out = x.new_empty(x.shape[0], weight.shape[0], weight.shape[2])
        per_head_matmul_into(out, x, weight)
        return out
    return reference.per_head_matmul(x, weight)


def per_head_matmul_into(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Writes the result of `per_head_matmul` to `out` [tokens, heads, out], which may be a slice of a wider tensor.

    cuBLAS accepts any stride between the matrices of a batch and between the rows of a matrix, and so does the kernel
    for few tokens. Therefore the result needs neither a transposed copy nor a concatenation.
    """
    if out.stride(2) != 1:
        raise InternalError(f"the values of a head have stride {out.stride(2)}; they must be adjacent")
    if _are_few_bf16_tokens(x, weight, MAX_FEW_TOKENS_PER_HEAD):
        kernels_of("linear", "triton_few").per_head_matmul_into(out, x, weight)
        return
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
