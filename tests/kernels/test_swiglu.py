"""Compares swiglu with silu and a product, element by element.

Tests without a marker run with the reference. With TRITON_INTERPRET=1 they run with the Triton kernel on CPU tensors
instead (see test_interpreted.py).
"""

import pytest
import torch
from interpreted import INTERPRETED
from torch.nn import functional as F

from hotset.base.errors import ConfigError
from hotset.kernels.fast_path import kernels_of
from hotset.kernels.swiglu import reference, swiglu


@pytest.mark.parametrize(("tokens", "width"), [(0, 4), (1, 1), (3, 160), (5, 1025)])
def test_the_gate_comes_first_and_tokens_may_have_any_stride(tokens: int, width: int) -> None:
    op = kernels_of("swiglu") if INTERPRETED else reference
    whole = torch.randn(tokens, 2 * width + 3)
    gate, up = whole[:, :width], whole[:, width : 2 * width]
    torch.testing.assert_close(op.swiglu(whole[:, : 2 * width]), gate * torch.sigmoid(gate) * up)


def test_an_odd_number_of_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="5 values per token"):
        swiglu(torch.zeros(2, 5))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(0, 8), (1, 1), (16, 12288), (33, 160), (700, 37), (8192, 1536)])
def test_on_a_gpu_every_element_equals_float64(dtype: torch.dtype, tokens: int, width: int) -> None:
    whole = torch.randn(tokens, 2 * width + 8, device="cuda").to(dtype)
    values = whole[:, : 2 * width]
    expected = F.silu(values[:, :width].double()) * values[:, width:].double()
    for strided in (values, values.t().contiguous().t()):
        out = swiglu(strided)
        assert out.dtype == dtype and out.is_contiguous()
        # The result is rounded a few times in float32 and then once to the dtype.
        torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps + 3e-6, atol=1e-6)
