"""Steps that the KV memory refuses, whether they are computed by a graph or not."""

import pytest
from tiers.whole_numbers import Bench

from hotset.base.errors import InternalError
from hotset.tiers.residence import Residence


def test_a_step_with_more_tokens_of_a_tiered_request_than_its_tail_holds_is_refused() -> None:
    bench = Bench(18, 80, tiers="always")
    request = bench.add("tiered", 20, 50)
    bench.run(until=lambda: request.holding.residence is Residence.TIERED)
    bench.step()
    seat, start = request.holding.seat, request.num_scheduled
    assert bench.memory.prepare_step([seat], [start], [1])
    with pytest.raises(InternalError, match="at most 1 tokens of a tiered request"):
        bench.memory.prepare_step([seat], [start], [2])
    bench.finish()
