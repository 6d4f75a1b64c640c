"""Compiles Triton kernels for sm_90 without a GPU, as an op launches them: `python triton_launches.py NAME...`.

A case calls an op with tensors of the device `meta`, which have sizes but no memory. The launch of the case's kernel is
compiled instead of run, with the types, constants, alignments and options of a launch on a Hopper GPU. Other launches
of the call do nothing. Cases import Triton only when they run.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hotset.base.paged_span import PagedSpan
from hotset.kernels.fast_path import kernels_of
from hotset.kernels.fp8 import Fp8Weight
from hotset.kernels.gqa_append import HeadNorms
from hotset.kernels.rope import Rotation
from hotset.kernels.route import RoutingRule
from hotset.kernels.rows import PagedRows, RowLayout, gqa_row, index_key_row, mla_row
from hotset.kernels.slice_pack import RowSlices, SlicedRows
from hotset.kernels.sparse_attention.launch import PORTABLE

BF16, FP32, INT64 = torch.bfloat16, torch.float32, torch.int64
META = torch.device("meta")
EPS = 1e-6
MLA_ROW = mla_row(512, 64, BF16, fp8=True)


@dataclass(frozen=True)
class CompiledKernel:
    ptx: str
    shared_bytes: int
    stack_bytes: int  # stack frame of a thread, which holds spilled registers
    early: bool  # whether it is launched early


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def integers(*shape: int) -> Tensor:
    return meta(*shape, dtype=INT64)


def rotation(dim: int, tokens: int = 16) -> Rotation:
    return Rotation(meta(tokens, 1, dim // 2), meta(tokens, 1, dim // 2))


def experts(tokens: int, tiles: int, hidden: int = 4096, width: int = 1536) -> None:
    """Computes experts with the tiles of this index, from those for few pairs (0) to those for many (-1)."""
    impl = kernels_of("experts")
    weights = meta(64, 2 * width, hidden), meta(64, hidden, width)
    routes = integers(tokens, 6), meta(tokens, 6, dtype=FP32)
    impl.experts_in_tiles(meta(tokens, hidden), *routes, *weights, [*impl.TILES.values()][tiles])


def experts_of_one_token() -> None:
    routes, weights = (integers(1, 6), meta(1, 6, dtype=FP32)), (meta(64, 3072, 4096), meta(64, 4096, 1536))
    kernels_of("experts", "triton_one_token").experts(meta(1, 4096), *routes, *weights)


def fp8_experts(tokens: int, tiles: int) -> None:
    """Computes 32 experts with the sizes of DeepSeek-V3.2."""
    impl = kernels_of("experts", "triton_fp8")
    weights = Fp8Weight.empty((32, 4096, 7168), META), Fp8Weight.empty((32, 7168, 2048), META)
    routes = integers(tokens, 8), meta(tokens, 8, dtype=FP32)
    impl.experts_in_tiles(meta(tokens, 7168), *routes, *weights, [*impl.TILES.values()][tiles], slots=32)


def select_experts(rule: RoutingRule) -> None:
    partial, correction = meta(32, 16, rule.experts, dtype=FP32), meta(rule.experts, dtype=FP32)
    kernels_of("route").select_experts(partial, correction, rule, integers(16))


def append_mla_rows() -> None:
    rows = meta(64, MLA_ROW.stored_width, dtype=torch.uint8)
    kernels_of("mla_append").mla_append(meta(16, 576), meta(512), EPS, rotation(64), MLA_ROW, rows, integers(16))


def index_keys(layout: RowLayout, queries: int, **turns: int) -> PagedRows:
    blocks = meta(26 if turns else 1, 40, 318, layout.stored_width, dtype=layout.stored_dtype)
    return PagedRows(blocks, (), layout, integers(4, 48), integers(queries), **turns)


def append_index_keys() -> None:
    keys, vectors = index_keys(index_key_row(128, BF16, fp8=True), 16, step=7), (meta(16, 128), meta(128), meta(128))
    append = kernels_of("index_append").index_append
    append(meta(16, 64, 128), *vectors, EPS, rotation(64), False, keys, integers(16))


def append_gqa_rows() -> None:
    layout, norms = gqa_row(8, 128, BF16), HeadNorms(meta(128), meta(128), EPS)
    rows = meta(64, layout.stored_width)
    kernels_of("gqa_append").gqa_append(meta(16, 48, 128), 8, norms, rotation(128), layout, rows, integers(16))


def fp32_linear() -> None:
    counters = meta(64, dtype=torch.int32)
    kernels_of("linear").fp32_linear(meta(16, 7168), meta(64, 7168, dtype=FP32), 0.5, counters)


def few_tokens(op: str, *operands: Any) -> None:
    kernels_of("linear", "triton_few").__dict__[op](meta(2, 4096), *operands)


def fp8_linear(tokens: int, tiles: str) -> None:
    impl, weight = kernels_of("linear", "triton_fp8"), Fp8Weight.empty((4096, 7168), META)
    tile = impl.__dict__[tiles][tokens]
    impl.fp8_linear_in_tiles(meta(tokens, 7168), weight, None, meta(64, dtype=torch.int32), tile, splits=4)


def paged_attention(queries: int) -> tuple[Any, ...]:
    """Returns the arguments before the number of KV heads: 32 heads, and 8 KV heads of 128."""
    layout = gqa_row(8, 128, BF16)
    context = PagedRows(meta(1, 40, 64, layout.stored_width), (), layout, integers(8, 64), integers(queries))
    return meta(queries, 32, 128), context, integers(queries)


def copy_slices(width: int, unpack: bool, parts: int) -> None:
    """Copies slices of 512 bytes in pages of 64 rows, aligned to `width` bytes."""
    span = PagedSpan(((1 << 40,) * parts,), page_bytes=64 << 10, part_rows=64, row_bytes=1024, step=parts)
    piece = SlicedRows(span, RowSlices(((0, 512), (512, 512))))
    packed = (1 << 41) + width  # an address of 64 bits
    kernels_of("slice_pack").copy([piece], integers(40), 0, 2048, packed, torch.device("cpu"), unpack=unpack)


def score(layout: RowLayout, queries: int, *, share_context: bool = False, **turns: int) -> None:
    impl = kernels_of("index_topk", "triton_score")
    arguments = meta(queries, 32, 128), meta(queries, 32, dtype=FP32), index_keys(layout, queries, **turns)
    with mock.patch.object(impl, "is_hopper", lambda device: True):
        impl.score(*arguments, integers(queries), integers(queries), 4096, 2048, 0.1, share_context=share_context)


def sparse_attention(fp8: bool, heads: int) -> None:
    layout, launch = mla_row(512, 64, BF16, fp8), replace(PORTABLE[fp8, heads], splits=4)
    rows = meta(64, layout.stored_width, dtype=layout.stored_dtype)
    arguments = meta(2, heads, 576), rows, integers(2, 2048), layout, 512, 0.1
    kernels_of("sparse_attention").sparse_attention(*arguments, launch=launch)


Case = tuple[str, Callable[[], object]]  # the name of the kernel, and a call that launches it
EXPERTS: dict[str, Case] = {
    "gate_up of 4096 x 1536, decoding": ("_gate_up_kernel", lambda: experts(16, 0)),
    "down of 4096 x 1536, decoding": ("_down_kernel", lambda: experts(16, 0)),
    "gate_up of 4096 x 1536, many tokens": ("_gate_up_kernel", lambda: experts(1024, -1)),
    "down of 4096 x 1536, many tokens": ("_down_kernel", lambda: experts(1024, -1)),
    "gate_up of the demo model": ("_gate_up_kernel", lambda: experts(16, 0, 256, 160)),
    "down of the demo model": ("_down_kernel", lambda: experts(16, 0, 256, 160)),
    "sort of one chunk": ("_sort_kernel", lambda: experts(512, 0)),
    "sort of several chunks": ("_sort_kernel", lambda: experts(1024, 0)),
    "sort: counts of a chunk": ("_count_pairs_kernel", lambda: experts(1024, 0)),
    "sum": ("_sum_kernel", lambda: experts(16, 0)),
    "router": (
        "_product_kernel",
        lambda: kernels_of("route").partial_logits(meta(16, 4096), meta(64, 4096, dtype=FP32)),
    ),
    "select of 64": ("_select_kernel", lambda: select_experts(RoutingRule(64, 6))),
    "select of 256 in groups": ("_select_kernel", lambda: select_experts(RoutingRule(256, 8, groups=8, topk_group=4))),
    "swiglu": ("_swiglu_kernel", lambda: kernels_of("swiglu").swiglu(meta(16, 3072))),
}
FP8: dict[str, Case] = {
    "fp8 gate_up, decoding": ("_gate_up_kernel", lambda: fp8_experts(16, 0)),
    "fp8 down, decoding": ("_down_kernel", lambda: fp8_experts(16, 0)),
    "fp8 gate_up, many tokens": ("_gate_up_kernel", lambda: fp8_experts(1024, -1)),
    "quantise pairs": ("_quantise_pairs_kernel", lambda: fp8_experts(16, 0)),
    "fp8 linear, 16 tokens": ("_linear_kernel", lambda: fp8_linear(16, "WIDE_TILES")),
    "fp8 linear, 64 tokens": ("_linear_kernel", lambda: fp8_linear(64, "WIDE_TILES")),
    "fp8 linear, 16 tokens, early": ("_linear_kernel", lambda: fp8_linear(16, "NARROW_TILES")),
    "quantise": ("_quantise_kernel", lambda: kernels_of("quantise").quantise(meta(300, 7168), 300)),
}
SMALL_OPS: dict[str, Case] = {
    "gate_up of one token": ("_gate_up_kernel", experts_of_one_token),
    "down of one token": ("_down_kernel", experts_of_one_token),
    "add and norm": (
        "_rms_norm_kernel",
        lambda: kernels_of("norm").add_rms_norm(meta(16, 4096), meta(16, 4096), meta(4096), EPS),
    ),
    "rope": (
        "_rotate_kernel",
        lambda: kernels_of("rope").rotate_pairs_into(meta(16, 64, 64), meta(16, 64, 64), rotation(64)),
    ),
    "mla append": ("_append_kernel", append_mla_rows),
    "index append": ("_append_kernel", append_index_keys),
    "gqa append": ("_append_kernel", append_gqa_rows),
    "fp32 linear": ("_fp32_linear_kernel", fp32_linear),
    "linear of few tokens": ("_few_tokens_kernel", lambda: few_tokens("linear", meta(2240, 4096), meta(2240))),
    "linear of few normed tokens": (
        "_few_tokens_kernel",
        lambda: few_tokens("linear_of_normed", meta(4096), EPS, meta(2240, 4096), meta(2240)),
    ),
    "linear and fp32 linear of few tokens": (
        "_few_tokens_and_fp32_kernel",
        lambda: few_tokens("linear_and_fp32", meta(2240, 4096), meta(2240), meta(32, 4096, dtype=FP32), 0.3),
    ),
    "product per head of few tokens": (
        "_few_tokens_per_head_kernel",
        lambda: kernels_of("linear", "triton_few").per_head_matmul_into(
            meta(2, 32, 128), meta(2, 32, 512), meta(32, 128, 512).transpose(1, 2)
        ),
    ),
    "decode rows": (
        "_decode_rows_kernel",
        lambda: kernels_of("decode_rows").decode_rows(meta(64, 656, dtype=torch.uint8), integers(16), MLA_ROW),
    ),
    "page table lookup": (
        "_page_table_lookup_kernel",
        lambda: kernels_of("page_table_lookup").page_table_lookup(
            integers(16, 2048), integers(16), integers(4, 48), 64
        ),
    ),
    "save last topk": (
        "_save_last_topk_kernel",
        lambda: kernels_of("save_last_topk").save_last_topk(
            meta(4, 3, 2048, dtype=torch.int32)[:, 1], integers(16), integers(16, 2048)
        ),
    ),
    "decode": (
        "_decode_kernel",
        lambda: kernels_of("paged_attention").decode(*paged_attention(8), 8, 0.1, meta(8, 32, 128)),
    ),
    "merge": (
        "_merge_kernel",
        lambda: kernels_of("paged_attention").decode(*paged_attention(8), 8, 0.1, meta(8, 32, 128)),
    ),
    "prompts": (
        "_prefill_kernel",
        lambda: kernels_of("paged_attention", "triton_prefill").prefill(
            *paged_attention(100), integers(100), 8, 0.1, meta(100, 32, 128)
        ),
    ),
}
SLICES = {  # (alignment in bytes, unpack, parts of a page)
    "slices of 16 bytes": (16, False, 1),
    "slices of 16 bytes in parts": (16, False, 3),
    "slices of 16 bytes, unpacked": (16, True, 1),
    "slices of 4 bytes": (4, False, 1),
    "slices of 1 byte, unpacked": (1, True, 1),
}
FP8_KEYS, PLAIN_KEYS = (index_key_row(128, BF16, fp8) for fp8 in (True, False))
INDEX_TOPK: dict[str, Case] = {
    "score fp8": ("_score_kernel", lambda: score(FP8_KEYS, 2, step=7)),  # 21 groups in 78 layers
    "score bf16": ("_score_kernel", lambda: score(PLAIN_KEYS, 2)),
    "score shared context": ("_score_kernel", lambda: score(FP8_KEYS, 64, share_context=True)),
}
SPARSE_ATTENTION = {  # with fp8 rows, blocks of more heads spill (600 and 2976 bytes with Triton 3.9)
    f"attention of {heads} heads, fp8={fp8}": (fp8, heads) for fp8, heads in PORTABLE if heads == 16 or not fp8
}
CASES: dict[str, Case] = {
    **EXPERTS,
    **FP8,
    **SMALL_OPS,
    **{name: ("_copy_kernel", lambda case=case: copy_slices(*case)) for name, case in SLICES.items()},
    **INDEX_TOPK,
    **{name: ("_attend_kernel", lambda case=case: sparse_attention(*case)) for name, case in SPARSE_ATTENTION.items()},
}


class HopperDriver:
    """Stands for Triton's driver of a Hopper GPU, as far as compilation needs it."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def compile_case(case: Case) -> CompiledKernel:
    from triton.runtime.jit import JITFunction

    name, call = case
    run, compiled = JITFunction.run, []

    def compile_launch(kernel: Any, *arguments: Any, warmup: bool, **options: Any) -> None:
        if kernel.__name__ == name:
            compiled.append((run(kernel, *arguments, warmup=True, **options), options.get("launch_pdl", False)))

    with mock.patch.object(JITFunction, "run", compile_launch):
        call()
    ((kernel, early),) = compiled
    return CompiledKernel(kernel.asm["ptx"], kernel.metadata.shared, stack_bytes(kernel.asm["cubin"]), early)


def stack_bytes(cubin: bytes) -> int:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        found = re.search(r"STACK:(\d+)", subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found is not None
    return int(found[1])


def main(names: list[str]) -> None:
    from triton.runtime.driver import driver

    driver.set_active(HopperDriver())
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
    ):
        print(json.dumps({name: asdict(compile_case(CASES[name])) for name in names}))


if __name__ == "__main__":
    main(sys.argv[1:])
