"""A wrapper for large models with random weights: prompts are not computed, and selections are synthetic."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.lab.simulate.recorder import ViewWrapper
from hotset.memory.device_pool import KvShape
from hotset.memory.view import Selected, View
from hotset.models.decoder import Decoder
from hotset.models.mtp import MtpOutput

# Shares of a step's selection: positions that every step, every third step and every twelfth step selects, and random
# positions. With LRU eviction and 1, 2 and 4 times top-k slots, 30, 13.4 and 6.7 % of top-k are missing, as published
# for GLM-5.1 on LongBench v2 at 100k tokens.
ALWAYS_SHARE, FREQUENT_SHARE, RARE_SHARE, RANDOM_SHARE = 0.70, 0.166, 0.067, 0.067
FREQUENT_PERIOD, RARE_PERIOD = 3, 12  # steps


@dataclass(frozen=True, slots=True)
class SyntheticSelection:
    """Selects top-k positions that depend only on the position of the query.

    Entry j of a selection is in [first[j], first[j] + period[j]). These ranges are disjoint, so no position is selected
    twice.
    """

    first: Tensor  # [topk] int64
    period: Tensor  # [topk] int64. 1: constant; FREQUENT_PERIOD, RARE_PERIOD: cyclic; larger: random within the range

    @staticmethod
    def constant(topk: int, device: torch.device) -> "SyntheticSelection":
        """Returns a selection that is the same at every step: no row is missing after the first step."""
        entries = torch.arange(topk, device=device)
        return SyntheticSelection(entries, torch.ones_like(entries))

    @staticmethod
    def with_published_misses(topk: int, min_context: int, device: torch.device) -> "SyntheticSelection":
        """Returns a selection for contexts of at least `min_context` tokens."""
        frequent, rare, random = (round(share * topk) for share in (FREQUENT_SHARE, RARE_SHARE, RANDOM_SHARE))
        constant = topk - frequent - rare - random
        random_range = (min_context - constant - frequent * FREQUENT_PERIOD - rare * RARE_PERIOD) // random
        assert random_range > 4 * RARE_PERIOD, f"contexts of {min_context} tokens are too short for a top-k of {topk}"
        period = torch.tensor(
            [1] * constant + [FREQUENT_PERIOD] * frequent + [RARE_PERIOD] * rare + [random_range] * random
        )
        period = period[torch.randperm(topk, generator=torch.Generator().manual_seed(0))]
        return SyntheticSelection((torch.cumsum(period, 0) - period).to(device), period.to(device))

    def positions(self, queries: Tensor) -> Tensor:
        """Returns the selections [tokens, topk] of queries at the positions `queries` [tokens]."""
        entries = torch.arange(self.first.shape[0], device=queries.device)
        step = queries[:, None]
        cyclic = step + entries
        random = ((step * 0x9E3779B1 + entries * 0x85EBCA6B) * 0x27D4EB2F165667C5) >> 33 & 0x3FFFFFFF
        offset = torch.where(self.period > RARE_PERIOD, random, cyclic)
        return self.first + offset % self.period


class SelectionOverride(ViewWrapper):
    """Ignores the positions that the indexer selected and reads the rows at other positions."""

    def __init__(self, inner: View, positions: Tensor) -> None:
        super().__init__(inner)
        self._positions = positions

    def select(self, layer: int, positions: Tensor) -> Selected:
        return self._inner.select(layer, self._positions)


class SyntheticPrefillModel:
    """Runs the decoder in steps that only decode. In a step with a prompt, stores random rows for all tokens.

    If the decoder has an MTP layer, the model drafts with it. The rows of prompts in this layer are random, too.
    """

    def __init__(self, decoder: Decoder, selection: SyntheticSelection | None, max_step_tokens: int) -> None:
        """`selection` replaces the indexer's selection, unless it is None."""
        self._decoder = decoder
        self._selection = selection
        self.device, self.dtype = decoder.device, decoder.dtype
        self.kv_shape: KvShape = decoder.kv_shape
        shape = self.kv_shape
        assert shape.key is not None, "the model must have an indexer"
        self._rows = torch.randn(max_step_tokens, shape.row.width, device=self.device).to(shape.row.dtype)
        self._keys = torch.randn(max_step_tokens, shape.key.width, device=self.device).to(shape.key.dtype)
        self._empty_selection = torch.full((1, shape.topk), EMPTY, device=self.device)

    def forward(self, token_ids: Tensor, view: View) -> Tensor:
        if view.segments.decoding:
            if self._selection is not None:
                view = SelectionOverride(view, self._selection.positions(view.segments.positions))
            return self._decoder.forward(token_ids, view)
        count = token_ids.shape[0]
        for group in range(self.kv_shape.groups):
            view.keys(group).store(view.segments.positions, self._keys[:count])
            for layer in self.kv_shape.layers_of(group):
                view.new_rows(layer).store(self._rows[:count])
                view.select(layer, self._empty_selection.expand(count, -1)).wait()
        return torch.zeros(count, self._decoder.hidden, dtype=self.dtype, device=self.device)

    def logits(self, hidden: Tensor, indices: Tensor | None) -> Tensor:
        return self._decoder.logits(hidden, indices)

    def mtp_input(self, x: Tensor) -> Tensor:
        return self._decoder.mtp_input(x)

    def run_mtp(self, token_ids: Tensor, hidden: Tensor, view: View, selected: Tensor | None = None) -> MtpOutput:
        if view.segments.decoding:
            assert self._selection is not None
            view = SelectionOverride(view, self._selection.positions(view.segments.positions))
            return self._decoder.run_mtp(token_ids, hidden, view, selected)
        count = token_ids.shape[0]  # `forward` has stored the rows of this layer, too
        return MtpOutput(hidden, hidden, self._empty_selection.expand(count, -1))

    def mtp_logits(self, normed: Tensor) -> Tensor:
        return self._decoder.mtp_logits(normed)
