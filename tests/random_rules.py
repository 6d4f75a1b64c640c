"""State machines that choose their rules at random. An example depends on its seed alone.

Examples of Hypothesis also depend on the constants in all modules that are loaded. If a test requires certain events
within a limited number of such examples, it can begin to fail after the change of an unrelated module.
"""

from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

Rule = TypeVar("Rule", bound=Callable[[Any], None])
WEIGHTS = (0.1, 0.5, 1, 2)  # of rules


class RandomMachine:
    """Subclasses have methods that are marked with `rule`."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def check(self) -> None:
        """Called before the first rule and after every rule."""

    def finish(self) -> None:
        """Called after the last rule."""

    def flip(self) -> bool:
        return self.random.random() < 0.5


def rule(possible: Callable[[Any], object] = lambda machine: True) -> Callable[[Rule], Rule]:
    """Marks a method that changes the state of a machine. It is called only if `possible` returns a true value."""

    def mark(method: Rule) -> Rule:
        method.possible = possible  # type: ignore[attr-defined]
        return method

    return mark


def run_example(machine: type[RandomMachine], seed: int, rules: int) -> None:
    """Applies `rules` random rules to a new machine, or fewer if none is possible. Rules have random weights."""
    try:
        example = machine(Random(seed))
        methods = [method for method in vars(machine).values() if hasattr(method, "possible")]
        weights = {method: example.random.choice(WEIGHTS) for method in methods}
        example.check()
        for _ in range(rules):
            if not (possible := [method for method in methods if method.possible(example)]):
                break
            [method] = example.random.choices(possible, [weights[method] for method in possible])
            method(example)
            example.check()
        example.finish()
    except BaseException as error:
        error.add_note(f"seed {seed} of {machine.__name__}")
        raise
