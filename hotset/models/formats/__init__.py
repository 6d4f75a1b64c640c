"""The formats of weights. Each has a module of facts, which needs no torch, and a module that reads stored tensors."""

from collections.abc import Callable

from hotset.models.config_fields import ConfigFields
from hotset.models.formats.fp8_blocks import FP8_BLOCKS, read_fp8
from hotset.models.formats.weight_format import PLAIN_WEIGHTS, QuantisedFormat, WeightFormats

# The readers of `quantization_config`, by its `quant_method`.
QUANTISATION_READERS: dict[str, Callable[[ConfigFields], WeightFormats]] = {"fp8": read_fp8}
# The formats that stored tensors show by themselves, even if config.json does not mention them.
SELF_DESCRIBING: tuple[QuantisedFormat, ...] = (FP8_BLOCKS,)


def readable_formats(formats: WeightFormats) -> tuple[QuantisedFormat, ...]:
    """Returns the quantised formats in which matrices of a checkpoint may be stored."""
    return tuple(dict.fromkeys((*(rule.format for rule in formats.rules), *SELF_DESCRIBING)))


def read_weight_formats(fields: ConfigFields) -> WeightFormats:
    """Returns the formats that `config.json` describes. Raises `CheckpointError` for every unknown quantisation."""
    if "quantization_config" not in fields:
        return PLAIN_WEIGHTS
    quantisation = fields.section("quantization_config")
    if "quant_method" not in quantisation:
        quantisation.missing("quant_method")
    return QUANTISATION_READERS[quantisation.choice("quant_method", "", tuple(QUANTISATION_READERS))](quantisation)
