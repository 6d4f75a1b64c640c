"""A model as it is computed: its dtype, how its KV is stored, its weights."""

from collections.abc import Callable

import torch

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError
from hotset.memory.device_pool import KvShape
from hotset.models.checkpoint import find_model, open_weights
from hotset.models.collectives import SINGLE_RANK, Collectives
from hotset.models.decoder import Decoder
from hotset.models.dsa import dsa_kv_shape
from hotset.models.gqa import gqa_kv_shape
from hotset.models.spec import GqaSpec, ModelSpec, Storage
from hotset.models.split import WHOLE_MODEL, Split


def choose_dtype(name: str | None, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """The dtype asked for; else the checkpoint's on a GPU (float16 is read as bfloat16), float32 on a CPU."""
    if name is None:
        of_checkpoint = "bfloat16" if spec.dtype == "float16" else spec.dtype
        name = "float32" if device.type == "cpu" else of_checkpoint
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def storage(config: EngineConfig, spec: ModelSpec) -> Storage:
    """How KV is stored. ConfigError where fp8 was asked for and the model's rows have no such layout."""
    if isinstance(spec.attention, GqaSpec):
        for flag, value in (("--kv-dtype", config.kv_dtype), ("--index-dtype", config.index_dtype)):
            if value != "auto":
                raise ConfigError(f"{flag} {value} is for models with a latent KV (MLA); leave it out for this one")
    return Storage(fp8_rows=config.kv_dtype == "fp8", fp8_keys=config.index_dtype == "fp8")


def whole_kv_shape(spec: ModelSpec, dtype: torch.dtype, stored: Storage) -> KvShape:
    """What a token costs in all workers together."""
    if isinstance(spec.attention, GqaSpec):
        return gqa_kv_shape(spec.layers, spec.attention, WHOLE_MODEL, dtype)
    return dsa_kv_shape(range(spec.layers), spec.attention, dtype, stored)


def load_decoder(
    config: EngineConfig,
    device: torch.device,
    progress: Callable[[int, int], None],
    split: Split = WHOLE_MODEL,
    collectives: Collectives = SINGLE_RANK,
) -> Decoder:
    """Reads the weights of one worker's part. `progress(done, total)`: bytes."""
    files = find_model(config.model)
    dtype = choose_dtype(config.dtype, files.spec, device)
    weights = open_weights(files, dtype, device, load_format=config.load_format, progress=progress)
    decoder = Decoder(files.spec, weights, storage(config, files.spec), split, collectives)
    weights.finish()
    return decoder
