"""Compares route with plain Python: groups, ties, weights, padded tokens.

Tests without a marker run with the reference. With TRITON_INTERPRET=1 they run with the Triton kernels on CPU tensors
instead (see test_interpreted.py).
"""

import pytest
import torch
from examples import examples
from hypothesis import Phase, given
from hypothesis import strategies as st
from interpreted import INTERPRETED
from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels import EMPTY
from hotset.kernels.fast_path import kernels_of
from hotset.kernels.route import MAX_EXPERTS, Routes, RoutingRule, reference, route

# The interpreter is slow: few examples, and no shrinking of failing ones.
EXAMPLES = examples(6, phases=[Phase.generate]) if INTERPRETED else examples(60)
pytestmark = pytest.mark.usefixtures("poisoned_memory")

# The sigmoids of these logits differ by much more than rounding errors. Only those of the last two are equal (1.0).
LEVELS = [*(step / 2 for step in range(-6, 7)), 30.0, 40.0]

PLAIN = RoutingRule(64, 6, scale=2.5)
GROUPED = RoutingRule(256, 8, groups=8, topk_group=4, scale=2.5)
ODD = RoutingRule(60, 5, groups=5, topk_group=2, normalise=False)


@st.composite
def rules(draw: st.DrawFn) -> RoutingRule:
    groups = draw(st.integers(1, 5))
    group_size = draw(st.integers(2, 7))
    topk_group = draw(st.integers(1, groups))
    experts_per_token = draw(st.integers(1, topk_group * group_size))
    normalise, scale = draw(st.booleans()), draw(st.sampled_from([1.0, 2.5]))
    return RoutingRule(groups * group_size, experts_per_token, groups, topk_group, normalise, scale)


def top_keys(scores: dict[int, float], count: int) -> list[int]:
    """Returns the keys of the `count` largest scores in ascending order. Among equal scores, the lower key wins."""
    return sorted(sorted(scores, key=lambda key: (-scores[key], key))[:count])


def route_in_plain_python(logits: Tensor, correction: Tensor, rule: RoutingRule) -> tuple[list[int], list[float]]:
    """Returns the experts and weights of one token."""
    scores = torch.sigmoid(logits)
    corrected = dict(enumerate((scores + correction).tolist()))
    size = rule.experts // rule.groups
    members = {group: range(group * size, (group + 1) * size) for group in range(rule.groups)}
    group_scores = {
        group: float(torch.tensor(sorted((corrected[e] for e in ids), reverse=True)[:2], dtype=logits.dtype).sum())
        for group, ids in members.items()
    }
    allowed = top_keys(group_scores, rule.topk_group) if rule.groups > 1 else [0]
    chosen = top_keys({e: corrected[e] for group in allowed for e in members[group]}, rule.experts_per_token)
    weights = [float(scores[e]) for e in chosen]
    total = sum(weights) if rule.normalise else 1.0
    return chosen, [weight / total * rule.scale for weight in weights]


def select(logits: Tensor, correction: Tensor, rule: RoutingRule, seats: Tensor | None = None) -> Routes:
    """Runs the implementation under test."""
    if INTERPRETED:
        partial = torch.stack((logits - 1, torch.ones_like(logits)))  # the sum of both parts is exact
        routes: Routes = kernels_of("route").select_experts(partial, correction, rule, seats)
        return routes
    return reference.select_experts(logits, correction, rule, seats)


def draw_logits(tokens: int, rule: RoutingRule, levels: int) -> tuple[Tensor, Tensor]:
    """Draws logits with few different values, so that there are many ties between experts and between groups."""
    logits = torch.tensor(LEVELS)[torch.randint(len(LEVELS) - levels, len(LEVELS), (tokens, rule.experts))]
    correction = torch.randint(0, 2, (rule.experts,)) * 0.375
    return logits, correction


@EXAMPLES
@given(rules(), st.integers(1, 5), st.integers(1, len(LEVELS)), st.integers(0, 2**31))
def test_experts_and_weights_equal_plain_python(rule: RoutingRule, tokens: int, levels: int, seed: int) -> None:
    torch.manual_seed(seed)
    logits, correction = draw_logits(tokens, rule, levels)
    routes = select(logits, correction, rule)
    for token in range(tokens):
        chosen, weights = route_in_plain_python(logits[token], correction, rule)
        assert routes.expert_ids[token].tolist() == chosen
        torch.testing.assert_close(routes.weights[token], torch.tensor(weights), rtol=1e-5, atol=1e-7)


def test_padded_tokens_go_to_no_expert() -> None:
    rule = RoutingRule(8, 3, groups=2, topk_group=1)
    logits, correction = draw_logits(4, rule, 5)
    unpadded = select(logits, correction, rule)
    seats = torch.tensor([3, EMPTY, 0, EMPTY])
    routes = select(logits, correction, rule, seats)
    assert (routes.expert_ids[1::2] == EMPTY).all() and not routes.weights[1::2].any()
    assert torch.equal(routes.expert_ids[::2], unpadded.expert_ids[::2])
    assert torch.equal(routes.weights[::2], unpadded.weights[::2])


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter
def test_a_token_whose_logits_are_nan_goes_to_no_expert_of_any_group() -> None:
    nan = float("nan")
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.0], [nan] * 4, [nan, 3.0, 1.0, 2.0], [5.0, 6.0, nan, nan]])
    routes = select(logits, torch.zeros(4), RoutingRule(4, 2, groups=2, topk_group=1))
    assert routes.expert_ids.tolist() == [[0, 1], [EMPTY, EMPTY], [2, 3], [0, 1]]
    assert not routes.weights[1].any() and bool(routes.weights.isfinite().all())


@pytest.mark.parametrize(("hidden", "experts", "tokens"), [(8, 3, 1), (100, 5, 20), (200, 70, 3)])
def test_logits_are_products_with_the_router(hidden: int, experts: int, tokens: int) -> None:
    torch.manual_seed(hidden)
    x, router = torch.randn(tokens, hidden + 3)[:, :hidden], torch.randn(experts, hidden)
    correction, rule = torch.randn(experts), RoutingRule(experts, experts - 1)
    expected = reference.select_experts((x.double() @ router.double().t()).float(), correction, rule, None)
    routes = (kernels_of("route").route if INTERPRETED else reference.route)(x, router, correction, rule, None)
    assert torch.equal(routes.expert_ids, expected.expert_ids)
    torch.testing.assert_close(routes.weights, expected.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [PLAIN, GROUPED, ODD, RoutingRule(8, 2), RoutingRule(512, 10)], ids=str)
@pytest.mark.parametrize("levels", [2, len(LEVELS)])
def test_on_a_gpu_ties_are_broken_as_in_the_reference(rule: RoutingRule, levels: int) -> None:
    torch.manual_seed(levels)
    logits, correction = draw_logits(333, rule, levels)
    seats = torch.arange(333) % 7 - 1
    expected = reference.select_experts(logits, correction, rule, seats)
    partial = torch.stack((logits - 1, torch.ones_like(logits))).cuda()
    routes = kernels_of("route").select_experts(partial, correction.cuda(), rule, seats.cuda())
    assert torch.equal(routes.expert_ids.cpu(), expected.expert_ids)
    torch.testing.assert_close(routes.weights.cpu(), expected.weights, rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 77, 512, 1500])
@pytest.mark.parametrize(
    ("rule", "hidden", "dtype"),
    [(PLAIN, 4096, torch.bfloat16), (GROUPED, 7168, torch.bfloat16), (ODD, 250, torch.float32)],
    ids=str,
)
def test_on_a_gpu_routes_equal_float64(rule: RoutingRule, hidden: int, dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 2, hidden, device="cuda").to(dtype)[:, 1]  # not contiguous
    router = torch.randn(rule.experts, hidden, device="cuda") * hidden**-0.5
    correction = torch.rand(rule.experts, device="cuda") * 0.1
    routes = route(x, router, correction, rule)
    exact = reference.select_experts(x.double() @ router.double().t(), correction.double(), rule, None)
    # If two scores differ only in the seventh digit, float32 may rank them the other way round.
    same = (routes.expert_ids == exact.expert_ids).all(1)
    assert float(same.float().mean()) > 0.99 or (tokens < 100 and int((~same).sum()) <= 1)
    torch.testing.assert_close(routes.weights[same], exact.weights[same].float(), rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
def test_on_a_gpu_a_token_has_the_same_route_in_every_decode_batch() -> None:
    x, router = torch.randn(512, 4096, device="cuda").bfloat16(), torch.randn(64, 4096, device="cuda") / 64
    correction = torch.zeros(64, device="cuda")
    whole = route(x, router, correction, PLAIN)
    for tokens in (1, 16, 100):
        part = route(x[:tokens], router, correction, PLAIN)
        assert torch.equal(part.expert_ids, whole.expert_ids[:tokens])
        assert torch.equal(part.weights, whole.weights[:tokens])


@pytest.mark.gpu
def test_on_a_gpu_too_many_experts_are_refused_before_launch() -> None:
    experts = MAX_EXPERTS + 1
    router = torch.randn(experts, 8, device="cuda")
    with pytest.raises(ConfigError, match=f"{experts} experts are more than the {MAX_EXPERTS}"):
        route(torch.randn(2, 8, device="cuda"), router, router[:, 0], RoutingRule(experts, 2))
