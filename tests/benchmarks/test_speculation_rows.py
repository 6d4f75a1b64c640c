"""The acceptance that benchmarks/speculation.py imposes."""

from speculation import SHARES, imposed_acceptance

from hotset.schedule.plan import Plan

DRAFTED = Plan(0, [], (0, 1, 2), (5, 6, 7), (4, 4, 1), (0, 0, 0, 0, 1, 1, 1, 1, 2), drafts={0: (1, 2, 3), 1: (4, 5, 6)})


def test_steps_with_three_drafts_add_two_point_six_five_tokens() -> None:
    kept = [0, 0, 0]
    with imposed_acceptance():
        for _ in range(4000):
            indices = DRAFTED.kept([0] * 9)
            for segment, first, last in ((0, 0, 4), (1, 4, 8), (2, 8, 9)):
                of_segment = [index for index in indices if first <= index < last]
                assert of_segment == list(range(first, first + len(of_segment))) and of_segment
                kept[segment] += len(of_segment)
    assert kept[2] == 4000
    for count in kept[:2]:
        assert abs(count / 4000 - (1 + sum(SHARES))) < 0.1
    assert DRAFTED.kept([0] * 9) == [0, 4, 8], "the engine's own rule is back"
