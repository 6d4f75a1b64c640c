"""Rejection sampling: tokens have the model's distribution, and as many drafts are accepted as that allows.

The reference and the CUDA kernel, which a host compiler builds for the CPU, are compared with an oracle in plain
Python, token by token.
"""

import random
from collections.abc import Callable
from itertools import accumulate
from unittest import mock

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import needs_compiler
from draw_oracle import Rule as OracleRule
from draw_oracle import draw_rules, kept_tokens, key_of, shares_of, verified_token_of
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from test_draw import any_row, any_rule, with_poison
from torch import Tensor

from hotset.kernels import EMPTY, cuda_source
from hotset.kernels.draw import DRAWS_DRAFT, WEIGHT_ONE, DrawRules, accept_or_replace, cuda_impl, draw, draw_key
from hotset.kernels.draw.random_numbers import uniforms
from hotset.kernels.draw.reference import draw as draw_by
from hotset.kernels.draw.reference import kept_weights
from hotset.kernels.draw.rejection import ACCEPTS, REPLACES

RULES = {  # temperature, top_k, top_p, min_p
    "all tokens": (1.0, 12, 1.0, 0.0),
    "top_k": (1.0, 5, 1.0, 0.0),
    "top_p": (1.3, 12, 0.7, 0.0),
    "min_p": (1.0, 12, 1.0, 0.1),
    "all of them": (0.8, 6, 0.9, 0.02),
}
VOCAB = 12
with_each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
Rule = tuple[float, int, float, float]


def rules_of(rule: Rule, rows: int) -> DrawRules:
    temperature, top_k, top_p, min_p = rule
    whole, floats = torch.ones(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.float64)
    return DrawRules(floats * temperature, whole * top_k, floats * top_p, whole * int(min_p * WEIGHT_ONE))


def truncates(rule: Rule) -> bool:
    return rule[1:] != (VOCAB, 1.0, 0.0)


def random_logits(seed: int) -> Tensor:
    logits = 1.5 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[4] = logits[7]  # tied
    return logits


@with_each_rule
def test_kept_weights_are_those_with_which_tokens_are_drawn(rule: Rule) -> None:
    """Each token with a weight is drawn by a random number in the middle of its share, and their sum is the whole."""
    x = random_logits(3)
    (weights,) = kept_weights(x[None], rules_of(rule, 1), truncated=truncates(rule))
    order = sorted(range(VOCAB), key=lambda token: (-x[token], token))
    before, total = 0, int(weights.sum())
    for token in order:
        weight = int(weights[token])
        if weight:
            uniform = torch.tensor([(before + weight / 2) / total], dtype=torch.float64)
            assert int(draw_by(x[None], rules_of(rule, 1), uniform)) == token
        before += weight
    grid = torch.linspace(0, 1 - 1e-9, 4000, dtype=torch.float64)
    drawn = draw_by(x.expand(4000, -1), rules_of(rule, 4000), grid)
    assert {*drawn.tolist()} <= {token for token in range(VOCAB) if weights[token] > 0}


@with_each_rule
def test_tokens_have_the_distribution_of_the_model(rule: Rule) -> None:
    n = 60_000
    p_logits, q_logits = random_logits(1), random_logits(2)
    rules = rules_of(rule, n)
    keys = torch.tensor([draw_key(5)]) + torch.arange(n) * 7919
    positions = torch.arange(n) % 100
    drafts = draw(q_logits.expand(n, -1), rules, keys, positions + DRAWS_DRAFT)
    tokens = accept_or_replace(
        p_logits.expand(n, -1), q_logits.expand(n, -1), drafts, rules, keys, positions, truncated=truncates(rule)
    )
    p, q = (
        weights[0] / weights.sum()
        for weights in (kept_weights(x[None], rules_of(rule, 1), truncated=True) for x in (p_logits, q_logits))
    )
    for counted, expected in ((tokens, p), (drafts, q)):
        share = torch.bincount(counted, minlength=VOCAB) / n
        deviation = (expected * (1 - expected) / n).sqrt()
        assert ((share - expected).abs() <= 5 * deviation + 1e-12).all(), (share, expected)
    most = float(torch.minimum(p, q).sum())
    accepted = float((tokens == drafts).double().mean())
    assert abs(accepted - most) <= 5 * (most * (1 - most) / n) ** 0.5, (accepted, most)


def by_reference(*arguments: Tensor | DrawRules) -> Tensor:
    return accept_or_replace(*arguments, truncated=True)  # type: ignore[arg-type]


def by_cuda_on_cpu(x: Tensor, draft_logits: Tensor, *arguments: Tensor | DrawRules) -> Tensor:
    with mock.patch.object(cuda_source, "kernel", cuda_on_cpu.kernel):
        return cuda_impl.accept_or_replace(
            with_poison(x),
            with_poison(draft_logits),
            *arguments,
            cuda_impl.DrawTuning(threads=64),  # type: ignore[arg-type]
        )


def any_draft_row(rng: random.Random, row: Tensor) -> Tensor:
    """Returns logits of a drafting layer: often near those of the model, so that both kinds of results are frequent."""
    if rng.random() < 0.3:
        return any_row(rng, len(row))
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    noise = torch.randn(len(row), generator=generator) * rng.choice([0.0, 0.1, 2.0])
    return (row + noise).clamp(max=torch.finfo(torch.float32).max)


with_each_op = pytest.mark.parametrize(
    "op", [pytest.param(by_reference, id="reference"), pytest.param(by_cuda_on_cpu, id="cuda", marks=needs_compiler)]
)


@with_each_op
@pytest.mark.parametrize("vocab", [1, 2, 3, 100, 700, 5000])
def test_tokens_equal_those_of_the_oracle(op: Callable[..., Tensor], vocab: int) -> None:
    @examples(10 if vocab < 1000 else 3)
    @given(rng=st.integers(0, 1 << 40).map(random.Random), n=st.integers(1, 4))
    def check(rng: random.Random, n: int) -> None:
        rows, rules = [any_row(rng, vocab) for _ in range(n)], [any_rule(rng, vocab) for _ in range(n)]
        draft_rows = [any_draft_row(rng, row) for row in rows]
        arguments = draw_rules(rules, vocab)
        _, keys, positions = arguments
        drafts = []
        for row, rule in zip(draft_rows, rules, strict=True):
            kept = list(kept_tokens(row, rule))
            drafts.append(rng.choice([*kept[:3], rng.choice(kept or [0]), rng.randrange(vocab), EMPTY]))
        found = op(torch.stack(rows), torch.stack(draft_rows), torch.tensor(drafts), *arguments).tolist()
        numbers = [uniforms(keys, positions + number).tolist() for number in (ACCEPTS, REPLACES)]
        for i, draft in enumerate(drafts):
            if draft != EMPTY:
                random_numbers = numbers[0][i], numbers[1][i]
                assert found[i] == verified_token_of(rows[i], draft_rows[i], draft, rules[i], *random_numbers), i

    check()


@with_each_op
def test_every_replacement_has_its_own_interval_of_the_random_number(op: Callable[..., Tensor]) -> None:
    p, q = torch.tensor([0.5, -torch.inf, 2.0, 1.0, 0.5]), torch.tensor([-torch.inf, 3.0, -torch.inf, -1.0, -torch.inf])
    of_p, of_q = (shares_of(kept_tokens(logits, OracleRule())) for logits in (p, q))
    ends = list(accumulate(max(0, of_p.get(token, 0) - of_q.get(token, 0)) for token in range(5)))
    steps = [(ends[token] / ends[-1], step) for token in (0, 2, 3) for step in (-(2.0**-50), 2.0**-50)]
    numbers = [0.0, *(end + step for end, step in steps), 1.0 - 2.0**-53]
    n = len(numbers)
    keys = torch.tensor([key_of(number, 7 + REPLACES) for number in numbers])
    drafts, positions = torch.ones(n, dtype=torch.int64), torch.full((n,), 7)
    found = op(p.expand(n, -1), q.expand(n, -1), drafts, rules_of((1.0, 5, 1.0, 0.0), n), keys, positions)
    assert found.tolist() == [0, 0, 2, 2, 3, 3, 4, 4]


@with_each_op
def test_a_draft_is_accepted_up_to_the_ratio_of_its_probabilities(op: Callable[..., Tensor]) -> None:
    p, q = torch.tensor([0.0, 1.0, 0.3]), torch.tensor([1.0, 0.2, -1.0])
    of_p, of_q = (shares_of(kept_tokens(logits, OracleRule())) for logits in (p, q))
    ratio = of_p[0] / of_q[0]
    numbers = [0.0, ratio - 2.0**-50, ratio + 2.0**-50, 1.0 - 2.0**-53]
    keys = torch.tensor([key_of(number, 7 + ACCEPTS) for number in numbers])
    drafts, positions = torch.zeros(4, dtype=torch.int64), torch.full((4,), 7)
    found = op(p.expand(4, -1), q.expand(4, -1), drafts, rules_of((1.0, 3, 1.0, 0.0), 4), keys, positions)
    assert [token == 0 for token in found.tolist()] == [True, True, False, False]


@needs_compiler
def test_a_range_of_ids_can_have_more_tokens_than_a_block_has_threads() -> None:
    """There are 2048 ranges. With 64 threads, ids from 64 on of a range are looked at after the first 64."""
    vocab, first = 66 * 2048, 66 * 1000
    p, q = torch.full((1, vocab), -torch.inf), torch.full((1, vocab), -torch.inf)
    tokens = [3, *range(first + 60, first + 66)]
    p[0, tokens], q[0, 5] = 0.0, 0.0
    for place, token in enumerate(tokens):
        keys = torch.tensor([key_of((place + 0.5) / len(tokens), 7 + REPLACES)])
        rules, positions = rules_of((1.0, vocab, 1.0, 0.0), 1), torch.tensor([7])
        assert by_cuda_on_cpu(p, q, torch.tensor([5]), rules, keys, positions).tolist() == [token]


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "n"), [(100, 16), (3001, 128), (129_280, 1), (154_880, 96)])
def test_on_a_gpu_the_kernel_returns_the_tokens_of_the_reference(vocab: int, n: int) -> None:
    rng = random.Random(vocab + n)
    rows, rules = [any_row(rng, vocab) for _ in range(n)], [any_rule(rng, vocab) for _ in range(n)]
    x, draft_logits = torch.stack(rows), torch.stack([any_draft_row(rng, row) for row in rows])
    columns, keys, positions = draw_rules(rules, vocab)
    drafts = draw(draft_logits, columns, keys, positions + DRAWS_DRAFT)
    expected = by_reference(x, draft_logits, drafts, columns, keys, positions).tolist()
    arguments = draw_rules(rules, vocab, "cuda")
    on_gpu = x.cuda(), draft_logits.cuda(), drafts.cuda()
    for first, second in (on_gpu[:2], [with_poison(logits) for logits in on_gpu[:2]]):
        assert accept_or_replace(first, second, on_gpu[2], *arguments, truncated=True).tolist() == expected
