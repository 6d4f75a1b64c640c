"""One worker's part of a model, as its runner sees it: activations come from the stage before and go to the next."""

from typing import Protocol

import torch
from torch import Tensor

from hotset.memory.device_pool import KvShape
from hotset.memory.view import View
from hotset.models.collectives import Collectives
from hotset.models.decoder import Decoder


class World(Protocol):
    """One worker's way to the others."""

    collectives: Collectives  # those that share its stage, or hold other requests

    def send(self, x: Tensor, to: int) -> None:
        """To worker number `to`, which receives it."""

    def receive(self, x: Tensor, source: int) -> None:
        """Fills `x` with what worker number `source` sends next."""


class Stage:
    """Implements the runner's `Model`. `before` and `after`: numbers of the workers beside it; None: it is the end."""

    def __init__(self, decoder: Decoder, world: World, before: int | None, after: int | None) -> None:
        self._decoder, self._world, self._before, self._after = decoder, world, before, after
        self.device, self.dtype, self.vocab = decoder.device, decoder.dtype, decoder.spec.vocab

    @property
    def kv_shape(self) -> KvShape:
        return self._decoder.kv_shape

    def forward(self, token_ids: Tensor, view: View, wanted: Tensor | None) -> Tensor | None:
        """Logits, at the last stage; None at all others."""
        if self._before is None:
            x = self._decoder.embed(token_ids)
        else:
            x = torch.empty(len(token_ids), self._decoder.hidden, dtype=self.dtype, device=self.device)
            self._world.receive(x, self._before)
        x = self._decoder.through(x, view)
        if self._after is None:
            return self._decoder.logits(x, wanted)
        self._world.send(x, self._after)
        return None

    def idle_moe_step(self) -> None:
        """Other replicas compute rows in this step, and this one none."""
        self._decoder.idle_moe_step()
