"""Sampled tokens equal those of an independent oracle and do not depend on batch, preemption or device."""

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hotset.base.sampling import SamplingParams
from hotset.kernels import EMPTY
from hotset.kernels.draw import DRAWS_DRAFT, WEIGHT_ONE, DrawRules, draw_key
from hotset.kernels.draw.random_numbers import uniforms
from hotset.kernels.draw.reference import SHORTLIST_TOKENS, _choose, draw, leading
from hotset.models.sampler import DrawnDrafts, Sampler, SamplerOutput, TokenMasks
from tests.models import sampling_oracle as oracle

CPU = torch.device("cpu")
NO_STOPS: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Request:
    params: SamplingParams
    token_ids: list[int]
    prompt_length: int
    stop_ids: frozenset[int] = NO_STOPS

    def followed_by(self, token: int) -> "Request":
        return replace(self, token_ids=[*self.token_ids, token])


def seated(requests: list[Request], vocab: int, device: torch.device = CPU) -> Sampler:
    sampler = Sampler(len(requests), vocab, device)
    for seat, request in enumerate(requests):
        admit(sampler, seat, request)
    return sampler


def admit(sampler: Sampler, seat: int, request: Request) -> None:
    sampler.admit(seat, request.params, request.token_ids, request.prompt_length, request.stop_ids)


def positions_of(requests: list[Request]) -> Tensor:
    return torch.tensor([len(request.token_ids) for request in requests])


def sample_all(requests: list[Request], logits: Tensor) -> SamplerOutput:
    sampler = seated(requests, logits.shape[1], logits.device)
    return sampler.sample(logits, range(len(requests)), positions_of(requests).to(logits.device))


def sample_one(logits: list[float] | Tensor, position: int = 0, **params: object) -> int:
    row = torch.as_tensor(logits).unsqueeze(0)
    request = Request(SamplingParams(**{"seed": 0, **params}), [0] * position, 0)  # type: ignore[arg-type]
    return int(sample_all([request], row).token_ids)


def any_params(rng: random.Random, vocab: int) -> SamplingParams:
    def sometimes(value: object, otherwise: object) -> object:
        return value if rng.random() < 0.4 else otherwise

    bias = {token: rng.uniform(-3, 3) for token in rng.sample(range(vocab), min(vocab, 3))}
    fields = {
        "temperature": rng.choice([0.0, 0.05, 0.7, 1.0, 1.0, 3.0]),
        "top_k": sometimes(rng.randint(1, vocab + 2), 0),
        "top_p": sometimes(rng.uniform(0.01, 1.0), 1.0),
        "min_p": sometimes(rng.uniform(0.0, 0.5), 0.0),
        "repetition_penalty": sometimes(rng.uniform(0.5, 2.0), 1.0),
        "presence_penalty": sometimes(rng.uniform(-2.0, 2.0), 0.0),
        "frequency_penalty": sometimes(rng.uniform(-2.0, 2.0), 0.0),
        "seed": rng.randint(-(1 << 63), (1 << 63) - 1),
        "max_tokens": None,
        "min_tokens": sometimes(rng.randint(1, 6), 0),
        "logit_bias": sometimes(bias, None),
        "logprobs": sometimes(rng.randint(0, 20), None),
    }
    return SamplingParams(**fields)  # type: ignore[arg-type]


def any_request(rng: random.Random, vocab: int) -> Request:
    token_ids = [rng.randrange(vocab) for _ in range(rng.randint(1, 8))]
    stop_ids = frozenset(rng.sample(range(vocab), min(vocab, rng.randint(0, 2))))
    return Request(any_params(rng, vocab), token_ids, rng.randint(1, len(token_ids)), stop_ids)


def any_logits(rng: random.Random, vocab: int) -> list[float]:
    spread, digits = rng.choice([0.1, 2.0, 8.0]), rng.choice([0, 1, 12])  # few digits make many ties
    row = [round(rng.gauss(0.0, spread), digits) for _ in range(vocab)]
    for token in range(vocab):
        if rng.random() < 0.02:
            row[token] = rng.choice([math.nan, -math.inf])
    return row


rngs = st.integers(0, 1 << 40).map(random.Random)
vocabs = st.sampled_from([1, 2, 3, 7, 40, SHORTLIST_TOKENS + 90])


@examples(60)
@given(vocab=vocabs, rng=rngs, n=st.integers(1, 4), steps=st.integers(1, 4))
def test_tokens_equal_the_oracles_for_all_parameters(vocab: int, rng: random.Random, n: int, steps: int) -> None:
    requests = [any_request(rng, vocab) for _ in range(n)]
    sampler = seated(requests, vocab)
    for _ in range(steps):
        rows = [any_logits(rng, vocab) for _ in range(n)]
        found = sampler.sample(torch.tensor(rows, dtype=torch.float64), range(n), positions_of(requests))
        for i, token in enumerate(found.token_ids.tolist()):
            request = requests[i]
            assert token == oracle.choose(
                rows[i], request.params, request.token_ids, request.prompt_length, request.stop_ids
            )
            requests[i] = request.followed_by(token)


CHOSEN: list[dict[str, float]] = [
    {"temperature": 0.0},
    {},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"temperature": 2.5},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_drafts_are_drawn_like_tokens_but_with_other_random_numbers(dtype: torch.dtype) -> None:
    """Padding and free seats are between the requests."""
    rng, vocab = random.Random(5), 300
    requests = [
        Request(SamplingParams(seed=rng.randrange(9), **params), [1] * rng.randrange(2, 9), 2)  # type: ignore[arg-type]
        for params in CHOSEN * 5
    ]
    logits = 2 * torch.randn(len(requests), vocab, dtype=dtype, generator=torch.Generator().manual_seed(3))
    positions = positions_of(requests)
    sampled = seated(requests, vocab).sample(logits, range(len(requests)), positions + DRAWS_DRAFT).token_ids
    sampler = Sampler(2 * len(requests), vocab, CPU)
    for number, request in enumerate(requests):
        admit(sampler, 2 * number, request)
    seats = torch.tensor([seat for number in range(len(requests)) for seat in (2 * number, EMPTY)])
    drafted = sampler.draft(logits.repeat_interleave(2, 0), seats, positions.repeat_interleave(2))
    assert torch.equal(drafted[::2], sampled)


class OnlyDrawn:
    """Implements `BatchDrafts` for a batch without penalties."""

    def __init__(self, drawn: DrawnDrafts) -> None:
        self._drawn = drawn

    def followed_drafts(self) -> Tensor:
        raise AssertionError("only penalties need them")

    def drawn_drafts(self) -> DrawnDrafts:
        return self._drawn


def test_only_drawn_drafts_of_requests_that_are_not_greedy_are_verified_by_rejection() -> None:
    """If the layer gives its draft the whole probability, and the model none, the draft is replaced by another token.
    If both give the same probabilities, it is accepted. Without a draft, and for greedy requests, nothing changes."""
    vocab, requests = 40, [Request(SamplingParams(seed=number), [1, 2], 2) for number in range(3)]
    requests.append(Request(SamplingParams(temperature=0.0, seed=1), [1, 2], 2))
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(3))
    logits[1, 5] = -torch.inf
    of_drafts = logits.clone()
    of_drafts[1] = torch.full((vocab,), -torch.inf)
    of_drafts[1, 5] = 0.0
    sampler, positions = seated(requests, vocab), positions_of(requests)
    plain = sampler.sample(logits, range(4), positions).token_ids
    drafts = sampler.draft(of_drafts, torch.arange(4), positions)
    assert not torch.equal(drafts, plain), "the draft of the first request is not another one by chance"
    drawn = DrawnDrafts(
        torch.tensor([1, 0, 2, 3]), torch.tensor([5, int(drafts[0]), EMPTY, 0]), of_drafts[[1, 0, 2, 3]]
    )
    tokens = sampler.sample(logits, range(4), positions, drafts=OnlyDrawn(drawn)).token_ids
    assert tokens[0] == drafts[0] and tokens[1] != 5 and logits[1, tokens[1]] > -torch.inf
    assert torch.equal(tokens[2:], plain[2:])


@examples(15)
@given(
    vocab=st.sampled_from([5, 300, 3000]),
    rng=rngs,
    n=st.integers(2, 7),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
)
def test_a_draw_does_not_depend_on_the_batch(vocab: int, rng: random.Random, n: int, dtype: torch.dtype) -> None:
    requests = [any_request(rng, vocab) for _ in range(n)]
    logits = torch.tensor([any_logits(rng, vocab) for _ in range(n)], dtype=dtype)
    together = sample_all(requests, logits)
    order = rng.sample(range(n), n)
    shuffled = sample_all([requests[i] for i in order], logits[order])
    assert shuffled.token_ids.tolist() == together.token_ids[order].tolist()
    for i in range(n):
        alone = sample_all([requests[i]], logits[i : i + 1])
        assert int(alone.token_ids) == int(together.token_ids[i])
        outputs = ((alone, 0), (together, i))
        rows = [output.logprobs.of(index) if output.logprobs else None for output, index in outputs]
        assert (rows[0] is None) == (rows[1] is None) == (requests[i].params.logprobs is None)
        if rows[0] is not None and rows[1] is not None:
            assert list(rows[0]) == list(rows[1])
            assert [rank for _, rank in rows[0].values()] == [rank for _, rank in rows[1].values()]
            assert [logprob for logprob, _ in rows[0].values()] == [logprob for logprob, _ in rows[1].values()]


@examples(15)
@given(vocab=st.sampled_from([3, 40, SHORTLIST_TOKENS + 90]), rng=rngs, preempted_at=st.integers(0, 6))
def test_a_preempted_request_continues_with_the_same_tokens(vocab: int, rng: random.Random, preempted_at: int) -> None:
    request = any_request(rng, vocab)
    steps = [torch.tensor([any_logits(rng, vocab)]) for _ in range(8)]

    def answer(preempted_at: int | None) -> list[int]:
        sampler, current, seat = Sampler(3, vocab, CPU), request, 0
        admit(sampler, seat, current)
        for step, logits in enumerate(steps):
            if step == preempted_at:
                sampler.release(seat)
                admit(sampler, seat, any_request(rng, vocab))  # this request can get the released count row
                seat = 2
                admit(sampler, seat, current)
            token = int(sampler.sample(logits, [seat], positions_of([current])).token_ids)
            current = current.followed_by(token)
        return current.token_ids

    assert answer(preempted_at) == answer(None)


@pytest.mark.parametrize("seed", [0, 1, -1, 7, (1 << 63) - 1, -(1 << 63)])
def test_uniform_numbers_equal_those_of_the_oracle(seed: int) -> None:
    positions = torch.tensor([0, 1, 2, 4095, 4096, 1 << 20, (1 << 31) + 5])
    found = uniforms(torch.full_like(positions, draw_key(seed)), positions).tolist()
    assert found == [oracle.uniform(seed, position) for position in positions.tolist()]


def rules_for(n: int, **columns: Tensor) -> DrawRules:
    columns = {
        "temperature": torch.ones(n, dtype=torch.float64),
        "top_p": torch.ones(n, dtype=torch.float64),
        "min_weight": torch.zeros(n, dtype=torch.int64),
        **columns,
    }
    return DrawRules(**columns)


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0])
def test_a_draw_from_the_shortlist_equals_the_draw_from_all_sorted_tokens(spread: float) -> None:
    n, vocab, rng = 400, SHORTLIST_TOKENS + 200, torch.Generator().manual_seed(9)
    x = (torch.randn(n, vocab, generator=rng) * spread * 8).round() / 8
    uniform = torch.rand(n, generator=rng, dtype=torch.float64)
    kind = torch.arange(n) % 4
    top_k = torch.where(kind == 1, torch.randint(1, vocab + 1, (n,), generator=rng), vocab)
    top_p = torch.where(kind >= 2, torch.rand(n, generator=rng, dtype=torch.float64), 1.0)
    min_weight = torch.where(kind == 3, torch.randint(0, WEIGHT_ONE, (n,), generator=rng), 0)
    rules = rules_for(n, top_k=top_k, top_p=top_p, min_weight=min_weight)
    from_shortlist = draw(x, rules, uniform)
    from_all = _choose(leading(x, vocab), rules, uniform, vocab, None)[0]
    assert torch.equal(from_shortlist, from_all)
    narrow = (top_k <= SHORTLIST_TOKENS).nonzero().squeeze(-1)
    assert torch.equal(draw(x[narrow], rules.of(narrow), uniform[narrow]), from_all[narrow])


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 3}, {"repetition_penalty": 0.01}]
)
@pytest.mark.parametrize("vocab", [8, SHORTLIST_TOKENS + 8])
def test_nan_logits_of_one_request_do_not_change_the_others(params: dict[str, float], vocab: int) -> None:
    healthy = torch.randn(1, vocab, generator=torch.Generator().manual_seed(3))
    poison = torch.full((5, vocab), math.nan)
    poison[1] = -math.inf
    poison[2, 6] = -1.0
    poison[3], poison[3, 5] = 0.0, math.inf
    poison[4], poison[4, 4] = -math.inf, torch.finfo(torch.float32).max
    request = Request(SamplingParams(seed=11, logprobs=2, **params), [5], 1)  # type: ignore[arg-type]
    found = sample_all([request] * 6, torch.cat([poison, healthy]))
    assert found.token_ids[:5].tolist() == [0, 0, 6, 5, 4]
    assert int(found.token_ids[5]) == int(sample_all([request], healthy).token_ids)
    assert found.logprobs is not None
    for i in range(6):
        row = found.logprobs.of(i)
        assert row is not None and not any(math.isnan(logprob) for logprob, _ in row.values())


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_a_tiny_temperature_neither_overflows_nor_divides_by_zero(temperature: float) -> None:
    logits = torch.tensor([1e30, 3e38, -3e38, 3e38])
    drawn = {sample_one(logits, position, temperature=temperature) for position in range(100)}
    assert drawn == {1, 3}


def test_the_callers_logits_are_not_modified() -> None:
    rng = random.Random(2)
    requests = [Request(any_params(rng, 50), [1, 2, 3, 3], 2, frozenset({1})) for _ in range(40)]
    logits = torch.tensor([any_logits(rng, 50) for _ in requests])
    before = logits.clone()
    sample_all(requests, logits)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("uncounted", [(), (0,), (1,), (0, 1)])
def test_a_token_that_will_be_dropped_is_not_counted_for_penalties(uncounted: tuple[int, ...]) -> None:
    params = SamplingParams(temperature=0.0, seed=0, frequency_penalty=1.5)
    sampler = seated([Request(params, [0], 1)] * 2, 4)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 2)
    positions = torch.tensor([1, 1])
    assert sampler.sample(logits, (0, 1), positions, uncounted=uncounted).token_ids.tolist() == [3, 3]
    second = sampler.sample(logits, (0, 1), positions + 1).token_ids.tolist()
    assert second == [3 if seat in uncounted else 2 for seat in (0, 1)]


def test_only_penalised_requests_hold_counts_and_release_is_idempotent() -> None:
    sampler = Sampler(4, 10, CPU)
    plain, penalised = (
        Request(SamplingParams(seed=0), [1], 1),
        Request(SamplingParams(seed=0, presence_penalty=1.0), [1, 2], 1),
    )
    for seat in range(4):
        admit(sampler, seat, plain)
    assert sampler._counts.held == 0
    for seat in (0, 1, 2, 1):
        admit(sampler, seat, penalised)
    assert sampler._counts.held == 3
    for seat in (0, 1, 1, 2, 3, 3):
        sampler.release(seat)
    assert sampler._counts.held == 0


def test_a_new_request_inherits_nothing_from_the_previous_request_of_its_seat() -> None:
    sampler = Sampler(1, 6, CPU)
    heavy = SamplingParams(
        temperature=0.0, seed=1, presence_penalty=2.0, logit_bias={4: 50.0}, min_tokens=9, max_tokens=9, logprobs=3
    )
    admit(sampler, 0, Request(heavy, [5, 5], 1, frozenset({5})))
    logits = torch.tensor([[0.0, 0.0, 0.5, 0.0, 0.0, 1.0]])
    assert int(sampler.sample(logits, [0], torch.tensor([2])).token_ids) == 4
    light = SamplingParams(temperature=0.0, seed=1, presence_penalty=0.6, repetition_penalty=10.0)
    admit(sampler, 0, Request(light, [0], 1))
    found = sampler.sample(logits, [0], torch.tensor([1]))
    assert int(found.token_ids) == 5 and found.logprobs is None


def test_logprobs_are_those_of_the_raw_logits_with_ranks_by_logit_then_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 2.0]], dtype=torch.float64)
    params = SamplingParams(temperature=0.0, seed=0, logit_bias={3: 100.0}, presence_penalty=1.0)
    variants = [
        replace(params, logprobs=2),
        params,
        replace(params, logprobs=0),
        replace(params, logprobs=20, logit_bias=None),
    ]
    found = sample_all([Request(variant, [0], 1) for variant in variants], logits.expand(4, -1))
    assert found.token_ids.tolist() == [3, 3, 3, 1]
    assert found.logprobs is not None
    host = found.logprobs.to_host()
    lse = math.log(sum(math.exp(value) for value in logits[0].tolist()))
    expected = {
        token: (pytest.approx(float(logits[0, token]) - lse), rank) for rank, token in enumerate([1, 2, 4, 0, 3], 1)
    }
    assert host.of(0) == {token: expected[token] for token in (3, 1, 2)}
    assert host.of(1) is None
    assert host.of(2) == {3: expected[3]}
    assert host.of(3) == expected


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [300, 20000])
def test_a_gpu_draws_the_same_tokens_and_the_host_does_not_wait_for_it(vocab: int, dtype: torch.dtype) -> None:
    rng = random.Random(vocab)
    requests = [any_request(rng, vocab) for _ in range(48)]
    narrow = [replace(r, params=replace(r.params, top_k=rng.randint(1, 50))) for r in requests]
    for batch in (requests, narrow):
        logits = torch.randn(48, vocab, generator=torch.Generator().manual_seed(1), dtype=dtype) * 3
        expected, positions = sample_all(batch, logits), positions_of(batch).cuda()
        on_gpu = logits.cuda()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = seated(batch, vocab, on_gpu.device).sample(on_gpu, range(48), positions)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.logprobs is not None and expected.logprobs is not None
        on_host, computed = found.logprobs.to_host().computed, expected.logprobs.computed
        torch.testing.assert_close(on_host.logprobs, computed.logprobs)
        assert torch.equal(on_host.top_ids, computed.top_ids)


@pytest.mark.parametrize(("n", "constrained"), [(3, [1]), (2, [0, 1]), (70, list(range(0, 70, 2)))])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_exclude_tokens_and_keep_logprobs_raw(n: int, constrained: list[int], temperature: float) -> None:
    vocab, generator = 45, torch.Generator().manual_seed(n)
    logits = torch.randn(n, vocab, generator=generator)
    before = logits.clone()
    allowed = torch.rand(n, vocab, generator=generator) < 0.3
    allowed[torch.arange(n), torch.arange(n) % vocab] = True
    bits = torch.zeros(len(constrained), 2, dtype=torch.int64)
    for row, request in enumerate(constrained):
        for token in allowed[request].nonzero().flatten().tolist():
            bits[row, token // 32] |= 1 << token % 32
    masks = TokenMasks(torch.tensor(constrained), bits.to(torch.int32))
    params = [SamplingParams(temperature=temperature, seed=number, logprobs=2) for number in range(n)]
    requests = [Request(one, [1, 2], 2) for one in params]
    output = seated(requests, vocab).sample(logits, range(n), positions_of(requests), masks)
    expected = logits.clone()
    for request in constrained:
        expected[request] = torch.where(allowed[request], logits[request], -torch.inf)
    by_oracle = sample_all(requests, expected)
    assert output.token_ids.tolist() == by_oracle.token_ids.tolist()
    assert torch.equal(logits, before)
    assert output.logprobs is not None
    raw = torch.log_softmax(logits, -1)
    on_host = output.logprobs.to_host()
    for request, token in enumerate(output.token_ids.tolist()):
        alternatives = on_host.of(request)
        assert alternatives is not None
        assert alternatives[token][0] == pytest.approx(float(raw[request, token]), abs=1e-4)
