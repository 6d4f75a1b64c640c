"""On a GPU, rows for layers that share a selection are copied beside other kernels, from the lists of a swap-in plan.
Here these copies run as late as they may: when the layer waits for them."""

import weakref
from typing import Any

import pytest
import torch
from tiers.whole_numbers import Bench

from hotset.kernels.swap_in import RowCopies, SwapPlan
from hotset.memory.view import Selected
from hotset.tiers.hot_buffers import HotBuffers
from hotset.tiers.residence import Residence


class LateCopy:
    """A copy that has begun. Like a kernel, it has the addresses of its lists, but does not keep them alive."""

    count = 0

    def __init__(self, hot: HotBuffers, layer: int, swap: SwapPlan) -> None:
        copies = swap.copies
        self._hot, self._layer = hot, layer
        self._lists = [weakref.ref(tensor) for tensor in (copies.host_rows, copies.device_rows, copies.counts)]

    def end(self) -> None:
        lists = [tensor for reference in self._lists if (tensor := reference()) is not None]
        assert len(lists) == 3, "the memory of the lists was freed before the copy ended"
        self._hot.copy(self._layer, SwapPlan(torch.empty(0), RowCopies(*lists)))  # without the rows of attention
        LateCopy.count += 1


def end_copy(selected: Any) -> None:
    if selected.arrived is not None:
        selected.arrived.end()


def test_the_lists_of_a_plan_stay_until_the_layers_have_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HotBuffers, "prefetch", lambda *arguments: LateCopy(*arguments))
    monkeypatch.setattr(Selected, "wait", end_copy)
    LateCopy.count = 0
    bench = Bench(60, 120, tiers="always", slots=4 * (1 + 3) + 2, max_drafts=3)
    for number in range(3):
        bench.add(f"r{number}", 20 + number, 40)
    bench.finish()
    assert bench.compared[Residence.TIERED] and LateCopy.count > 20
    assert bench.engine.stats().bytes_swapped > 0
