"""Steps that the KV memory refuses, whether they are computed by a graph or not, and what releasing slots changes."""

import pytest
import torch
from tiers.whole_numbers import Bench

from hotset.base.errors import InternalError
from hotset.kernels import EMPTY
from hotset.tiers.residence import Residence


def test_a_step_with_more_tokens_of_a_tiered_request_than_its_tail_holds_is_refused() -> None:
    bench = Bench(18, 80, tiers="always")
    request = bench.add("tiered", 20, 8)
    bench.run(until=lambda: request.holding.residence is Residence.TIERED)
    bench.step()
    seat, start = request.holding.seat, request.num_scheduled
    assert bench.memory.prepare_step([seat], [start], [1])
    with pytest.raises(InternalError, match="computes 2 tokens of a tiered request, more than 1"):
        bench.memory.prepare_step([seat], [start], [2])
    bench.finish()


def test_releasing_used_slots_changes_only_the_stamps_of_tiered_seats() -> None:
    """Other seats have no maps. Without a check, their maps would begin at the first word of the pool."""
    bench = Bench(18, 80, tiers="always")
    request = bench.add("tiered", 20, 8)
    bench.run(until=lambda: request.holding.residence is Residence.TIERED)
    bench.step()
    hot_buffers, tiered = bench.memory.hot_buffers, request.holding.seat
    assert hot_buffers is not None
    last_used = hot_buffers.maps(tiered, 0)[1]
    words, stamp = bench.memory.pool.words_of(0), max(last_used)
    other = 1 - tiered
    kept, words[0] = words[0].clone(), stamp
    hot_buffers.release_used(0, torch.tensor([other, EMPTY, tiered]), torch.tensor([stamp] * 3))
    assert words[0] == stamp, "a word of another request was changed"
    assert hot_buffers.maps(tiered, 0)[1] == [used - (used == stamp) for used in last_used]
    words[0] = kept
    bench.finish()
