"""The launches of the kernels of fp8_linear that test_triton_compiles.py compiles, each as the fields of a `Case`."""

import importlib
from typing import Any

NAMES = ("fp8 linear, 16 tokens", "fp8 linear, 64 tokens", "fp8 linear, 16 tokens, early", "quantise")


def cases() -> dict[str, dict[str, Any]]:
    linear = importlib.import_module("hotset.kernels.linear.triton_fp8")
    quantise = importlib.import_module("hotset.kernels.quantise.triton_impl")
    tiles = (linear.WIDE_TILES[16], linear.WIDE_TILES[64], linear.NARROW_TILES[16])
    linear_cases = [_linear_case(tile, linear.OPTIONS) for tile in tiles]
    quantise_case = {
        "module": "quantise.triton_impl",
        "kernel": "_quantise_kernel",
        "types": {"*bf16": "x", "*fp8e4nv": "codes", "*fp32": "scales"},
        "constants": {"block_tokens": 32},
        "options": quantise.OPTIONS | {"num_warps": quantise.WARPS},
        "aligned": ("width", "x_stride"),
    }
    return dict(zip(NAMES, (*linear_cases, quantise_case), strict=True))


def _linear_case(tile: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the case of a weight with blocks of 128 x 128 and whole groups, which several programs divide."""
    sizes = {"tile_tokens": tile.tokens, "tile_outputs": tile.outputs, "stages": tile.stages}
    flags = {"whole_groups": True, "with_bias": False, "splits": 4, "fused": tile.fused}
    flags["starts_early"] = tile.starts_early
    return {
        "module": "linear.triton_fp8",
        "kernel": "_linear_kernel",
        "types": {
            "*bf16": "x bias out" if tile.fused else "bias out",
            "*fp8e4nv": "weight" if tile.fused else "x weight",
            "*fp32": "x_scales weight_scales partial",
            "*i32": "counters",
        },
        "constants": {"block_rows": 128} | sizes | flags,
        "options": options | {"num_warps": tile.warps},
        "aligned": ("inputs", "outputs", "x_stride"),
    }
