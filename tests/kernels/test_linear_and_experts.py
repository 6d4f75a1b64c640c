"""Compares the packed linear with its reference, and experts with a loop over tokens and experts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.kernels.experts import experts
from hotset.kernels.linear import Linear, packed, reference


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
    torch.testing.assert_close(Linear(weight, added)(x), reference.linear(x, weight, added), atol=1e-5, rtol=1e-5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**31), st.data())
def test_experts_sum_only_the_selected_experts(tokens: int, count: int, seed: int, data: st.DataObject) -> None:
    torch.manual_seed(seed)
    hidden, width = 4, 3
    k = data.draw(st.integers(1, count))
    x = torch.randn(tokens, hidden, dtype=torch.float64)
    gate_up = torch.randn(count, 2 * width, hidden, dtype=torch.float64)
    down = torch.randn(count, hidden, width, dtype=torch.float64)
    expert_ids = torch.stack([torch.randperm(count)[:k] for _ in range(tokens)])
    unused = sorted(set(range(count)) - set(expert_ids.flatten().tolist()))
    gate_up[unused], down[unused] = float("nan"), float("nan")
    weights = torch.rand(tokens, k, dtype=torch.float64)
    out = experts(x, expert_ids, weights, gate_up, down)
    for token in range(tokens):
        expected = torch.zeros(hidden, dtype=torch.float64)
        for expert, weight in zip(expert_ids[token].tolist(), weights[token], strict=True):
            gate, up = gate_up[expert, :width] @ x[token], gate_up[expert, width:] @ x[token]
            expected += weight * (down[expert] @ (gate * torch.sigmoid(gate) * up))
        torch.testing.assert_close(out[token], expected)
