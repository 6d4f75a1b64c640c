"""Finds the configuration of the model to plan for: a path, the name of a local model, or a shipped example."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from hotset.base.errors import CheckpointError
from hotset.models.checkpoint.files import ModelFiles, find_model
from hotset.models.config_fields import read_json
from hotset.models.families import read_spec

EXAMPLES = Path(__file__).parent / "configs"


def example_names() -> list[str]:
    return sorted(path.stem for path in EXAMPLES.glob("*.json"))


def find_config(model: str, weight_dtype: Literal["auto", "bfloat16"] = "auto") -> ModelFiles:
    """Returns the model's spec: `model` is an example's name, a config.json file, or anything `hotset serve` accepts.

    No weights are needed. Raises CheckpointError if there is no such model, or if its configuration lacks a field.
    """
    example = EXAMPLES / f"{model.lower()}.json"
    if example.parent == EXAMPLES and example.is_file():
        path = example
    elif Path(model).is_file() and Path(model).suffix == ".json":
        path = Path(model)
    else:
        try:
            return find_model(model, weight_dtype)
        except CheckpointError as error:
            if Path(model).exists():
                raise
            raise CheckpointError(f"{error}; hotset plan also knows {', '.join(example_names())}") from None
    spec = read_spec(read_json(path), {}, str(path))
    if weight_dtype == "bfloat16":
        spec = replace(spec, weight_formats=spec.weight_formats.expand())
    return ModelFiles(path, spec)
