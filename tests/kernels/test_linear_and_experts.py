"""linear's packed path against its reference, and experts against one row and one expert at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.kernels.experts import experts
from hotset.kernels.linear import Linear, packed, reference


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 31, 64, 65])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (7, 5), (96, 33), (130, 64)])
def test_packed_linear_equals_the_reference(rows: int, outputs: int, inputs: int, bias: bool) -> None:
    weight, x = torch.randn(outputs, inputs), torch.randn(rows, 2 * inputs)[:, :inputs]  # x is not contiguous
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
def test_experts_sum_exactly_those_chosen(rows: int, count: int, seed: int, data: st.DataObject) -> None:
    torch.manual_seed(seed)
    hidden, width = 4, 3
    k = data.draw(st.integers(1, count))
    x = torch.randn(rows, hidden, dtype=torch.float64)
    gate_up = torch.randn(count, 2 * width, hidden, dtype=torch.float64)
    down = torch.randn(count, hidden, width, dtype=torch.float64)
    expert_ids = torch.stack([torch.randperm(count)[:k] for _ in range(rows)])
    unused = sorted(set(range(count)) - set(expert_ids.flatten().tolist()))
    gate_up[unused], down[unused] = float("nan"), float("nan")
    weights = torch.rand(rows, k, dtype=torch.float64)
    out = experts(x, expert_ids, weights, gate_up, down)
    for row in range(rows):
        expected = torch.zeros(hidden, dtype=torch.float64)
        for expert, weight in zip(expert_ids[row].tolist(), weights[row], strict=True):
            gate, up = gate_up[expert, :width] @ x[row], gate_up[expert, width:] @ x[row]
            expected += weight * (down[expert] @ (gate * torch.sigmoid(gate) * up))
        torch.testing.assert_close(out[row], expected)
