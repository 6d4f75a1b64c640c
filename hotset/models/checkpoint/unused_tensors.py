"""Tensors of a checkpoint that nothing loads: which of them are harmless."""

import logging
import re
from collections.abc import Iterable

from hotset.base.errors import CheckpointError
from hotset.models.spec import ModelSpec

LOGGER = logging.getLogger("hotset.models")

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def check_unused_tensors(file: str, unused: Iterable[str], spec: ModelSpec) -> None:
    """Raises `CheckpointError` if `unused` contains tensors that do not belong to the model.

    Layers beyond the model's last layer are reported in one log line. Four kinds of tensor are ignored: rotary
    frequencies, which are computed; the LM head of tied embeddings; the indexer of a layer that reuses another layer's
    selection; and the copies of embedding and LM head that belong to an MTP layer.
    """
    extra_layers: set[int] = set()
    foreign: list[str] = []
    for name in unused:
        layer = _LAYER.match(name)
        if spec.mtp is not None and name.startswith(_mtp_copies(spec)):
            continue
        if layer is not None and int(layer[1]) >= spec.layers:
            extra_layers.add(int(layer[1]))
        elif not (
            name.endswith("rotary_emb.inv_freq") or _is_tied_head(name, spec) or _is_unused_by_attention(name, spec)
        ):
            foreign.append(name)
    if foreign:
        examples = ", ".join(sorted(foreign)[:3])
        raise CheckpointError(
            f"{file}: {len(foreign)} tensors do not belong to a {spec.architecture} model: {examples}"
        )
    if extra_layers:
        listed = ", ".join(str(layer) for layer in sorted(extra_layers))
        LOGGER.info("%s: skipped layer %s (multi-token prediction, beyond num_hidden_layers)", file, listed)


def _mtp_copies(spec: ModelSpec) -> tuple[str, ...]:
    return tuple(f"model.layers.{spec.layers}.{name}.weight" for name in ("embed_tokens", "shared_head.head"))


def _is_tied_head(name: str, spec: ModelSpec) -> bool:
    return spec.tied_embeddings and name == "lm_head.weight"


def _is_unused_by_attention(name: str, spec: ModelSpec) -> bool:
    layer = _LAYER.match(name)
    return layer is not None and spec.attention.is_unused(name, int(layer[1]))
