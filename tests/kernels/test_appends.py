"""mla_append, key_append and gqa_append over poisoned memory: bytes of the new rows, and of everything beside them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from interpreted import triton_impl
from matrix import matrix
from torch import Tensor
from torch.nn import functional as F

from hotset.base.errors import ConfigError
from hotset.kernels import EMPTY, gqa_append, key_append, mla_append
from hotset.kernels.gqa_append import HeadNorms
from hotset.kernels.rope import Rotation, rotate
from hotset.kernels.rows import PagedRows, RowLayout, gqa_row, index_key_row, mla_row

EPS = 1e-6
POISON = 0xAB
BF16 = torch.bfloat16
DTYPES = [BF16, torch.float32]
only_interpreted = pytest.mark.interpreted

Draw = Callable[..., Tensor]


def exact(*shape: int) -> Tensor:
    """Eighths up to 1: squares and their sums are exact in float32, in whatever order they are taken."""
    return torch.randint(-8, 9, shape) / 8


def angles(rows: int, dim: int, dtype: torch.dtype) -> Rotation:
    turns = torch.randn(rows, 1, dim // 2) * 3
    return Rotation(turns.cos().to(dtype), turns.sin().to(dtype))


def poisoned(*shape: int, layout: RowLayout) -> Tensor:
    """Rows as `layout` stores them, with a gap of 16 bytes after each block of them."""
    size = layout.stored_dtype.itemsize
    held = torch.full((*shape[:-1], shape[-1] * layout.stored_width + 16 // size), POISON, dtype=torch.uint8)
    held = held.repeat_interleave(size, dim=-1).view(layout.stored_dtype)
    return held[..., : shape[-1] * layout.stored_width].unflatten(-1, (shape[-1], layout.stored_width))


def before_it(rows: Tensor) -> Tensor:
    """All rows but the first, which is where a padded row would go if it were not told apart: EMPTY is -1."""
    return rows[0, 1:]


def raw(tensor: Tensor) -> Tensor:
    """Every byte of the memory that a tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage().cpu()).clone()


def to(device: str, tensor: Tensor) -> Tensor:
    """A copy with the same strides, gaps included."""
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return flat.to(device, copy=True).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@dataclass
class Mla:
    """One call of mla_append; two rows of five are padded."""

    kv: Tensor
    weight: Tensor
    rotation: Rotation
    layout: RowLayout
    rows: Tensor
    at: Tensor

    @staticmethod
    def make(rank: int, rope: int, dtype: torch.dtype, fp8: bool, draw: Draw, count: int = 5) -> "Mla":
        layout = mla_row(rank, rope, dtype, fp8)
        at = torch.randperm(2 * count)[:count]
        at[1::3] = EMPTY
        kv = draw(count, rank + rope + 8).to(dtype)[:, 8:]
        weight = (1 + torch.randn(rank) / 4).to(dtype)
        return Mla(
            kv, weight, angles(count, rope, dtype), layout, before_it(poisoned(1, 2 * count + 1, layout=layout)), at
        )

    def values(self) -> Tensor:
        return mla_append.reference.mla_rows(self.kv, self.weight, EPS, self.rotation)

    def expect(self, values: Tensor) -> Tensor:
        """All bytes of the rows after `values` were stored."""
        rows = to("cpu", self.rows)
        kept = self.at != EMPTY
        rows[self.at[kept]] = self.layout.encode(values)[kept]
        return raw(rows)

    def run(self, op: Callable[..., None], device: str = "cpu") -> Tensor:
        rows, rotation = to(device, self.rows), Rotation(self.rotation.cos.to(device), self.rotation.sin.to(device))
        op(self.kv.to(device), self.weight.to(device), EPS, rotation, self.layout, rows, self.at.to(device))
        return rows


@dataclass
class Keys:
    """One call of key_append: five query rows on four seats, one of them padded."""

    key: Tensor
    weight: Tensor
    bias: Tensor
    rotation: Rotation
    interleaved: bool
    keys: PagedRows
    positions: Tensor

    @staticmethod
    def make(
        dim: int, turning: int, dtype: torch.dtype, fp8: bool, interleaved: bool, parts: int, draw: Draw
    ) -> "Keys":
        layout = index_key_row(dim, dtype, fp8)
        per_block, context_pages = 3, 4
        pages = torch.randperm(20).view(5, context_pages)[1:]  # seat -1 would have pages of its own
        seat_of = torch.tensor([2, 0, EMPTY, 3, 2])
        positions = torch.randperm(parts * per_block * context_pages)[:5]
        keys = PagedRows(poisoned(parts, 20, per_block, layout=layout), [], layout, pages, seat_of)
        key, weight, bias = draw(5, dim + 8).to(dtype)[:, 8:], 1 + torch.randn(dim) / 4, torch.randn(dim) / 4
        rotation = angles(5, turning, dtype)
        return Keys(key, weight.to(dtype), bias.to(dtype), rotation, interleaved, keys, positions)

    def values(self) -> Tensor:
        return key_append.reference.index_keys(self.key, self.weight, self.bias, EPS, self.rotation, self.interleaved)

    def expect(self, values: Tensor) -> Tensor:
        blocks = to("cpu", self.keys.blocks)
        parts, _pages, per_block, _width = blocks.shape
        for row, (seat, position) in enumerate(zip(self.keys.seat_of.tolist(), self.positions.tolist(), strict=True)):
            if seat != EMPTY:
                page, within = divmod(position, parts * per_block)
                block = blocks[within // per_block, int(self.keys.table[seat, page])]
                block[within % per_block] = self.keys.layout.encode(values[row])
        return raw(blocks)

    def run(self, op: Callable[..., None], device: str = "cpu") -> Tensor:
        blocks = to(device, self.keys.blocks)
        table, seat_of = to(device, self.keys.table), self.keys.seat_of.to(device)
        rotation = Rotation(self.rotation.cos.to(device), self.rotation.sin.to(device))
        op(
            *(self.key.to(device), self.weight.to(device), self.bias.to(device), EPS, rotation, self.interleaved),
            *(replace(self.keys, blocks=blocks, table=table, seat_of=seat_of), self.positions.to(device)),
        )
        return blocks


@dataclass
class Gqa:
    """One call of gqa_append; two rows of five are padded."""

    qkv: Tensor
    kv_heads: int
    norms: HeadNorms | None
    rotation: Rotation
    layout: RowLayout
    rows: Tensor
    at: Tensor

    @staticmethod
    def make(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, normed: bool, draw: Draw) -> "Gqa":
        layout = gqa_row(kv_heads, dim, dtype)
        at = torch.randperm(11)[:5]
        at[[0, 3]] = EMPTY
        qkv = draw(5, heads + 2 * kv_heads, dim + 8).to(dtype)[..., 8:]
        norms = HeadNorms((1 + torch.randn(dim) / 4).to(dtype), (1 + torch.randn(dim) / 4).to(dtype), EPS)
        rows = before_it(poisoned(1, 12, layout=layout))
        return Gqa(qkv, kv_heads, norms if normed else None, angles(5, dim, dtype), layout, rows, at)

    def run(self, op: Callable[..., Tensor], device: str = "cpu") -> tuple[Tensor, Tensor]:
        rows, rotation = to(device, self.rows), Rotation(self.rotation.cos.to(device), self.rotation.sin.to(device))
        norms = self.norms
        if norms is not None:
            norms = HeadNorms(norms.q.to(device), norms.k.to(device), norms.eps)
        q = op(self.qkv.to(device), self.kv_heads, norms, rotation, self.layout, rows, self.at.to(device))
        return q, rows

    def expect(self) -> tuple[Tensor, Tensor]:
        q, values = gqa_append.reference.gqa_rows(self.qkv, self.kv_heads, self.norms, self.rotation)
        rows = to("cpu", self.rows)
        kept = self.at != EMPTY
        rows[self.at[kept]] = self.layout.encode(values)[kept]
        return q, raw(rows)


MLA_SHAPES = pytest.mark.parametrize(
    ("rank", "rope", "fp8"), [(512, 64, True), (512, 64, False), (520, 6, True), (20, 2, True), (7, 4, False)]
)
KEY_SHAPES = [(128, 64, True), (128, 64, False), (36, 36, True), (44, 6, True), (9, 4, False)]
KEY_PLACES = [(False, 1), (True, 3)]


def test_mla_rows_are_stored_at_their_places_and_nowhere_else() -> None:
    case = Mla.make(20, 4, torch.float64, False, torch.randn)
    case.at = torch.tensor([7, 0, 3, 9, 4])
    values = case.values()
    latent, rope = case.kv[:, :20], case.kv[:, 20:]
    torch.testing.assert_close(values[:, :20], F.rms_norm(latent, (20,), case.weight, EPS))
    assert torch.equal(values[:, 20:], rotate(rope[:, None], case.rotation, True)[:, 0])
    assert torch.equal(raw(case.run(mla_append.mla_append)), case.expect(values))


@pytest.mark.parametrize(("interleaved", "parts"), KEY_PLACES)
@pytest.mark.parametrize(("dim", "turning", "fp8"), KEY_SHAPES)
def test_index_keys_are_stored_in_their_seats_pages(
    dim: int, turning: int, fp8: bool, interleaved: bool, parts: int
) -> None:
    case = Keys.make(dim, turning, torch.bfloat16, fp8, interleaved, parts, torch.randn)
    values = case.values()
    normed = F.layer_norm(case.key, (dim,), case.weight, case.bias, EPS)
    assert torch.equal(values[:, turning:], normed[:, turning:])
    assert torch.equal(values[:, :turning], rotate(normed[:, None, :turning], case.rotation, interleaved)[:, 0])
    assert torch.equal(raw(case.run(key_append.key_append)), case.expect(values))


@only_interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@MLA_SHAPES
def test_mla_kernel_stores_the_same_bytes(dtype: torch.dtype, rank: int, rope: int, fp8: bool) -> None:
    case = Mla.make(rank, rope, dtype, fp8, exact)
    check_bytes(case, triton_impl("mla_append").mla_append, same_values=dtype == torch.bfloat16)


@only_interpreted
@pytest.mark.parametrize(
    ("dtype", "dim", "turning", "fp8", "interleaved", "parts"), matrix(DTYPES, KEY_SHAPES, KEY_PLACES), ids=str
)
def test_key_kernel_stores_the_same_bytes(
    dtype: torch.dtype, dim: int, turning: int, fp8: bool, interleaved: bool, parts: int
) -> None:
    case = Keys.make(dim, turning, dtype, fp8, interleaved, parts, exact)
    check_bytes(case, triton_impl("key_append").key_append, same_values=False)


def check_bytes(case: Mla | Keys, op: Callable[..., None], same_values: bool, device: str = "cpu") -> None:
    """Every byte is as expected from the values that the kernel itself makes, and these are the reference's.

    Values may differ where sums are taken in another order: by one rounding. What is stored of them may not, so the
    kernel's own values are taken from a run with a plain layout, and encoded by torch.
    """
    values = case.values()
    if not same_values:
        plain = with_plain_layout(case)
        stored = plain.run(op, device)
        own = own_values(plain, stored)
        kept = own.isfinite().all(-1)
        difference = (own[kept] - values[kept].to(own.dtype)).abs()
        close = 2.0**-7 if values.dtype == torch.bfloat16 else 1e-5
        assert bool((difference <= close * values[kept].abs().clamp_min(2)).all())  # turned pairs share an error
        assert difference.norm() <= 1e-3 * values[kept].to(own.dtype).norm()
        values = own.to(values.dtype)
    assert torch.equal(raw(case.run(op, device)), case.expect(values))


def with_plain_layout(case: Mla | Keys) -> Mla | Keys:
    if isinstance(case, Mla):
        layout = replace(case.layout, quantised=0)
        return replace(case, layout=layout, rows=before_it(poisoned(1, case.rows.shape[0] + 1, layout=layout)))
    layout = replace(case.keys.layout, quantised=0, align=4)
    blocks = poisoned(*case.keys.blocks.shape[:3], layout=layout)
    return replace(case, keys=replace(case.keys, blocks=blocks, layout=layout))


def own_values(case: Mla | Keys, stored: Tensor) -> Tensor:
    """[rows, width] in float32 as the kernel stored them plainly; NaN for padded rows."""
    if isinstance(case, Mla):
        found = case.layout.decode(stored.cpu())[case.at.clamp_min(0)]
        padded = case.at == EMPTY
    else:
        parts, _pages, per_block, _width = stored.shape
        within, padded = case.positions % (parts * per_block), case.keys.seat_of == EMPTY
        page = case.keys.table[case.keys.seat_of.clamp_min(0), case.positions // (parts * per_block)]
        found = case.keys.layout.decode(stored.cpu()[within // per_block, page, within % per_block])
    return found.float().masked_fill(padded[:, None], float("nan"))


@only_interpreted
@pytest.mark.parametrize(
    ("dtype", "normed", "heads", "kv_heads", "dim"),
    matrix(DTYPES, [False, True], [(4, 2, 8), (3, 3, 10), (1, 1, 2)]),
    ids=str,
)
def test_gqa_kernel_stores_the_same_bytes(
    dtype: torch.dtype, normed: bool, heads: int, kv_heads: int, dim: int
) -> None:
    case = Gqa.make(heads, kv_heads, dim, dtype, normed, exact)
    q, rows = case.run(triton_impl("gqa_append").gqa_append)
    expected_q, expected_rows = case.expect()
    if normed and dtype == torch.float32:  # the reference rounds the two products of its norm as one
        torch.testing.assert_close(q, expected_q)
        return
    assert torch.equal(q, expected_q) and torch.equal(raw(rows), expected_rows)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 128])
@pytest.mark.parametrize(
    ("dtype", "rank", "rope", "fp8"),
    [(BF16, 512, 64, True), (BF16, 520, 6, True), (BF16, 7, 4, False), (torch.float32, 20, 2, True)],
    ids=str,
)
def test_mla_append_on_a_gpu_stores_the_same_bytes(
    dtype: torch.dtype, rank: int, rope: int, fp8: bool, count: int
) -> None:
    for draw in (torch.randn, exact):
        check_bytes(Mla.make(rank, rope, dtype, fp8, draw, count), mla_append.mla_append, False, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "dim", "turning", "fp8", "interleaved", "parts"),
    [
        (BF16, 128, 64, True, False, 1),
        (BF16, 44, 6, True, True, 3),
        (BF16, 9, 4, False, True, 1),
        (torch.float32, 36, 36, True, False, 3),
    ],
    ids=str,
)
def test_key_append_on_a_gpu_stores_the_same_bytes(
    dtype: torch.dtype, dim: int, turning: int, fp8: bool, interleaved: bool, parts: int
) -> None:
    case = Keys.make(dim, turning, dtype, fp8, interleaved, parts, torch.randn)
    check_bytes(case, key_append.key_append, False, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "normed", "heads", "kv_heads", "dim"),
    [
        (BF16, False, 32, 8, 128),
        (BF16, True, 32, 8, 128),
        (BF16, True, 3, 3, 10),
        (torch.float32, False, 16, 1, 80),
    ],
    ids=str,
)
def test_gqa_append_on_a_gpu_stores_the_same_rows(
    dtype: torch.dtype, normed: bool, heads: int, kv_heads: int, dim: int
) -> None:
    case = Gqa.make(heads, kv_heads, dim, dtype, normed, torch.randn)
    q, rows = case.run(gqa_append.gqa_append, "cuda")
    expected_q, expected_rows = case.expect()
    if not normed:
        assert torch.equal(q.cpu(), expected_q) and torch.equal(raw(rows), expected_rows)
        return
    torch.testing.assert_close(q.cpu(), expected_q)  # a sum in another order: a rounding may fall the other way
    kept = case.at[case.at != EMPTY]
    values = gqa_append.reference.gqa_rows(case.qkv, kv_heads, case.norms, case.rotation)[1][case.at != EMPTY]
    torch.testing.assert_close(case.layout.decode(rows.cpu())[kept], values)
    others = sorted(set(range(11)) - set(kept.tolist()))
    assert torch.equal(rows.cpu().view(torch.uint8)[others], case.rows.view(torch.uint8)[others])


@pytest.mark.gpu
def test_layouts_that_a_gpu_cannot_write_are_refused_by_name() -> None:
    case = Mla.make(20, 4, torch.bfloat16, True, torch.randn)
    layout = replace(case.layout, quantised=18)
    with pytest.raises(ConfigError, match="18 of 20 latents"):
        replace(case, layout=layout, rows=poisoned(1, 10, layout=layout)[0]).run(mla_append.mla_append, "cuda")
    keys = Keys.make(132, 4, torch.bfloat16, True, False, 1, torch.randn)
    with pytest.raises(ConfigError, match="132 of 132 values"):
        keys.run(key_append.key_append, "cuda")
