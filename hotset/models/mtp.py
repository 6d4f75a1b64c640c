"""The layer for multi-token prediction (MTP, "nextn") of DeepSeek-V3.2 and GLM-5, which drafts tokens.

docs/mtp.md describes the layer, with sources.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.kernels.linear import Linear
from hotset.kernels.rope import Rotation
from hotset.memory.view import View
from hotset.models.decoder_layer import build_layer
from hotset.models.layer_step import Residual, StepInputs
from hotset.models.layers import ShardLoader
from hotset.models.model_tensors import mtp_tensors
from hotset.models.spec import ModelSpec, MtpSpec


@dataclass(frozen=True, slots=True)
class MtpOutput:
    """What one iteration computed for each of its tokens."""

    carried: Tensor  # [tokens, hidden]: the hidden states for the next iteration
    normed: Tensor  # [tokens, hidden]: the hidden states for the LM head
    selected: Tensor  # [tokens, topk] int64, EMPTY-padded: the positions that were attended to


class MtpLayer:
    """Predicts the token at position p + 2 from the hidden state of position p and the token at position p + 1.

    The two are normed, concatenated and projected to one hidden state, which passes through a decoder layer with rows
    and index keys of its own at position p. Embedding and LM head are the model's.
    """

    def __init__(self, loader: ShardLoader, local_layer: int, spec: ModelSpec, mtp: MtpSpec) -> None:
        """Loads the layer, which views number `local_layer`."""
        tensors = mtp_tensors(spec)
        self._mtp = mtp
        self._token_norm = loader.norm(tensors.token_norm, spec.norm_eps)
        self._hidden_norm = loader.norm(tensors.hidden_norm, spec.norm_eps)
        self._projection = Linear(loader.load_matrix(tensors.projection))
        self._layer = build_layer(loader, spec.layers, local_layer, spec.with_mtp_layer)
        self._norm = loader.norm(tensors.norm, spec.norm_eps)

    def __call__(
        self,
        embedded: Tensor,  # [tokens, hidden]
        hidden: Tensor,  # [tokens, hidden]
        rotation: Rotation,
        view: View,
        selected: Tensor | None,
    ) -> MtpOutput:
        """Computes one iteration. `selected` are the positions that the first iteration selected; None in the first."""
        x = self._projection(torch.cat((self._token_norm(embedded), self._hidden_norm(hidden)), dim=1))
        selects = selected is None or not self._mtp.shares_selection
        (x, delta), selected = self._layer(Residual(x), StepInputs(rotation, view, selects), selected)
        assert delta is not None and selected is not None, "the MTP layer has an indexer"
        x, normed = self._norm.add_then_norm(x, delta)
        return MtpOutput(normed if self._mtp.carries_normed else x, normed, selected)
