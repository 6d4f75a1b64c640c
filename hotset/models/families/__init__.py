"""The model families: each reads `config.json` of its `model_type` into a `ModelSpec`. Does not import torch.

Absent optional fields take the defaults of the `transformers` library. Features that the decoders do not implement are
refused by the family, by name, before any weight is read.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hotset.models.config_fields import ConfigFields
from hotset.models.families import deepseek, llama
from hotset.models.families.family import Family
from hotset.models.spec import ModelSpec

FAMILIES: Mapping[str, Family] = llama.FAMILIES | deepseek.FAMILIES


def read_spec(
    config: Mapping[str, Any], generation: Mapping[str, Any], source: str, *, with_mtp: bool = False
) -> ModelSpec:
    """Returns the model that `config` describes. Stop tokens in `generation` take precedence over those in `config`.

    Unless `with_mtp`, the spec says that there is no MTP layer, so that none is loaded.
    Error messages start with `source`, the path of the file that `config` comes from, or with generation_config.json.
    If `config` has no dtype, the spec says float32, and `find_model` replaces it by the dtype of the weights.
    Raises `CheckpointError`, with a message of one line, for fields that are missing, have the wrong type, or request a
    feature that Hotset does not implement.
    """
    fields = ConfigFields(config, source)
    if fields.get("model_type") is None:
        fields.missing("model_type")
    architecture = fields.choice("model_type", "", tuple(FAMILIES))
    spec = FAMILIES[architecture].read(fields, ConfigFields(generation, "generation_config.json"))
    return spec if with_mtp else replace(spec, mtp=None)
