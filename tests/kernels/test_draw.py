"""Compares the op `draw` with an oracle in plain Python, token by token and without a margin.

Most tests run with the reference and with the CUDA kernel, which a host compiler builds for the CPU.
"""

import decimal
import math
import random
import re
from collections.abc import Callable
from unittest import mock

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import needs_compiler
from draw_oracle import Rule, draw_rules, token_of, weight_of
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hotset.kernels import cuda_source
from hotset.kernels.draw import WEIGHT_ONE, cuda_impl, draw, leading, reference
from hotset.kernels.draw.random_numbers import uniforms
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
    return draw(x, *draw_rules(rules, x.shape[1])).tolist()


def by_cuda_on_cpu(x: Tensor, rules: list[Rule], threads: int = 64) -> list[int]:
    arguments = draw_rules(rules, x.shape[1])
    with mock.patch.object(cuda_source, "kernel", cuda_on_cpu.kernel):
        return cuda_impl.draw(with_poison(x), *arguments, cuda_impl.DrawTuning(threads)).tolist()


def with_poison(x: Tensor) -> Tensor:
    """Returns a copy of `x` in memory with a NaN before and two after the logits of every request."""
    n, vocab = x.shape
    memory = torch.full((n, vocab + 3), math.nan, device=x.device)
    memory[:, 1 : vocab + 1] = x
    return memory[:, 1 : vocab + 1]


Draw = Callable[[Tensor, list[Rule]], list[int]]
with_each_op = pytest.mark.parametrize(
    "draw_tokens",
    [pytest.param(by_reference, id="reference"), pytest.param(by_cuda_on_cpu, id="cuda", marks=needs_compiler)],
)


@with_each_op
@pytest.mark.parametrize("vocab", [1, 2, 3, 100, 700])
def test_tokens_equal_those_of_the_oracle(draw_tokens: Draw, vocab: int) -> None:
    @examples(10)
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


@needs_compiler
@pytest.mark.parametrize("vocab", [1, 100, 700])
def test_the_leading_tokens_are_a_prefix_of_the_stable_sort(vocab: int) -> None:
    rng = random.Random(vocab)
    for count in {1, min(vocab, 20), min(vocab, 512)}:
        x = torch.stack([any_row(rng, vocab) for _ in range(12)])
        expected = x.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        assert torch.equal(leading(x, count), expected)
        with mock.patch.object(cuda_source, "kernel", cuda_on_cpu.kernel):
            found = cuda_impl.leading(with_poison(x), count, cuda_impl.DrawTuning(threads=64))
        assert torch.equal(found, expected)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("threads", [64, 256, 1024])
def test_blocks_of_every_size_draw_the_tokens_of_the_oracle(threads: int) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        vocab = rng.choice([100, 1023, 1024, 1025, 3000])
        rows, rules = [any_row(rng, vocab) for _ in range(4)], [any_rule(rng, vocab) for _ in range(4)]
        expected = [token_of(row, rule) for row, rule in zip(rows, rules, strict=True)]
        assert by_cuda_on_cpu(torch.stack(rows), rules, threads) == expected


@needs_compiler
def test_a_vocabulary_of_equal_logits_is_divided_by_ids() -> None:
    """No histogram over logits separates these tokens, and 5000 ids need two histograms."""
    vocab = 5000
    places = [0, 1, 2047, 2048, 3777, 4999]
    rules = [Rule(uniform=(place + 0.5) / vocab) for place in places]
    rules += [Rule(uniform=0.999, top_k=place + 1) for place in places]
    rules += [Rule(uniform=0.99, top_p=(place + 0.5) / vocab, temperature=3.0) for place in places[:2]]
    assert by_cuda_on_cpu(torch.full((len(rules), vocab), -2.5), rules) == [
        token_of(torch.full((vocab,), -2.5), rule) for rule in rules
    ]


def test_kernel_and_reference_have_the_same_coefficients() -> None:
    listed = re.search(r"coefficients\[\] = \{(.*?)\}", (cuda_impl.DRAW.parent / "places.cu").read_text(), re.DOTALL)
    assert listed is not None
    assert tuple(float(number) for number in listed[1].split(",") if number.strip()) == POWER_OF_TWO


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "n"), [(100, 16), (3001, 128), (129_280, 1), (129_280, 128), (154_880, 256)])
def test_on_a_gpu_the_kernel_draws_the_tokens_of_the_reference_on_both_devices(vocab: int, n: int) -> None:
    rng = random.Random(vocab + n)
    x = torch.stack([any_row(rng, vocab) for _ in range(n)])
    rules = [any_rule(rng, vocab) for _ in range(n)]
    expected = by_reference(x, rules)
    columns, keys, positions = draw_rules(rules, vocab, "cuda")
    on_gpu = x.cuda()
    assert reference.draw(on_gpu, columns, uniforms(keys, positions)).tolist() == expected
    assert draw(on_gpu, columns, keys, positions).tolist() == expected
    assert draw(with_poison(on_gpu), columns, keys, positions).tolist() == expected
    count = min(vocab, 20)
    assert torch.equal(leading(on_gpu, count).cpu(), reference.leading(x, count).ids)


@pytest.mark.gpu
def test_on_a_gpu_a_graph_draws_from_the_logits_that_it_finds() -> None:
    rng, vocab, n = random.Random(5), 20_000, 8
    rules = [any_rule(rng, vocab) for _ in range(n)]
    columns, keys, positions = draw_rules(rules, vocab, "cuda")
    x = torch.zeros(n, vocab, device="cuda")
    draw(x, columns, keys, positions)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = draw(x, columns, keys, positions)
    for _ in range(3):
        rows = torch.stack([any_row(rng, vocab) for _ in range(n)])
        x.copy_(rows)
        graph.replay()
        assert tokens.tolist() == by_reference(rows, rules)


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
