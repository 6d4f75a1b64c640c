"""benchmarks/speculation.py imposes the rate at which drafts are accepted."""

import torch
from speculation import SHARES, imposed_acceptance

from hotset.engine.drafts.segments import SampledSegments, SeatDrafts
from hotset.schedule.plan import Plan

DRAFTS = {0: (1, 2, 3), 1: (4, 5, 6)}
PLAN = Plan(0, [], (0, 1, 2), (5, 6, 7), (4, 4, 1), (0, 0, 0, 0, 1, 1, 1, 1, 2), drafts=DRAFTS, draft_limits=(9, 9, 9))


def test_imposed_acceptance_adds_its_expected_number_of_tokens_and_ends_with_the_block() -> None:
    table = SampledSegments(PLAN, SeatDrafts(3, 3, torch.device("cpu"))).on_device
    accepted, sampled = torch.zeros(3), torch.zeros(9, dtype=torch.int64)
    torch.manual_seed(1)
    with imposed_acceptance():
        for _ in range(4000):
            accepted += table.accepted(sampled)
    assert accepted[2] == 0, "it has no drafts"
    assert (accepted[:2] / 4000 - sum(SHARES)).abs().max() < 0.1
    assert table.accepted(sampled).tolist() == [0, 0, 0], "the engine's own rule is back"
