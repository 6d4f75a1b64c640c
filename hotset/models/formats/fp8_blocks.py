"""fp8 in blocks, as DeepSeek-V3.2 and GLM-5 are published: e4m3 codes and a scale per block. Does not import torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hotset.base.units import ceil_div
from hotset.models.config_fields import ConfigFields
from hotset.models.formats.weight_format import FormatRule, QuantisedFormat, WeightFormats

if TYPE_CHECKING:
    from hotset.models.formats.codec import MatrixCodec

FP8_BLOCK = 128  # a weight has one scale for each block of FP8_BLOCK outputs x FP8_BLOCK inputs
SCALE_BYTES = 4
# The names of the matrices that published checkpoints store in fp8.
PUBLISHED_NAMES = r"model\.layers\.\d+\..*(?<!weights)(_proj|_proj_with_mqa|\.wq_b|\.wk)\.weight"


@dataclass(frozen=True, slots=True)
class Fp8Blocks(QuantisedFormat):
    """A code of 8 bits per value, and a float32 scale for each block of FP8_BLOCK outputs x FP8_BLOCK inputs.

    Activations are quantised in the same blocks of inputs. If ranks divided a block, their scales would differ
    from those of one rank.
    """

    name = "fp8"
    product_type = "fp8"
    input_block = FP8_BLOCK
    output_block = FP8_BLOCK

    def matrix_bytes(self, outputs: int, inputs: int, dtype_bytes: int) -> int:
        return outputs * inputs + SCALE_BYTES * ceil_div(outputs, FP8_BLOCK) * ceil_div(inputs, FP8_BLOCK)

    def is_stored(self, name: str, stored_type: Callable[[str], str | None]) -> bool:
        return stored_type(name) == "F8_E4M3"

    def stored_names(self, name: str) -> tuple[str, ...]:
        return (name, name + "_scale_inv")

    def codec(self) -> "MatrixCodec":
        from hotset.models.formats.fp8_blocks_codec import Fp8BlocksCodec

        return Fp8BlocksCodec(self)


FP8_BLOCKS = Fp8Blocks()
FP8_CHECKPOINT = WeightFormats((FormatRule(PUBLISHED_NAMES, FP8_BLOCKS),))


def read_fp8(quantisation: ConfigFields) -> WeightFormats:
    """Reads a `quantization_config` whose method is fp8. Raises `CheckpointError` for other kinds of fp8.

    Accepts any list of modules that are not quantised: each tensor is read in the format in which it is stored.
    """
    quantisation.choice("fmt", "e4m3", ("e4m3",))
    quantisation.choice("activation_scheme", "dynamic", ("dynamic",))
    quantisation.choice("scale_fmt", "float", ("float", "ue8m0"))
    block = quantisation.get("weight_block_size")
    if quantisation.is_null("weight_block_size") or (block is not None and block != [FP8_BLOCK, FP8_BLOCK]):
        quantisation.refuse("weight_block_size", f"[{FP8_BLOCK}, {FP8_BLOCK}]")
    return FP8_CHECKPOINT
