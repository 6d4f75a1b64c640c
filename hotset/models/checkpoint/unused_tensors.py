"""Tensors of a checkpoint that nothing loads: which of them are harmless."""

import logging
from collections.abc import Iterable

from hotset.base.errors import CheckpointError
from hotset.models.model_tensors import is_unused
from hotset.models.spec import ModelSpec
from hotset.models.tensors import layer_of

LOGGER = logging.getLogger("hotset.models")


def check_unused_tensors(file: str, unused: Iterable[str], spec: ModelSpec) -> None:
    """Raises `CheckpointError` if `unused` contains tensors that do not belong to the model.

    Layers beyond the model's last layer are reported in one log line. Tensors that `is_unused` knows are ignored.
    """
    foreign = [name for name in unused if not is_unused(spec, name)]
    layers = {name: layer_of(name) for name in foreign}
    extra_layers = sorted({layer for layer in layers.values() if layer is not None and layer >= spec.layers})
    foreign = sorted(name for name in foreign if layers[name] not in extra_layers)
    if foreign:
        raise CheckpointError(
            f"{file}: {len(foreign)} tensors do not belong to a {spec.architecture} model: {', '.join(foreign[:3])}"
        )
    if extra_layers:
        listed = ", ".join(str(layer) for layer in extra_layers)
        LOGGER.info("%s: skipped layer %s (multi-token prediction, beyond num_hidden_layers)", file, listed)
