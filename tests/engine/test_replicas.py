"""Tests which data parallel replica gets a new request."""

from typing import cast

import pytest
from schedule.prefix_loop import Loop, seed_tokens, tokens  # noqa: F401

from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.engine.core import Engine
from hotset.engine.input_processor import Choice, ModelCard
from hotset.engine.workers.executor import Executor


class Replicas:
    """An engine of several replicas that is never run."""

    def __init__(self, count: int) -> None:
        self.loops = [Loop() for _ in range(count)]
        schedulers = [loop.scheduler for loop in self.loops]
        self.engine = Engine(cast(ModelCard, None), schedulers, cast(Executor, None), plans_in_flight=1)

    def add(self, name: str, prompt: list[int]) -> int:
        """Returns the number of the replica that gets the request."""
        before = [loop.scheduler.open_requests for loop in self.loops]
        self.engine.add(Choice(name, 0, PromptSpec(tuple(prompt), SamplingParams(seed=0)), len(prompt) + 4))
        chosen = [loop.scheduler.open_requests - known for loop, known in zip(self.loops, before, strict=True)]
        assert sum(chosen) == 1
        return chosen.index(1)

    def run(self) -> None:
        for loop in self.loops:
            loop.run()


@pytest.mark.parametrize("count", [2, 4])
def test_a_request_goes_to_the_replica_with_its_prefix_unless_that_is_overloaded(count: int) -> None:
    replicas, prompts = Replicas(count), [tokens(60) for _ in range(count)]
    for number, prompt in enumerate(prompts):
        assert replicas.add(f"first {number}", prompt) == number, "without a known prefix, the load decides"
    replicas.run()
    for number in reversed(range(count)):
        assert replicas.add(f"second {number}", prompts[number] + tokens(8)) == number
        replicas.run()
    assert replicas.add("a small load", prompts[1][:30]) == 1
    assert replicas.add("third", prompts[1] + tokens(3)) == 1, "its replica has 30 more tokens, and 60 are saved"
    assert replicas.add("fourth", prompts[1] + tokens(4)) == 0, "its replica has 93 more tokens, and 60 are saved"
    replicas.run()


@pytest.mark.parametrize("count", [2, 4])
def test_a_request_goes_to_the_replica_whose_queued_requests_will_compute_its_prefix(count: int) -> None:
    replicas, prompt = Replicas(count), tokens(60)
    for number in range(count):
        replicas.add(f"load {number}", tokens(100 + number))
    assert replicas.add("first", prompt) == 0
    for number in range(1, count):
        assert replicas.add(f"filler {number}", tokens(40)) == number
    assert replicas.add("second", prompt) == 0, "its replica has at most 20 more tokens, and 56 are saved"
    replicas.run()
    assert replicas.loops[0].start("second") == 56
