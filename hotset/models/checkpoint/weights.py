"""Opens the weights of a model whose files were found."""

from typing import Literal

import torch

from hotset.models.checkpoint.dummy_source import DummySource
from hotset.models.checkpoint.files import ModelFiles
from hotset.models.checkpoint.gguf_source import GgufSource
from hotset.models.checkpoint.safetensors_source import SafetensorsSource
from hotset.models.checkpoint.source import Progress, WeightSource


def open_weights(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    load_format: Literal["auto", "dummy"] = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> WeightSource:
    """Opens the weights of a model; the caller must call `finish()`. `seed` applies to `load_format="dummy"` only.

    Matrices stay in the formats that `files.spec.weight_formats` keeps. All others are expanded to `dtype`.
    """
    if load_format == "dummy":
        return DummySource(dtype, device, seed, files.spec.weight_formats)
    if files.gguf is not None:
        return GgufSource(files.gguf, files.spec, dtype, device, progress)
    return SafetensorsSource(files.path, files.spec, dtype, device, progress)
