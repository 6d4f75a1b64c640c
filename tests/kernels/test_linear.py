"""Compares the packed linear and the kernel of Fp32Linear with their references."""

from collections.abc import Callable

import pytest
import torch
from interpreted import triton_impl
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.kernels.linear import MAX_FP32_TOKENS, Fp32Linear, Linear, packed, per_head_matmul, reference
from hotset.kernels.norm import rms_norm

BF16 = torch.bfloat16


@pytest.mark.not_interpreted
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 31, 64, 65])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (7, 5), (96, 33), (130, 64)])
def test_packed_linear_equals_the_reference(tokens: int, outputs: int, inputs: int, bias: bool) -> None:
    weight, x = torch.randn(outputs, inputs), torch.randn(tokens, 2 * inputs)[:, :inputs]  # x is not contiguous
    added = torch.randn(outputs) if bias else None
    if not packed.supports(weight):
        assert not torch.backends.mkldnn.is_available()
        return
    torch.testing.assert_close(
        packed.linear(x, packed.pack(weight), added), reference.linear(x, weight, added), atol=1e-5, rtol=1e-5
    )
    layer = Linear(weight, added)
    assert torch.equal(layer(x), reference.linear(x, weight, added)), "before `pack`, the reference computes"
    layer.pack()
    torch.testing.assert_close(layer(x), reference.linear(x, weight, added), atol=1e-5, rtol=1e-5)


@pytest.mark.not_interpreted
@pytest.mark.parametrize(
    "other_op",
    [lambda weight, hint: weight.no_such_op(), lambda weight: weight, lambda weight, hint: 2 * weight],
    ids=["missing", "other arguments", "wrong result"],
)
def test_unknown_ops_pack_no_weights(other_op: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "pack", lambda weight: other_op(weight, packed.TOKENS_HINT))
    packed.is_available.cache_clear()
    try:
        weight, x = torch.randn(5, 7), torch.randn(8, 7)
        layer = Linear(weight)
        layer.pack()
        assert not packed.supports(weight) and torch.equal(layer(x), reference.linear(x, weight, None))
    finally:
        packed.is_available.cache_clear()


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "outputs", "width"), [(1, 1, 3), (5, 3, 40), (9, 5, 2100)])
def test_fp32_linear_kernel_equals_the_reference(dtype: torch.dtype, tokens: int, outputs: int, width: int) -> None:
    x, weight = torch.randn(tokens, width + 1).to(dtype)[:, 1:], torch.randn(outputs, width)
    impl = triton_impl("linear")
    counters = impl.make_counters(weight, tokens)
    got = impl.fp32_linear(x, weight, 0.3, counters)
    torch.testing.assert_close(got, reference.fp32_linear(x, weight, 0.3), atol=1e-4, rtol=1e-4)
    assert not counters.any()  # for the next call


FEW_TOKENS = [(1, 1, 8, False), (2, 9, 40, True), (4, 6, 130, False), (3, 5, 1100, True), (1, 5, 4100, True)]


@pytest.mark.interpreted
@pytest.mark.parametrize(("tokens", "outputs", "width", "bias"), FEW_TOKENS)
def test_products_of_few_tokens_are_exact_but_rounded(tokens: int, outputs: int, width: int, bias: bool) -> None:
    x, weight = torch.randn(tokens, width + 1).to(BF16)[:, 1:], torch.randn(outputs, width).to(BF16)
    added = torch.randn(outputs).to(BF16) if bias else None
    got = triton_impl("linear", "triton_few").linear(x, weight, added)
    exact = reference.linear(x.double(), weight.double(), None if added is None else added.double())
    torch.testing.assert_close(got.double(), exact, atol=1e-4, rtol=2**-8)
    alone = [triton_impl("linear", "triton_few").linear(token[None], weight, added)[0] for token in x]
    assert torch.equal(torch.stack(alone), got), "a token has the same bits in every batch"


@pytest.mark.interpreted
@pytest.mark.parametrize(("tokens", "outputs", "width", "bias"), FEW_TOKENS)
def test_products_of_few_normed_tokens_are_exact_but_rounded(tokens: int, outputs: int, width: int, bias: bool) -> None:
    x = (torch.randint(-8, 9, (tokens, width + 1)) / 8).to(BF16)[:, 1:]  # any order of adding its squares is exact
    x[0] *= 2**-10  # the squares are about as large as eps
    weight, gain = torch.randn(outputs, width).to(BF16), (1 + torch.randn(width) / 4).to(BF16)
    added = torch.randn(outputs).to(BF16) if bias else None
    got = triton_impl("linear", "triton_few").linear_of_normed(x, gain, 1e-6, weight, added)
    normed = rms_norm(x, gain, 1e-6).double()
    exact = reference.linear(normed, weight.double(), None if added is None else added.double())
    torch.testing.assert_close(got.double(), exact, atol=1e-4, rtol=2**-8)


@pytest.mark.interpreted
@pytest.mark.parametrize("fp32_outputs", [1, 5])
@pytest.mark.parametrize(("tokens", "outputs", "width", "bias"), FEW_TOKENS)
def test_one_launch_of_two_products_equals_two_launches(
    tokens: int, outputs: int, width: int, bias: bool, fp32_outputs: int
) -> None:
    x, weight = torch.randn(tokens, width + 1).to(BF16)[:, 1:], torch.randn(outputs, width).to(BF16)
    added, fp32_weight = torch.randn(outputs).to(BF16) if bias else None, torch.randn(fp32_outputs, width)
    impl = triton_impl("linear", "triton_few")
    got, fp32_got = impl.linear_and_fp32(x, weight, added, fp32_weight, 0.3)
    assert torch.equal(got, impl.linear(x, weight, added))
    expected = reference.fp32_linear(x.double(), fp32_weight.double(), 0.3)
    torch.testing.assert_close(fp32_got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.interpreted
def test_products_of_few_tokens_refuse_gains_and_float32_weights_that_they_would_read_wrongly() -> None:
    impl, x, weight = triton_impl("linear", "triton_few"), torch.randn(2, 40).to(BF16), torch.randn(3, 40).to(BF16)
    for gain in (torch.randn(80).to(BF16)[::2], torch.randn(40), torch.randn(39).to(BF16)):
        with pytest.raises(InternalError, match="the gain of the norm is"):
            impl.linear_of_normed(x, gain, 1e-6, weight, None)
    for fp32_weight in (torch.randn(3, 80)[:, :40], torch.randn(3, 39)):
        with pytest.raises(InternalError, match="the float32 weight is"):
            impl.linear_and_fp32(x, weight, None, fp32_weight, 0.3)


@pytest.mark.interpreted
@pytest.mark.parametrize("inputs_adjacent", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "inputs", "outputs"), [(1, 2, 16, 40), (4, 3, 130, 9), (2, 1, 5, 300)])
def test_products_of_few_tokens_per_head_are_exact_but_rounded(
    tokens: int, heads: int, inputs: int, outputs: int, inputs_adjacent: bool
) -> None:
    x = torch.randn(tokens, heads, inputs + 3).to(BF16)[..., 3:]
    weight = torch.randn(heads, inputs, outputs).to(BF16)
    weight = weight.transpose(1, 2).contiguous().transpose(1, 2) if inputs_adjacent else weight
    wide = torch.full((tokens, heads, outputs + 5), 7.0).to(BF16)
    triton_impl("linear", "triton_few").per_head_matmul_into(wide[..., :outputs], x, weight)
    exact = reference.per_head_matmul(x.double(), weight.double())
    torch.testing.assert_close(wide[..., :outputs].double(), exact, atol=1e-4, rtol=2**-8)
    assert bool((wide[..., outputs:] == 7).all()), "nothing else is written"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 5])
@pytest.mark.parametrize("inputs_adjacent", [False, True])
def test_per_head_matmul_on_a_gpu_equals_float64(tokens: int, inputs_adjacent: bool) -> None:
    weight = torch.randn(32, 512, 128, device="cuda").to(BF16)
    weight = weight.transpose(1, 2) if inputs_adjacent else weight
    x = torch.randn(tokens, 32, weight.shape[1] + 64, device="cuda").to(BF16)[..., : weight.shape[1]]
    exact = reference.per_head_matmul(x.double(), weight.double())
    torch.testing.assert_close(per_head_matmul(x, weight).double(), exact, atol=0.1, rtol=2**-7)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 4, 5])
@pytest.mark.parametrize(("outputs", "width"), [(2240, 4096), (4096, 4096), (3, 7168), (1001, 520), (512, 16384)])
def test_linear_on_a_gpu_equals_float64(tokens: int, outputs: int, width: int) -> None:
    x, weight = torch.randn(tokens, 2 * width, device="cuda").to(BF16)[:, 8 : 8 + width], torch.randn(outputs, width)
    layer = Linear(weight.to("cuda", BF16), torch.randn(outputs, device="cuda").to(BF16))
    assert layer.bias is not None and isinstance(layer.weight, Tensor)
    exact = reference.linear(x.double(), layer.weight.double(), layer.bias.double())
    # Our kernel, for very few tokens, sums in float32. cuBLAS may divide a long sum into parts and round each to
    # bfloat16, by a relative error of 2**-9 at most. A sum has a standard deviation of sqrt(width), so its parts are
    # rounded by sqrt(width) * 2**-9 / sqrt(3) together, also if they cancel; five times that is allowed.
    rounded_parts = 2e-3 if layer._has_few_tokens(x) else 5 * 2**-9 / 3**0.5
    torch.testing.assert_close(layer(x).double(), exact, atol=width**0.5 * rounded_parts, rtol=2**-7)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x)
    graph.replay()
    assert torch.equal(captured, layer(x))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 5])
@pytest.mark.parametrize(("outputs", "width"), [(2240, 1536), (1001, 520), (512, 7168)])
def test_products_of_normed_tokens_on_a_gpu_equal_float64(tokens: int, outputs: int, width: int) -> None:
    x, weight = torch.randn(tokens, 2 * width, device="cuda").to(BF16)[:, 8 : 8 + width], torch.randn(outputs, width)
    layer, gain = Linear(weight.to("cuda", BF16)), (1 + torch.randn(width, device="cuda") / 4).to(BF16)
    assert isinstance(layer.weight, Tensor)
    normed = rms_norm(x, gain, 1e-6).double()
    exact = reference.linear(normed, layer.weight.double(), None)
    # A value of the norm can be rounded to either neighbour.
    torch.testing.assert_close(layer.of_normed(x, gain, 1e-6).double(), exact, atol=width**0.5 * 4e-3, rtol=2**-7)
    other = Fp32Linear(torch.randn(33, width, device="cuda"), 0.3)
    out, fp32_out = layer.and_fp32(x, other)
    assert (fp32_out is None) == (tokens > 1)
    fp32_out = other(x) if fp32_out is None else fp32_out
    exact_fp32 = reference.fp32_linear(x.double(), other.weight.double(), 0.3)
    assert float((fp32_out.double() - exact_fp32).norm() / exact_fp32.norm()) < 1e-5
    exact = reference.linear(x.double(), layer.weight.double(), None)
    torch.testing.assert_close(out.double(), exact, atol=width**0.5 * 2e-3, rtol=2**-7)


@pytest.mark.interpreted
def test_a_token_of_fp32_linear_has_the_same_bits_in_every_batch() -> None:
    impl, x, weight = triton_impl("linear"), torch.randn(12, 2100).to(BF16), torch.randn(6, 2100)
    counters = impl.make_counters(weight, 12)
    whole = impl.fp32_linear(x, weight, 0.3, counters)
    for tokens in (slice(0, 1), slice(3, 5), slice(1, 12)):
        assert torch.equal(impl.fp32_linear(x[tokens], weight, 0.3, counters), whole[tokens])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tokens", "outputs", "width"),
    [(BF16, 1, 32, 4096), (BF16, 16, 64, 7168), (BF16, 128, 32, 4096), (BF16, 300, 4, 96), (torch.float32, 7, 3, 1100)],
    ids=str,
)
def test_fp32_linear_on_a_gpu_keeps_exact_weights(dtype: torch.dtype, tokens: int, outputs: int, width: int) -> None:
    x, weight = torch.randn(tokens, width + 8).to(dtype), torch.randn(outputs, width)
    expected = reference.fp32_linear(x[:, 8:].double(), weight.double(), 0.3)
    linear = Fp32Linear(weight.cuda(), 0.3)
    out = linear(x.cuda()[:, 8:])
    error = (out.cpu().double() - expected).norm() / expected.norm()
    assert float(error) < 1e-5  # the kernel computes in float32 throughout
    if tokens <= MAX_FP32_TOKENS:
        for part in (slice(0, 1), slice(tokens // 2, tokens)):
            assert torch.equal(linear(x.cuda()[part, 8:]), out[part])
