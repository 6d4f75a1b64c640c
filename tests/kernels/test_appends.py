"""Tests mla_append, index_append and gqa_append over poisoned memory: new rows are right, and no other byte changes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from interpreted import triton_impl
from kernel_tensors import all_bytes, draw_exact, draw_rotation, on_device
from matrix import matrix
from torch import Tensor
from torch.nn import functional as F

from hotset.base.errors import ConfigError, InternalError
from hotset.kernels import EMPTY, gqa_append, index_append, mla_append
from hotset.kernels.gqa_append import HeadNorms
from hotset.kernels.rope.reference import Rotation, rotate
from hotset.kernels.rows import PagedRows, RowLayout, gqa_row, index_key_row, mla_row

EPS = 1e-6
POISON = 0xAB
BF16 = torch.bfloat16
DTYPES = [BF16, torch.float32]
needs_interpreter = pytest.mark.interpreted

Draw = Callable[..., Tensor]


def poisoned(*shape: int, layout: RowLayout) -> Tensor:
    """Returns blocks of poisoned rows as `layout` stores them, with a gap of 16 bytes after each block."""
    *blocks, block_rows = shape
    size, block_width = layout.stored_dtype.itemsize, block_rows * layout.stored_width
    memory = torch.full((*blocks, (block_width + 16 // size) * size), POISON, dtype=torch.uint8)
    return memory.view(layout.stored_dtype)[..., :block_width].unflatten(-1, (block_rows, layout.stored_width))


def without_first_row(rows: Tensor) -> Tensor:
    """Returns the rows of the only block without the first row.

    A kernel that uses EMPTY (-1) as a row number would write to that row.
    """
    return rows[0, 1:]


def copy_to(device: str, tensor: Tensor) -> Tensor:
    """Returns a copy of the tensor's whole memory on `device`, including the gaps, with the same strides."""
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return flat.to(device, copy=True).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@dataclass
class Mla:
    """The arguments of one call of mla_append. Every third token, from the second on, is padding."""

    kv: Tensor
    weight: Tensor
    rotation: Rotation
    layout: RowLayout
    rows: Tensor
    new_rows: Tensor

    @staticmethod
    def make(rank: int, rope: int, dtype: torch.dtype, fp8: bool, draw: Draw, count: int = 5) -> "Mla":
        layout = mla_row(rank, rope, dtype, fp8)
        new_rows = torch.randperm(2 * count)[:count]
        new_rows[1::3] = EMPTY
        kv = draw(count, rank + rope + 8).to(dtype)[:, 8:]
        weight = (1 + torch.randn(rank) / 4).to(dtype)
        rows = without_first_row(poisoned(1, 2 * count + 1, layout=layout))
        return Mla(kv, weight, draw_rotation(count, rope, dtype), layout, rows, new_rows)

    def values(self) -> Tensor:
        return mla_append.reference.mla_rows(self.kv, self.weight, EPS, self.rotation)

    def expect(self, values: Tensor) -> Tensor:
        """Returns every byte of the rows' memory after `values` have been stored in the new rows."""
        rows = copy_to("cpu", self.rows)
        kept = self.new_rows != EMPTY
        rows[self.new_rows[kept]] = self.layout.encode(values)[kept]
        return all_bytes(rows)

    def run(self, op: Callable[..., None], device: str = "cpu") -> Tensor:
        rows = copy_to(device, self.rows)
        op(
            kv=self.kv.to(device),
            weight=self.weight.to(device),
            eps=EPS,
            rotation=on_device(self.rotation, device),
            layout=self.layout,
            device_rows=rows,
            new_rows=self.new_rows.to(device),
        )
        return rows


@dataclass
class Keys:
    """The arguments of one call of index_append: five tokens, one of which is padding, and four seats.

    If pages have several parts, other index groups use some of them.
    """

    query: Tensor
    key: Tensor
    weight: Tensor
    bias: Tensor
    rotation: Rotation
    interleaved: bool
    keys: PagedRows
    positions: Tensor

    @staticmethod
    def make(
        dim: int, rope_dim: int, dtype: torch.dtype, fp8: bool, interleaved: bool, parts: int, draw: Draw
    ) -> "Keys":
        layout = index_key_row(dim, dtype, fp8)
        block_rows, context_pages = 3, 4
        # The table of seat -1 is cut off: a kernel that uses EMPTY (-1) as a seat would write to its pages.
        pages = torch.randperm(20).view(5, context_pages)[1:]
        seat_of = torch.tensor([2, 0, EMPTY, 3, 2])
        step, first_part = (1, 0) if parts == 1 else (parts - 1, parts - 2)
        positions = torch.randperm(parts * context_pages // step * block_rows)[:5]
        blocks = poisoned(parts, 20, block_rows, layout=layout)
        keys = PagedRows(blocks, [], layout, pages, seat_of, step=step, first_part=first_part)
        key, weight, bias = draw(5, dim + 8).to(dtype)[:, 8:], 1 + torch.randn(dim) / 4, torch.randn(dim) / 4
        rotation = draw_rotation(5, rope_dim, dtype)
        query = draw(5, 9 * dim + 8).to(dtype)[:, 8:].unflatten(1, (9, dim))
        return Keys(query, key, weight.to(dtype), bias.to(dtype), rotation, interleaved, keys, positions)

    def values(self) -> Tensor:
        return index_append.reference.index_keys(self.key, self.weight, self.bias, EPS, self.rotation, self.interleaved)

    def expect(self, values: Tensor) -> Tensor:
        blocks = copy_to("cpu", self.keys.blocks)
        parts, _pages, block_rows, _width = blocks.shape
        for row, (seat, position) in enumerate(zip(self.keys.seat_of.tolist(), self.positions.tolist(), strict=True)):
            if seat != EMPTY:
                page, part = divmod(position // block_rows * self.keys.step + self.keys.first_part, parts)
                block = blocks[part, int(self.keys.table[seat, page])]
                block[position % block_rows] = self.keys.layout.encode(values[row])
        return all_bytes(blocks)

    def run(self, op: Callable[..., Tensor], device: str = "cpu") -> Tensor:
        """Returns the blocks of keys, and checks the rotated queries."""
        blocks = copy_to(device, self.keys.blocks)
        table, seat_of = copy_to(device, self.keys.table), self.keys.seat_of.to(device)
        rotated = op(
            query=self.query.to(device),
            key=self.key.to(device),
            weight=self.weight.to(device),
            bias=self.bias.to(device),
            eps=EPS,
            rotation=on_device(self.rotation, device),
            interleaved=self.interleaved,
            keys=replace(self.keys, blocks=blocks, table=table, seat_of=seat_of),
            positions=self.positions.to(device),
        )
        assert torch.equal(rotated.cpu(), rotate(self.query, self.rotation, self.interleaved))
        return blocks


@dataclass
class Gqa:
    """The arguments of one call of gqa_append. Two of five tokens are padding."""

    qkv: Tensor
    kv_heads: int
    norms: HeadNorms | None
    rotation: Rotation
    layout: RowLayout
    rows: Tensor
    new_rows: Tensor

    @staticmethod
    def make(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, normed: bool, draw: Draw) -> "Gqa":
        layout = gqa_row(kv_heads, dim, dtype)
        new_rows = torch.randperm(11)[:5]
        new_rows[[0, 3]] = EMPTY
        qkv = draw(5, heads + 2 * kv_heads, dim + 8).to(dtype)[..., 8:]
        norms = HeadNorms((1 + torch.randn(dim) / 4).to(dtype), (1 + torch.randn(dim) / 4).to(dtype), EPS)
        rows = without_first_row(poisoned(1, 12, layout=layout))
        return Gqa(qkv, kv_heads, norms if normed else None, draw_rotation(5, dim, dtype), layout, rows, new_rows)

    def run(self, op: Callable[..., Tensor], device: str = "cpu") -> tuple[Tensor, Tensor]:
        rows = copy_to(device, self.rows)
        q = op(
            qkv=self.qkv.to(device),
            kv_heads=self.kv_heads,
            norms=on_device(self.norms, device),
            rotation=on_device(self.rotation, device),
            layout=self.layout,
            device_rows=rows,
            new_rows=self.new_rows.to(device),
        )
        return q, rows

    def expect(self) -> tuple[Tensor, Tensor]:
        q, values = gqa_append.reference.gqa_rows(self.qkv, self.kv_heads, self.norms, self.rotation)
        rows = copy_to("cpu", self.rows)
        kept = self.new_rows != EMPTY
        rows[self.new_rows[kept]] = self.layout.encode(values)[kept]
        return q, all_bytes(rows)


MLA_SHAPES = pytest.mark.parametrize(
    ("rank", "rope", "fp8"), [(512, 64, True), (512, 64, False), (520, 6, True), (20, 2, True), (7, 4, False)]
)
KEY_SHAPES = [(128, 64, True), (128, 64, False), (36, 36, True), (44, 6, True), (9, 4, False)]
KEY_OPTIONS = [(False, 1), (True, 3)]


def test_mla_append_writes_the_new_rows_and_nothing_else() -> None:
    case = Mla.make(20, 4, torch.float64, False, torch.randn)
    case.new_rows = torch.tensor([7, 0, 3, 9, 4])
    values = case.values()
    latent, rope = case.kv[:, :20], case.kv[:, 20:]
    torch.testing.assert_close(values[:, :20], F.rms_norm(latent, (20,), case.weight, EPS))
    assert torch.equal(values[:, 20:], rotate(rope[:, None], case.rotation, True)[:, 0])
    assert torch.equal(all_bytes(case.run(mla_append.mla_append)), case.expect(values))


@pytest.mark.parametrize(("interleaved", "parts"), KEY_OPTIONS)
@pytest.mark.parametrize(("dim", "rope_dim", "fp8"), KEY_SHAPES)
def test_index_append_writes_its_pages_only(dim: int, rope_dim: int, fp8: bool, interleaved: bool, parts: int) -> None:
    case = Keys.make(dim, rope_dim, torch.bfloat16, fp8, interleaved, parts, torch.randn)
    values = case.values()
    normed = F.layer_norm(case.key, (dim,), case.weight, case.bias, EPS)
    assert torch.equal(values[:, rope_dim:], normed[:, rope_dim:])
    assert torch.equal(values[:, :rope_dim], rotate(normed[:, None, :rope_dim], case.rotation, interleaved)[:, 0])
    assert torch.equal(all_bytes(case.run(index_append.index_append)), case.expect(values))


@needs_interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@MLA_SHAPES
def test_mla_kernel_equals_the_reference(dtype: torch.dtype, rank: int, rope: int, fp8: bool) -> None:
    case = Mla.make(rank, rope, dtype, fp8, draw_exact)
    check_bytes(case, triton_impl("mla_append").mla_append, same_values=dtype == torch.bfloat16)


@needs_interpreter
@pytest.mark.parametrize(
    ("dtype", "dim", "rope_dim", "fp8", "interleaved", "parts"),
    matrix(DTYPES, KEY_SHAPES, KEY_OPTIONS, together=1),
    ids=str,
)
def test_key_kernel_equals_the_reference(
    dtype: torch.dtype, dim: int, rope_dim: int, fp8: bool, interleaved: bool, parts: int
) -> None:
    case = Keys.make(dim, rope_dim, dtype, fp8, interleaved, parts, draw_exact)
    check_bytes(case, triton_impl("index_append").index_append, same_values=False)


def check_bytes(case: Mla | Keys, op: Callable[..., Any], same_values: bool, device: str = "cpu") -> None:
    """Checks the kernel's values against the reference, and every byte that it stores against torch's encoding.

    With `same_values`, the kernel must compute the values of the reference. Otherwise they may differ by one rounding,
    because the kernel sums in another order; the kernel's values are then read from a run with a plain layout. In both
    cases their encoding must be exact.
    """
    values = case.values()
    if not same_values:
        plain = with_plain_layout(case)
        computed = stored_values(plain, plain.run(op, device))
        kept = computed.isfinite().all(-1)
        difference = (computed[kept] - values[kept].to(computed.dtype)).abs()
        close = 2.0**-7 if values.dtype == torch.bfloat16 else 1e-5
        # The error of a rotated value is relative to the larger value of its pair, so every value is allowed the error
        # of a value of 2.
        assert bool((difference <= close * values[kept].abs().clamp_min(2)).all())
        if values.dtype == torch.bfloat16:  # few values lie so near to the middle of two numbers
            assert int((difference > 0).sum()) <= 2 + difference.numel() // 100
        values = computed.to(values.dtype)
    assert torch.equal(all_bytes(case.run(op, device)).cpu(), case.expect(values))


def with_plain_layout(case: Mla | Keys) -> Mla | Keys:
    if isinstance(case, Mla):
        layout = replace(case.layout, quantised=0)
        return replace(case, layout=layout, rows=without_first_row(poisoned(1, case.rows.shape[0] + 1, layout=layout)))
    layout = replace(case.keys.layout, quantised=0, align=4)
    blocks = poisoned(*case.keys.blocks.shape[:3], layout=layout)
    return replace(case, keys=replace(case.keys, blocks=blocks, layout=layout))


def stored_values(case: Mla | Keys, stored: Tensor) -> Tensor:
    """Returns the values that the kernel stored with a plain layout: [tokens, width] float32, NaN for padded tokens."""
    if isinstance(case, Mla):
        values = case.layout.decode(stored.cpu())[case.new_rows.clamp_min(0)]
        padded = case.new_rows == EMPTY
    else:
        padded = case.keys.seat_of == EMPTY
        located = case.keys.locations(case.keys.seat_of.clamp_min(0), case.positions)
        values = case.keys.layout.decode(stored.cpu()[located])
    return values.float().masked_fill(padded[:, None], float("nan"))


@needs_interpreter
@pytest.mark.parametrize(
    ("dtype", "normed", "heads", "kv_heads", "dim"),
    matrix(DTYPES, [False, True], [(4, 2, 8), (3, 3, 10), (1, 1, 2)], together=1),
    ids=str,
)
def test_gqa_kernel_equals_the_reference(dtype: torch.dtype, normed: bool, heads: int, kv_heads: int, dim: int) -> None:
    case = Gqa.make(heads, kv_heads, dim, dtype, normed, draw_exact)
    q, rows = case.run(triton_impl("gqa_append").gqa_append)
    expected_q, expected_rows = case.expect()
    if normed and dtype == torch.float32:  # the reference rounds the two products of its norm only once
        torch.testing.assert_close(q, expected_q)
        return
    assert torch.equal(q, expected_q) and torch.equal(all_bytes(rows), expected_rows)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 128])
@pytest.mark.parametrize(
    ("dtype", "rank", "rope", "fp8"),
    [(BF16, 512, 64, True), (BF16, 520, 6, True), (BF16, 7, 4, False), (torch.float32, 20, 2, True)],
    ids=str,
)
def test_mla_append_on_a_gpu_is_exact(dtype: torch.dtype, rank: int, rope: int, fp8: bool, count: int) -> None:
    for draw in (torch.randn, draw_exact):
        check_bytes(Mla.make(rank, rope, dtype, fp8, draw, count), mla_append.mla_append, False, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "dim", "rope_dim", "fp8", "interleaved", "parts"),
    [
        (BF16, 128, 64, True, False, 1),
        (BF16, 44, 6, True, True, 3),
        (BF16, 9, 4, False, True, 1),
        (torch.float32, 36, 36, True, False, 3),
    ],
    ids=str,
)
def test_index_append_on_a_gpu_writes_the_same_bytes(
    dtype: torch.dtype, dim: int, rope_dim: int, fp8: bool, interleaved: bool, parts: int
) -> None:
    case = Keys.make(dim, rope_dim, dtype, fp8, interleaved, parts, torch.randn)
    check_bytes(case, index_append.index_append, False, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "normed", "heads", "kv_heads", "dim"),
    [(BF16, False, 32, 8, 128), (BF16, True, 32, 8, 128), (BF16, True, 3, 3, 10), (torch.float32, False, 16, 1, 80)],
    ids=str,
)
def test_gqa_append_on_a_gpu_is_exact(dtype: torch.dtype, normed: bool, heads: int, kv_heads: int, dim: int) -> None:
    case = Gqa.make(heads, kv_heads, dim, dtype, normed, torch.randn)
    q, rows = case.run(gqa_append.gqa_append, "cuda")
    expected_q, expected_rows = case.expect()
    if not normed:
        assert torch.equal(q.cpu(), expected_q) and torch.equal(all_bytes(rows).cpu(), expected_rows)
        return
    torch.testing.assert_close(q.cpu(), expected_q)  # the kernel sums in another order, which may change a rounding
    kept = case.new_rows[case.new_rows != EMPTY]
    values = gqa_append.reference.gqa_rows(case.qkv, kv_heads, case.norms, case.rotation)[1][case.new_rows != EMPTY]
    torch.testing.assert_close(case.layout.decode(rows.cpu())[kept], values)
    others = sorted(set(range(11)) - set(kept.tolist()))
    assert torch.equal(rows.cpu().view(torch.uint8)[others], case.rows.view(torch.uint8)[others])


@needs_interpreter
@pytest.mark.parametrize("name", ["seats", "positions", "angles"])
def test_columns_of_another_number_of_tokens_are_refused(name: str) -> None:
    given, impl = Keys.make(16, 8, BF16, False, False, 1, torch.randn), triton_impl("index_append")
    keys, positions, rotation = given.keys, given.positions, given.rotation
    if name == "seats":
        keys = replace(keys, seat_of=keys.seat_of[:4])
    elif name == "positions":
        positions = positions[:4]
    else:
        rotation = Rotation(rotation.cos[:4], rotation.sin[:4])
    with pytest.raises(InternalError, match=rf"{name} of .*4.* for 5 tokens"):
        impl.index_append(given.query, given.key, given.weight, given.bias, EPS, rotation, False, keys, positions)


@pytest.mark.gpu
def test_layouts_that_a_gpu_cannot_write_are_refused() -> None:
    case = Mla.make(20, 4, torch.bfloat16, True, torch.randn)
    layout = replace(case.layout, quantised=18)
    with pytest.raises(ConfigError, match="18 of 20 latents"):
        replace(case, layout=layout, rows=poisoned(1, 10, layout=layout)[0]).run(mla_append.mla_append, "cuda")
    keys = Keys.make(132, 4, torch.bfloat16, True, False, 1, torch.randn)
    with pytest.raises(ConfigError, match="132 of 132 values"):
        keys.run(index_append.index_append, "cuda")
