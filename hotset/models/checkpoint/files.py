"""Finds the files of a model: a Hugging Face directory, a GGUF file, or the embedded model. Does not import torch."""

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from hotset.base.engine_settings import EMBEDDED
from hotset.base.errors import CheckpointError
from hotset.base.units import MIB, show_bytes
from hotset.models.checkpoint.gguf_file import GgufFile, open_gguf
from hotset.models.checkpoint.gguf_spec import gguf_spec
from hotset.models.checkpoint.model_names import MAX_LISTED, embedded_path, model_path, models_in, unknown_model
from hotset.models.config_fields import read_json, read_optional_json
from hotset.models.families import read_spec
from hotset.models.model_tensors import mtp_tensors
from hotset.models.spec import ModelSpec

FINGERPRINT_BYTES = 1 << 20
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
STORED_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
MAX_SHARDS = 10_000  # limit of the count in the names of shards without an index
MAX_INDEX_BYTES = 64 * MIB  # 600,000 tensors; a model of 60 layers of 256 experts has 100,000
MAX_HEADER_BYTES = 16 * MIB  # of a safetensors file: 120,000 tensors; its reader needs seconds and 20 times the memory


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


def find_model(model: str, weight_dtype: Literal["auto", "bfloat16"] = "auto", *, with_mtp: bool = False) -> ModelFiles:
    """Finds the files of `model`: a directory, a `.gguf` file, the word 'embedded', or the name of a hub's model that
    was downloaded.

    With `weight_dtype="bfloat16"`, the spec says that all weights are expanded. For `with_mtp`, see `read_spec`.
    Reads only configuration and metadata.
    Raises `CheckpointError` if the model does not exist, is damaged or is not supported, and `MissingDependency` if the
    embedded model is not installed.
    """
    path = embedded_path() if model == EMBEDDED else model_path(model)
    if path.is_file() and (path.suffix == ".gguf" or model == EMBEDDED):
        file = open_gguf(path)
        return ModelFiles(path, gguf_spec(file), gguf=file)
    if path.is_file():
        raise CheckpointError(f"{path} is a file; a model is a directory with config.json, or a .gguf file")
    if not path.is_dir():
        raise unknown_model(model)
    config_path = path / "config.json"
    if not config_path.is_file():
        contained = ", ".join(str(model) for model in models_in(path)[:MAX_LISTED])
        raise CheckpointError(f"{path} holds no config.json" + (f"; it contains {contained}" if contained else ""))
    generation = read_optional_json(path / "generation_config.json")
    config = read_json(config_path)
    spec = read_spec(config, generation, str(config_path), with_mtp=with_mtp)
    if config.get("dtype") is None and config.get("torch_dtype") is None:
        spec = replace(spec, dtype=stored_dtype(path) or spec.dtype)
    if weight_dtype == "bfloat16":
        spec = replace(spec, weight_formats=spec.weight_formats.expand())
    return ModelFiles(path, spec, generation)


def has_mtp_layer(files: ModelFiles, load_format: Literal["auto", "dummy"] = "auto") -> bool:
    """Returns whether the model has an MTP layer. Many converted checkpoints have the field of config.json, but not the
    weights. `files` must have been found `with_mtp`."""
    if files.spec.mtp is None or load_format == "dummy":
        return files.spec.mtp is not None
    name, index = mtp_tensors(files.spec).projection.name, read_weight_index(files.path)
    return name in index if index is not None else any(name in tensor_names(path) for path in weight_files(files.path))


def header_bytes(path: Path) -> int:
    """Returns the size of the header of a safetensors file. Raises `CheckpointError` if it exceeds the limit."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} is damaged or no checkpoint: the limit of a header is {show_bytes(MAX_HEADER_BYTES)}, but this "
            f"one has {show_bytes(size)}"
        )
    return size


def tensor_names(path: Path) -> frozenset[str]:
    """Returns the names in the header of a safetensors file, or none if it is damaged: loading will report that."""
    return frozenset(read_header(path))


def stored_dtype(directory: Path) -> str | None:
    """Returns the dtype in which transformers computes if config.json names none, or None if there is no such tensor:
    the dtype of the first tensor by name, in the first file, that is stored in a dtype of `STORED_DTYPES`."""
    paths = weight_files(directory)
    first = directory / SINGLE if directory / SINGLE in paths else next(iter(paths), None)
    tensors = [] if first is None else [tensor for _, tensor in sorted(read_header(first).items())]
    dtypes = (tensor.get("dtype") for tensor in tensors if isinstance(tensor, dict))
    return next((STORED_DTYPES[dtype] for dtype in dtypes if isinstance(dtype, str) and dtype in STORED_DTYPES), None)


def read_header(path: Path) -> dict[str, Any]:
    """Returns the header of a safetensors file, or an empty one if it is damaged: loading will report that."""
    with suppress(ValueError, RecursionError, CheckpointError), path.open("rb") as file:
        header = json.loads(file.read(8 + header_bytes(path))[8:])
        return header if isinstance(header, dict) else {}
    return {}


def find_tokenizer(files: ModelFiles, override: str | None) -> Path | None:
    """Returns the directory or GGUF file with the tokenizer: `override`, or the model's own one.

    Returns None for a model directory without tokenizer.json. Raises `CheckpointError` if `override` has none.
    """
    if override is not None:
        directory = model_path(override)
        if not (directory / "tokenizer.json").is_file():
            raise CheckpointError(f"{directory} holds no tokenizer.json")
        return directory
    return files.path if files.gguf is not None or (files.path / "tokenizer.json").is_file() else None


def weight_files(path: Path) -> list[Path]:
    """Returns the weight files of the model in `path`, a directory or a GGUF file. Links to missing files are left
    out."""
    return [file for file in sorted(path.glob("*.safetensors")) if file.is_file()] if path.is_dir() else [path]


def read_weight_index(directory: Path) -> Mapping[str, str] | None:
    """Returns the file of each tensor by name, or None if there is no index.

    Raises `CheckpointError` if the directory has no weights, or if the index names files outside of it.
    """
    path = directory / INDEX
    if not path.is_file():
        if not weight_files(directory):
            raise CheckpointError(
                f"{directory} holds no *.safetensors files; download the weights, or use --load-format dummy for "
                "random ones"
            )
        return None
    weight_map = read_json(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{path}: weight_map is not an object of tensor and file names")
    for shard in sorted(set(weight_map.values())):
        # The file itself may be a link that leaves the directory: Hugging Face caches consist of such links, and only
        # those who can write to the directory can make one.
        if PurePosixPath(shard).is_absolute() or ".." in PurePosixPath(shard).parts or "\0" in shard or not shard:
            raise CheckpointError(f"{path}: weight_map names {shard!r}, which is not a file in the model's directory")
    return weight_map


def shard_paths(directory: Path, index: Mapping[str, str] | None) -> list[Path]:
    """Returns the safetensors files that hold the model, given the result of `read_weight_index`: those in the index,
    else SINGLE, else all. Raises `CheckpointError` if one is missing."""
    if index is not None:
        paths = sorted({directory / shard for shard in index.values()})
    elif (directory / SINGLE).is_file():
        paths = [directory / SINGLE]
    else:
        paths = _with_missing_shards(weight_files(directory))
    for path in paths:
        try:
            missing = not path.is_file()
        except OSError as error:  # the name is too long
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if missing:
            raise CheckpointError(f"{path} is missing; download the model again")
    return paths


def _with_missing_shards(paths: list[Path]) -> list[Path]:
    """Adds the shards that the name of a shard, such as model-00002-of-00004.safetensors, requires."""
    required = set(paths)
    for path in paths:
        numbered = _NUMBERED.fullmatch(path.name)
        if numbered is not None:
            stem, number, count = numbered.groups()
            if int(count) > MAX_SHARDS:
                raise CheckpointError(
                    f"{path} is one of {count} shards by its name, which no model has; rename it or remove it"
                )
            shards = range(1, int(count) + 1)
            required |= {path.with_name(f"{stem}-{shard:0{len(number)}}-of-{count}.safetensors") for shard in shards}
    return sorted(required)
