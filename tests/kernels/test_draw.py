"""Compares the op `draw` with an oracle in plain Python, token by token and without a margin."""

import decimal
import math
import random
from collections.abc import Callable

import pytest
import torch
from draw_oracle import Rule, draw_rules, token_of, weight_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotset.kernels.draw import SHORTLIST_TOKENS, WEIGHT_ONE, draw
from hotset.kernels.draw.reference import POWER_OF_TWO, weights_of

LARGEST = torch.finfo(torch.float32).max
ONE_ULP_BELOW_ONE = 1.0 - 2.0**-53


def any_row(rng: random.Random, vocab: int) -> Tensor:
    """Returns the logits of one request: dense, with many ties, spread over all magnitudes, or mostly excluded."""
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    row = torch.randn(vocab, generator=generator) * rng.choice([0.01, 1.0, 6.0])
    kind = rng.choice(["dense", "bfloat16", "few values", "equal", "one", "huge", "tiny", "excluded", "none"])
    match kind:
        case "bfloat16":
            row = row.bfloat16().float()
        case "few values":
            row = row.round() + rng.choice([0.0, 1e-6])
        case "equal":
            row.fill_(rng.choice([-0.0, 3.25, -LARGEST, LARGEST]))
        case "one":
            row[rng.randrange(vocab)] = 40.0
        case "huge":
            row = (row * 1e38).clamp(-LARGEST, LARGEST)
        case "tiny":
            row = row * 1e-42  # subnormal numbers, and zeros of both signs
        case "excluded":
            row[torch.rand(vocab, generator=generator) < rng.choice([0.5, 0.99])] = -math.inf
        case "none":
            row.fill_(-math.inf)
    return row


def any_rule(rng: random.Random, vocab: int) -> Rule:
    def sometimes(value: float, otherwise: float) -> float:
        return value if rng.random() < 0.5 else otherwise

    return Rule(
        temperature=rng.choice([1.0, 1.0, 0.7, 3.0, 10.0, 1e-3, 1.2e-38]),
        top_k=int(sometimes(rng.choice([1, 2, 20, rng.randint(1, vocab)]), vocab)),
        top_p=sometimes(rng.choice([0.9, 0.5, 1e-6, rng.random() or 1.0, ONE_ULP_BELOW_ONE]), 1.0),
        min_p=sometimes(rng.choice([0.05, 1e-9, rng.random(), 1.0]), 0.0),
        uniform=rng.choice([rng.random(), rng.random(), rng.random(), 0.0, ONE_ULP_BELOW_ONE]),
    )


def by_reference(x: Tensor, rules: list[Rule]) -> list[int]:
    columns, uniform = draw_rules(rules, x.shape[1])
    in_shortlist = bool((columns.top_k <= SHORTLIST_TOKENS).all())
    return draw(x, columns, uniform, in_shortlist=in_shortlist).tolist()


Draw = Callable[[Tensor, list[Rule]], list[int]]
with_each_op = pytest.mark.parametrize("draw_tokens", [pytest.param(by_reference, id="reference")])


@with_each_op
@pytest.mark.parametrize("vocab", [1, 2, 3, 100, 700])
def test_tokens_equal_those_of_the_oracle(draw_tokens: Draw, vocab: int) -> None:
    @settings(max_examples=25, deadline=None)
    @given(rng=st.integers(0, 1 << 40).map(random.Random), n=st.integers(1, 5))
    def check(rng: random.Random, n: int) -> None:
        rows, rules = [any_row(rng, vocab) for _ in range(n)], [any_rule(rng, vocab) for _ in range(n)]
        expected = [token_of(row, rule) for row, rule in zip(rows, rules, strict=True)]
        assert draw_tokens(torch.stack(rows), rules) == expected

    check()


@with_each_op
def test_every_token_is_drawn_from_its_own_interval_of_the_random_number(draw_tokens: Draw) -> None:
    row = torch.tensor([0.5, 2.0, -math.inf, 2.0, 1.0, 0.5])
    order = [1, 3, 4, 0, 5]
    weights = [weight_of(2.0 - float(row[token]), 1.0) for token in order]
    ends = [sum(weights[: i + 1]) / sum(weights) for i in range(len(order))]
    uniforms = [end + step for end in ends for step in (-1e-11, 1e-11)][:-1]
    found = draw_tokens(row.expand(len(uniforms), -1), [Rule(uniform=uniform) for uniform in uniforms])
    assert found == [1, 3, 3, 4, 4, 0, 0, 5, 5]


def test_weights_are_exponentials_rounded_down() -> None:
    decimal.getcontext().prec = 40
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(400, generator=generator) * 8
    x[:3] = torch.tensor([x.max(), -math.inf, -LARGEST])
    for temperature in (0.3, 1.0, 2.5):
        weights = weights_of(x[None], x.max().view(1, 1), torch.tensor([temperature], dtype=torch.float64))[0]
        assert weights[:3].tolist() == [WEIGHT_ONE, 0, 0]
        for logit, weight in zip(x[3:], weights[3:].tolist(), strict=True):
            exponent = decimal.Decimal(float(logit - x.max())) / decimal.Decimal(temperature)
            exact = exponent.exp() * WEIGHT_ONE
            assert abs(weight - exact) <= 1 + exact * decimal.Decimal("4e-10")


def test_coefficients_are_those_of_the_power_of_two() -> None:
    decimal.getcontext().prec = 40
    ln2 = decimal.Decimal(2).ln()
    assert tuple(float(ln2**i / math.factorial(i)) for i in range(9)) == POWER_OF_TWO


@pytest.mark.parametrize("temperature", [0.01, 1.0, 9.0])
def test_a_smaller_logit_never_has_a_larger_weight(temperature: float) -> None:
    """Neighbouring float32 numbers are the hardest case, above all where the number of halvings is rounded up."""
    top = torch.tensor([[20.0]])
    columns = torch.tensor([temperature], dtype=torch.float64)
    for halvings in (0.0, 1e-6, 0.25, 0.5, 1.5, 8.0, 25.5, 39.5):
        middle = torch.tensor(20.0 - halvings * temperature * math.log(2))
        neighbours = (middle.view(torch.int32) + torch.arange(-5000, 5000, dtype=torch.int32)).view(torch.float32)
        ordered = neighbours[neighbours <= 20.0].sort(descending=True).values
        weights = weights_of(ordered[None], top, columns)[0]
        assert bool((weights[1:] <= weights[:-1]).all())
