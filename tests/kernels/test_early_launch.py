"""Tests on a GPU that kernels which are launched early wait for what they read, in captured graphs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.experts import experts
from hotset.kernels.fp8 import Fp8Weight
from hotset.kernels.index_append import index_append
from hotset.kernels.index_topk import index_topk
from hotset.kernels.linear import Fp32Linear, Linear, per_head_matmul
from hotset.kernels.mla_append import mla_append
from hotset.kernels.norm import add_rms_norm, rms_norm
from hotset.kernels.page_table_lookup import page_table_lookup
from hotset.kernels.rope import Rotation, rope_query
from hotset.kernels.route import Routes, RoutingRule, route
from hotset.kernels.rows import PagedRows, index_key_row, mla_row
from hotset.kernels.segments import Segments, make_segments
from hotset.kernels.swiglu import swiglu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.not_interpreted,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9, reason="only Hopper launches early"
    ),
]

TOKENS, EPS = 2, 1e-6
Op = Callable[[Tensor], Any]


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def rotation() -> Rotation:
    angles = torch.randn(TOKENS, 1, 32, device="cuda")
    return Rotation(angles.cos().bfloat16(), angles.sin().bfloat16())


def index_keys() -> PagedRows:
    blocks = torch.zeros(1, 4, 64, 132, dtype=torch.uint8, device="cuda")
    table = torch.arange(4, device="cuda").view(2, 2)
    return PagedRows(blocks, (), index_key_row(128, torch.bfloat16, fp8=True), table, torch.arange(2, device="cuda"))


def append_rows() -> tuple[Tensor, Op]:
    layout, weight, angles, ids = mla_row(512, 64, torch.bfloat16, fp8=True), bf16(512), rotation(), [3, EMPTY]
    rows = torch.zeros(8, layout.stored_width, dtype=torch.uint8, device="cuda")
    row_ids = torch.tensor(ids, device="cuda")

    def op(kv: Tensor) -> Tensor:
        mla_append(kv, weight, EPS, angles, layout, rows, row_ids)
        return rows

    return bf16(TOKENS, 576), op


def append_keys() -> tuple[Tensor, Op]:
    keys, weight, bias, angles = index_keys(), bf16(128), bf16(128), rotation()
    positions = torch.tensor([70, 5], device="cuda")

    def op(projected: Tensor) -> tuple[Tensor, Tensor]:
        query, key = projected[:, 128:].unflatten(1, (16, 128)), projected[:, :128]
        return index_append(query, key, weight, bias, EPS, angles, False, keys, positions), keys.blocks

    return bf16(TOKENS, 17 * 128), op


def select_positions() -> tuple[Tensor, Op]:
    q, keys, segments, weights = selection_inputs()
    return q, lambda q: index_topk(q, weights, keys, segments, 256, 0.1)


def select_positions_of_late_seats() -> tuple[Tensor, Op]:
    q, keys, segments, weights = selection_inputs()

    def op(late: Tensor) -> Tensor:
        of_seats, of_positions = replace(keys, seat_of=late[0]), replace(segments, positions=late[1])
        return index_topk(q, weights, of_seats, of_positions, 256, 0.1)

    return torch.stack([keys.seat_of, segments.positions]), op


def selection_inputs() -> tuple[Tensor, PagedRows, Segments, Tensor]:
    layout = index_key_row(128, torch.bfloat16, fp8=True)
    blocks = layout.encode(bf16(1, 40, 64, 128))
    keys = PagedRows(blocks, (), layout, torch.arange(40, device="cuda").view(2, 20), torch.arange(2, device="cuda"))
    segments = make_segments([1200, 900], [1, 1], torch.device("cuda"))
    return bf16(TOKENS, 32, 128), keys, segments, torch.randn(TOKENS, 32, device="cuda")


def compute_experts() -> tuple[Tensor, Op]:
    gate_up, down, x, weights = bf16(8, 256, 128), bf16(8, 128, 128), bf16(TOKENS, 128), torch.rand(TOKENS, 2).cuda()
    return torch.tensor([[1, 4], [0, 7]], device="cuda"), lambda ids: experts(x, ids, weights, gate_up, down)


def compute_experts_of_one_token() -> tuple[Tensor, Op]:
    gate_up, down, x, weights = bf16(8, 256, 128), bf16(8, 128, 128), bf16(1, 128), torch.rand(1, 2).cuda()
    return torch.tensor([[1, 4]], device="cuda"), lambda ids: experts(x, ids, weights, gate_up, down)


def normalise() -> tuple[Tensor, Op]:
    weight = bf16(512)
    return bf16(TOKENS, 512), lambda x: rms_norm(x, weight, EPS)


def add_and_normalise() -> tuple[Tensor, Op]:
    weight, delta = bf16(512), bf16(TOKENS, 512)
    return bf16(TOKENS, 512), lambda x: add_rms_norm(x, delta, weight, EPS)


def rotate_heads() -> tuple[Tensor, Op]:
    angles, key_up = rotation(), bf16(8, 64, 512)
    return bf16(TOKENS, 8, 128), lambda q: rope_query(q, key_up, angles)


def multiply() -> tuple[Tensor, Op]:
    return bf16(TOKENS, 512), Linear(bf16(96, 512))


def normalise_and_multiply() -> tuple[Tensor, Op]:
    gain, linear = bf16(512), Linear(bf16(96, 512))
    return bf16(TOKENS, 512), lambda x: linear.of_normed(x, gain, EPS)


def multiply_twice() -> tuple[Tensor, Op]:
    linear, other = Linear(bf16(96, 512)), Fp32Linear(torch.randn(33, 512, device="cuda"), 0.5)
    return bf16(TOKENS, 512), lambda x: linear.and_fp32(x, other)


def multiply_in_fp8() -> tuple[Tensor, Op]:
    weight = Fp8Weight.empty((96, 512), torch.device("cuda"))
    weight.codes.copy_(torch.randn(96, 512))
    weight.scales.fill_(0.5)
    return bf16(TOKENS, 512), Linear(weight)


def activate() -> tuple[Tensor, Op]:
    return bf16(TOKENS, 512), swiglu


def multiply_heads() -> tuple[Tensor, Op]:
    weight = bf16(8, 128, 512)
    return bf16(TOKENS, 8, 128), lambda x: per_head_matmul(x, weight)


def multiply_in_float32() -> tuple[Tensor, Op]:
    return bf16(TOKENS, 4096), Fp32Linear(torch.randn(32, 4096, device="cuda"), 0.5)


def route_tokens() -> tuple[Tensor, Op]:
    router, correction = torch.randn(64, 512, device="cuda"), torch.zeros(64, device="cuda")
    return bf16(TOKENS, 512), lambda x: route(x, router, correction, RoutingRule(64, 6))


def look_up_rows() -> tuple[Tensor, Op]:
    table, seats = torch.arange(8, device="cuda").view(2, 4), torch.arange(TOKENS, device="cuda")
    return torch.randint(128, (TOKENS, 64), device="cuda"), lambda at: page_table_lookup(at, seats, table, 32)


# Each returns an input that is written late, and an op that reads it in the first kernel that it launches.
CASES = [
    *(normalise, add_and_normalise, rotate_heads, multiply, multiply_in_fp8, multiply_heads),
    *(normalise_and_multiply, multiply_twice, compute_experts_of_one_token),
    *(multiply_in_float32, activate, route_tokens, look_up_rows, append_rows, append_keys, select_positions),
    *(select_positions_of_late_seats, compute_experts),
]


def tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Routes):
        return [result.expert_ids, result.weights]
    return [result] if isinstance(result, Tensor) else list(result)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_kernel_that_starts_early_reads_what_is_written_late(case: Callable[[], tuple[Tensor, Op]]) -> None:
    from late_copy import late_copy

    torch.manual_seed(1)
    value, op = case()
    late = torch.zeros_like(value)
    expected = [tensor.clone() for tensor in tensors(op(value))]
    op(late)  # overwrites what the op has written to the model's memory
    late_copy(late, value)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        late_copy(late, value)
        result = op(late)
    for _ in range(3):
        late.view(torch.uint8).random_()  # until it is written, it can be anything
        graph.replay()
        for got, wanted in zip(tensors(result), expected, strict=True):
            assert torch.equal(got, wanted)
