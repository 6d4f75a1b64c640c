"""The model families: how `config.json` of each `model_type` is read. Does not import torch."""

from collections.abc import Mapping

from hotset.models.families import deepseek, llama
from hotset.models.families.family import Family

FAMILIES: Mapping[str, Family] = llama.FAMILIES | deepseek.FAMILIES
