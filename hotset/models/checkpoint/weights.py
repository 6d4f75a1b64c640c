"""Opens the weights of a model whose files were found."""

from typing import Literal

import torch

from hotset.models.checkpoint.dummy_source import dummy_weights
from hotset.models.checkpoint.files import ModelFiles
from hotset.models.checkpoint.gguf_source import GgufSource
from hotset.models.checkpoint.safetensors_source import SafetensorsSource
from hotset.models.checkpoint.source import WeightSource
from hotset.models.checkpoint.stored_tensors import Progress


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
        return dummy_weights(dtype, device, seed, files.spec.weight_formats)
    spec = files.spec
    tensors = SafetensorsSource(files.path, spec) if files.gguf is None else GgufSource(files.gguf, spec)
    return WeightSource(tensors, dtype, device, spec.weight_formats, progress)
