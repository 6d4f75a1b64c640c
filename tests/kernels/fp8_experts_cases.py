"""The launches of the experts' kernels with fp8 weights that test_triton_compiles.py compiles, as fields of a `Case`.

The sizes are those of DeepSeek-V3.2.
"""

import importlib
from typing import Any

DECODING = ("fp8 gate_up, decoding", "fp8 down, decoding")
MANY = "fp8 gate_up, many tokens"
NAMES = (*DECODING, MANY, "quantise pairs")
# The sums of 128 pairs and two tiles, and a product that is added to them, take 192 of a thread's 255 registers.
MAX_STACK_BYTES = {MANY: 32}  # with Triton 3.9: 16, outside the loop over groups of inputs


def cases() -> dict[str, dict[str, Any]]:
    small, *_, large = importlib.import_module("hotset.kernels.experts.triton_fp8").TILES.values()
    products = (_product(small, "gate_up"), _product(small, "down"), _product(large, "gate_up"))
    groups = {"hidden": 7168, "k": 8, "experts": 32, "parts": 7, "scale_block": 128, "block_groups": 8}
    quantise = _case("quantise_pairs", {"*bf16": "x", "*fp8e4nv": "codes", "*fp32": "scales"}, groups, 4)
    return dict(zip(NAMES, (*products, quantise), strict=True))


def _product(tiles: Any, product: str) -> dict[str, Any]:
    import triton.language as tl

    tile = getattr(tiles, product)
    constants = {
        "hidden": 7168,
        "width": 2048,
        "scale_block": 128,
        "block_rows": 128,
        "block_pairs": tiles.block_pairs,
        "pairs_are_rows": tiles.pairs_are_rows,
        "tma": False,
        "stages": tile.stages,
        "group_blocks": 8,
    }
    constants |= {"rounded": tl.bfloat16} if product == "gate_up" else {"tile_out": tile.outputs}
    types = {
        "*fp8e4nv": "x x_tiles gate_up gate_up_tiles activation activation_tiles down down_tiles",
        "*fp32": "x_scales gate_up_scales activation_scales down_scales",
        "*bf16": "results",
    }
    return _case(product, types, constants, tile.warps)


def _case(kernel: str, types: dict[str, str], constants: dict[str, Any], warps: int) -> dict[str, Any]:
    return {
        "module": "experts.triton_fp8",
        "kernel": f"_{kernel}_kernel",
        "types": types | {"*i32": "pairs block_expert block_first ends num_blocks"},
        "constants": constants,
        "options": {"num_warps": warps, "enable_fp_fusion": True},
        "aligned": ("x_stride",),
    }
