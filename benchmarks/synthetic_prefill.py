"""A large model with made-up weights, whose prompts land instead of being computed, and what it selects."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.memory.device_pool import KvShape
from hotset.memory.view import Selected, View, ViewWrapper
from hotset.models.decoder import Decoder

# Share of a step's positions, and every how many steps each comes again. Least recently used, these miss 30 %, 13.4 %
# and 6.7 % of top-k with 1, 2 and 4 times top-k slots: as published for GLM-5.1 on LongBench v2 at 100k tokens.
ALWAYS, OFTEN, SELDOM, NEVER_AGAIN = 0.70, 0.166, 0.067, 0.067
OFTEN_EVERY, SELDOM_EVERY = 3, 12


@dataclass(frozen=True, slots=True)
class Selection:
    """Top-k positions of each query row, by its position alone. Place j of the list has positions of its own, so none
    occurs twice: [first[j], first[j] + among[j])."""

    first: Tensor  # [topk] int64
    among: Tensor  # [topk] int64: 1: always the same, OFTEN_EVERY and SELDOM_EVERY: in turn, more: at random

    @staticmethod
    def still(topk: int, device: torch.device) -> "Selection":
        """The same positions at every step: after the first nothing is missing."""
        place = torch.arange(topk, device=device)
        return Selection(place, torch.ones_like(place))

    @staticmethod
    def make(topk: int, shortest: int, device: torch.device) -> "Selection":
        """For contexts that are never shorter than `shortest`."""
        often, seldom, new = (round(share * topk) for share in (OFTEN, SELDOM, NEVER_AGAIN))
        kept = topk - often - seldom - new
        wide = (shortest - kept - often * OFTEN_EVERY - seldom * SELDOM_EVERY) // new
        assert wide > 4 * SELDOM_EVERY, f"contexts of {shortest} tokens are too short to select {topk} positions from"
        among = torch.tensor([1] * kept + [OFTEN_EVERY] * often + [SELDOM_EVERY] * seldom + [wide] * new)
        among = among[torch.randperm(topk, generator=torch.Generator().manual_seed(0))]
        return Selection((torch.cumsum(among, 0) - among).to(device), among.to(device))

    def at(self, positions: Tensor) -> Tensor:  # [rows] -> [rows, topk]
        place = torch.arange(self.first.shape[0], device=positions.device)
        step = positions[:, None]
        in_turn = step + place
        at_random = ((step * 0x9E3779B1 + place * 0x85EBCA6B) * 0x27D4EB2F165667C5) >> 33 & 0x3FFFFFFF
        turn = torch.where(self.among > SELDOM_EVERY, at_random, in_turn)
        return self.first + turn % self.among


class SelectionOverride(ViewWrapper):
    """Ignores the positions that the indexer selected and reads the rows at other positions."""

    def __init__(self, inner: View, positions: Tensor) -> None:
        super().__init__(inner)
        self._positions = positions

    def select(self, layer: int, positions: Tensor) -> Selected:
        return self._inner.select(layer, self._positions)


class LandedModel:
    """A decoder that computes steps which only decode. Where a prompt is in the step, everybody's rows are made up."""

    def __init__(self, decoder: Decoder, selection: Selection | None, most_rows: int) -> None:
        """`selection`: what is read instead of the indexer's choice; None: that choice."""
        self._decoder = decoder
        self._selection = selection
        self.device = decoder.device
        self.kv_shape: KvShape = decoder.kv_shape
        shape = self.kv_shape
        assert shape.key is not None, "a model that selects"
        self._rows = torch.randn(most_rows, shape.row.width, device=self.device).to(shape.row.dtype)
        self._keys = torch.randn(most_rows, shape.key.width, device=self.device).to(shape.key.dtype)
        self._nothing = torch.full((1, shape.topk), EMPTY, device=self.device)

    def forward(self, token_ids: Tensor, view: View, wanted: Tensor | None) -> Tensor:
        if view.segments.decoding:
            if self._selection is not None:
                view = SelectionOverride(view, self._selection.at(view.segments.positions))
            return self._decoder.forward(token_ids, view, wanted)
        count = token_ids.shape[0]
        for group in range(self.kv_shape.groups):
            view.keys(group).store(view.segments.positions, self._keys[:count])
            for layer in self.kv_shape.layers_of(group):
                view.new_rows(layer).store(self._rows[:count])
                view.select(layer, self._nothing.expand(count, -1))
        sampled = count if wanted is None else wanted.shape[0]
        return torch.zeros(sampled, self._decoder.spec.vocab, device=self.device)
