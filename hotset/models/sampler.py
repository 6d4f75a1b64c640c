"""Samples one token for each request of a batch, according to the request's own parameters."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.base.sampling import SamplingParams
from hotset.kernels import EMPTY
from hotset.kernels.device_copies import list_to_device
from hotset.kernels.draw import DRAWS_DRAFT, WEIGHT_ONE, DrawRules, accept_or_replace, draw, draw_key
from hotset.models.logprobs import SampledLogprobs, finite_logits, token_logprobs

MASKED_AT_ONCE = 32  # requests: unpacked masks take a byte for each token of the vocabulary
_MIN_TEMPERATURE = torch.finfo(torch.float32).tiny  # the smallest normal float32: logits are divided by the temperature


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The sampled tokens of one step. The tensors are on the logits' device, which may still be computing them."""

    token_ids: Tensor  # [n] int64
    logprobs: SampledLogprobs | None  # None if no request asked for log-probabilities


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that may be sampled for some requests of a batch."""

    requests: Tensor  # [m] int64: indices in the batch, ascending
    bits: Tensor  # [m, words] int32: bit i % 32 of word i // 32 is set if token i is allowed


@dataclass(frozen=True, slots=True)
class DrawnDrafts:
    """Drafts that `Sampler.draft` has drawn, and that are verified now."""

    index: Tensor  # [m] int64: the index in the batch of the logits that verify each draft
    token_ids: Tensor  # [m] int64; EMPTY: there is no draft
    logits: Tensor  # [m, vocab]: the logits from which each draft was drawn


class BatchDrafts(Protocol):
    """The drafts of a batch that only the device knows."""

    def followed_drafts(self) -> Tensor:
        """Returns the argument `followed` of `Sampler.sample` as a tensor [n] int64. EMPTY: the logits follow no draft,
        or the draft is missing, so everything after it is wrong."""

    def drawn_drafts(self) -> DrawnDrafts | None:
        """Returns drafts to verify by rejection sampling, which accepts as many as it can without changing the
        distribution of tokens."""


@dataclass(frozen=True, slots=True)
class _Seat:
    """The part of a running request's sampling state that is not in the sampler's tensors."""

    params: SamplingParams
    banned_ids: tuple[int, ...]  # must not be sampled before the answer has min_tokens tokens
    count_row: int | None  # None: the request has no penalties


@dataclass(frozen=True, slots=True)
class _LogitIndices:
    """Indices of single entries of [n, vocab] logits."""

    requests: Tensor  # [entries] int64: indices in the batch
    token_ids: Tensor  # [entries] int64


@dataclass(frozen=True, slots=True)
class _Batch:
    """The sampling state of one step's seats. It stays valid until a seat is admitted or released."""

    seats: tuple[int, ...]
    index: Tensor  # [n] int64: the seats
    greedy: bool  # all requests are greedy
    truncated: bool  # parameters of a request that is not greedy exclude tokens
    biased: _LogitIndices | None
    biases: Tensor  # [entries] float64
    banned: _LogitIndices | None
    penalised: Tensor | None  # [m] int64: indices in the batch
    count_rows: Tensor  # [m] int64
    logprobs: Mapping[int, tuple[int, int]]  # index in the batch -> (index in logprob_index, number of alternatives)
    logprob_index: Tensor  # [requests with logprobs] int64: indices in the batch

    @property
    def adjusts_logits(self) -> bool:
        return self.biased is not None or self.banned is not None or self.penalised is not None


class Sampler:
    """The sampling state of up to `seats` running requests.

    All work is queued on the current stream, and no call waits for a CUDA device. Only one thread may use a sampler.
    """

    def __init__(self, seats: int, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self._device = device
        self._seats: list[_Seat | None] = [None] * seats
        # Columns: draw key, top_k, minimum weight, first position at which the banned ids are allowed. The last row
        # belongs to padding, whose seat is EMPTY.
        self._integers = torch.zeros(seats + 1, 4, dtype=torch.int64, device=device)
        self._integers[:, 1] = 1
        # Columns: temperature, top_p, repetition, presence and frequency penalty
        self._floats = torch.ones(seats + 1, 5, dtype=torch.float64, device=device)
        self._counts = TokenCounts(vocab, device)
        self._batch: _Batch | None = None

    def admit(
        self,
        seat: int,
        params: SamplingParams,
        token_ids: Sequence[int],
        prompt_length: int,
        stop_ids: frozenset[int],
    ) -> None:
        """Assigns a request to the seat, and releases the request that held the seat before.

        `token_ids` are the prompt and the answer so far, so a request that resumes continues as if it had never been
        parked. `params.seed` must be set, with one seed per choice. The ids in `logit_bias` must be in the
        vocabulary; the engine refuses requests with other ids.
        """
        assert params.seed is not None, "a request reached the sampler without a seed"
        biased = params.logit_bias or {}
        if biased and max(biased) >= self._vocab:
            raise InternalError("a logit_bias id outside the vocabulary")
        self.release(seat)
        # Greedy sampling is a draw from one token, so that greedy and other requests can be in one batch.
        top_k = 1 if params.greedy else min(params.top_k or self._vocab, self._vocab)
        temperature = 1.0 if params.greedy else max(params.temperature, _MIN_TEMPERATURE)
        min_weight = math.ceil(params.min_p * WEIGHT_ONE)
        integers = [draw_key(params.seed), top_k, min_weight, prompt_length + params.min_tokens]
        penalties = [params.repetition_penalty, params.presence_penalty, params.frequency_penalty]
        self._integers[seat] = list_to_device(integers, torch.int64, self._device)
        self._floats[seat] = list_to_device([temperature, params.top_p, *penalties], torch.float64, self._device)
        answer_length = len(token_ids) - prompt_length
        banned = sorted(token for token in stop_ids if token < self._vocab) if answer_length < params.min_tokens else ()
        count_row = None
        if params.penalised:
            count_row = self._counts.allocate(token_ids[:prompt_length], token_ids[prompt_length:])
        self._seats[seat] = _Seat(params, tuple(banned), count_row)

    def release(self, seat: int) -> None:
        """Frees the seat and its row of token counts. Releasing a free seat does nothing."""
        occupant = self._seats[seat]
        if occupant is not None and occupant.count_row is not None:
            self._counts.free(occupant.count_row)
        self._seats[seat] = None
        self._batch = None

    def sample(
        self,
        logits: Tensor,
        seats: Sequence[int],
        positions: Tensor,
        masks: TokenMasks | None = None,
        followed: Sequence[int] = (),
        drafts: BatchDrafts | None = None,
        uncounted: Sequence[int] = (),
    ) -> SamplerOutput:
        """Samples from `logits[i]` ([n, vocab], not modified) for the request on `seats[i]`.

        `positions` [n] int64: the position of each new token in its context (the prompt length for the first token of
        an answer). The token is counted if its request has penalties. `masks` exclude tokens after all other changes of
        the logits. NaN logits count as -inf; if all logits of a request are -inf, its token is 0.

        If `followed[i]` is not EMPTY, `logits[i]` follow this draft, which follows `logits[i - 1]` of the same request.
        Penalties then apply as if the draft had been sampled, but only tokens before the first wrong draft are counted.
        With `drafts`, the drafts are on the device, and `followed` only says which logits may follow one.

        Sampled tokens whose index is in `uncounted` will be dropped, so they are not counted.
        """
        batch = self._batch_of(seats)
        followed_drafts = None
        if batch.penalised is not None and any(token != EMPTY for token in followed):
            followed_drafts = _Drafts(followed, None if drafts is None else drafts.followed_drafts(), self._device)
        raw = finite_logits(logits)
        x = self._adjusted(raw, batch, positions, followed_drafts) if batch.adjusts_logits else raw
        if masks is not None:
            x = _masked(x, masks, in_place=x is not raw)
        token_ids = x.argmax(dim=-1) if batch.greedy else draw(x, *self._draw_arguments(batch.index), positions)
        if drafts is not None and not batch.greedy and (verified := drafts.drawn_drafts()) is not None:
            token_ids[verified.index] = self._verified(x, token_ids, batch, positions, verified)
        if batch.penalised is not None:
            kept = None if followed_drafts is None else followed_drafts.kept(token_ids)
            if uncounted:
                kept = torch.ones_like(token_ids, dtype=torch.bool) if kept is None else kept
                kept[self._to_device(uncounted)] = False
            of_penalised = None if kept is None else kept[batch.penalised]
            self._counts.add(batch.count_rows, token_ids[batch.penalised], of_penalised)
        if not batch.logprobs:
            return SamplerOutput(token_ids, None)
        index = batch.logprob_index
        most = max(count for _, count in batch.logprobs.values())
        computed = token_logprobs(raw[index], token_ids[index], most)
        return SamplerOutput(token_ids, SampledLogprobs(batch.logprobs, token_ids[index], computed))

    def _adjusted(self, raw: Tensor, batch: _Batch, positions: Tensor, drafts: "_Drafts | None") -> Tensor:
        """Returns a copy of `raw` after bias, penalties and banned ids, in this order."""
        x = raw.clone()
        if batch.biased is not None:
            entries = (batch.biased.requests, batch.biased.token_ids)
            x[entries] = x[entries] + batch.biases.to(x.dtype)
        if batch.penalised is not None:
            penalties = self._floats[batch.index[batch.penalised], 2:]
            guessed = None if drafts is None else drafts.counts(x.shape[1])[batch.penalised]
            x[batch.penalised] = self._counts.penalised(x[batch.penalised], batch.count_rows, penalties, guessed)
        if batch.banned is not None:
            entries = (batch.banned.requests, batch.banned.token_ids)
            allowed = (positions >= self._integers[batch.index, 3])[batch.banned.requests]
            x[entries] = torch.where(allowed, x[entries], -torch.inf)
        return x

    def draft(self, logits: Tensor, seats: Tensor, positions: Tensor) -> Tensor:
        """Draws drafts of the tokens at `positions` of the requests on `seats` ([n] int64; EMPTY: padding), from
        `finite_logits` of the drafting layer, with the requests' temperature, top_k, top_p and min_p. Biases, penalties
        and masks are left out. A graph can capture this."""
        return draw(logits, *self._draw_arguments(seats), positions + DRAWS_DRAFT)

    def _verified(self, x: Tensor, token_ids: Tensor, batch: _Batch, positions: Tensor, drawn: DrawnDrafts) -> Tensor:
        """Returns the tokens in the places of the drafts. Greedy requests, and places without a draft, keep theirs."""
        rules, keys = self._draw_arguments(batch.index[drawn.index])
        verified = accept_or_replace(
            x[drawn.index],
            drawn.logits,
            drawn.token_ids,
            rules,
            keys,
            positions[drawn.index],
            truncated=batch.truncated,
        )
        is_verified = (drawn.token_ids != EMPTY) & (rules.top_k > 1)
        return torch.where(is_verified, verified, token_ids[drawn.index])

    def _draw_arguments(self, seats: Tensor) -> tuple[DrawRules, Tensor]:
        """Returns the rules and the keys of the requests on these seats."""
        keys, top_k, min_weight, _ = self._integers[seats].unbind(-1)
        temperature, top_p = self._floats[seats, :2].unbind(-1)
        return DrawRules(temperature, top_k, top_p, min_weight), keys

    def _batch_of(self, seats: Sequence[int]) -> _Batch:
        seats = tuple(seats)
        if self._batch is None or self._batch.seats != seats:
            self._batch = self._build_batch(seats)
        return self._batch

    def _build_batch(self, seats: tuple[int, ...]) -> _Batch:
        requests: list[_Seat] = []
        for seat in seats:
            request = self._seats[seat]
            assert request is not None, f"seat {seat} is sampled, but it is free"
            requests.append(request)
        biases = [
            (index, *pair)
            for index, request in enumerate(requests)
            for pair in sorted((request.params.logit_bias or {}).items())
        ]
        banned = [(index, token) for index, request in enumerate(requests) for token in request.banned_ids]
        count_rows = [(index, request.count_row) for index, request in enumerate(requests)]
        counted = [(index, row) for index, row in count_rows if row is not None]
        with_logprobs = [
            (index, request.params.logprobs)
            for index, request in enumerate(requests)
            if request.params.logprobs is not None
        ]
        return _Batch(
            seats=seats,
            index=self._to_device(seats),
            greedy=all(request.params.greedy for request in requests),
            truncated=any(not request.params.greedy and request.params.truncated for request in requests),
            biased=self._logit_indices([(index, token) for index, token, _ in biases]),
            biases=list_to_device([bias for _, _, bias in biases], torch.float64, self._device),
            banned=self._logit_indices(banned),
            penalised=self._to_device([index for index, _ in counted]) if counted else None,
            count_rows=self._to_device([row for _, row in counted]),
            logprobs={index: (entry, count) for entry, (index, count) in enumerate(with_logprobs)},
            logprob_index=self._to_device([index for index, _ in with_logprobs]),
        )

    def _logit_indices(self, entries: Sequence[tuple[int, int]]) -> _LogitIndices | None:
        if not entries:
            return None
        requests, token_ids = zip(*entries, strict=True)
        return _LogitIndices(self._to_device(requests), self._to_device(token_ids))

    def _to_device(self, numbers: Sequence[int]) -> Tensor:
        return list_to_device(numbers, torch.int64, self._device)


class _Drafts:
    """The drafts that some logits of a batch follow. See `Sampler.sample`."""

    def __init__(self, followed: Sequence[int], drafts: Tensor | None, device: torch.device) -> None:
        self._followed = list_to_device(followed, torch.int64, device) if drafts is None else drafts  # [n]
        firsts = accumulate((index if token == EMPTY else 0 for index, token in enumerate(followed)), max)
        self._first = list_to_device(list(firsts), torch.int64, device)  # [n]: the request's first index

    def counts(self, vocab: int) -> Tensor:
        """Returns [n, vocab] int32: how often each token is among the drafts that logits follow."""
        is_draft = (self._followed != EMPTY).int()
        counts = torch.zeros(len(self._followed), vocab, dtype=torch.int32, device=self._followed.device)
        counts.scatter_(1, self._followed.clamp_min(0)[:, None], is_draft[:, None])
        total = counts.cumsum(0, dtype=torch.int32)
        return total - total[self._first]

    def kept(self, token_ids: Tensor) -> Tensor:
        """Returns [n] bool: whether all drafts that logits follow equal the tokens sampled in their places."""
        follows_draft = self._first != torch.arange(len(token_ids), device=token_ids.device)
        wrong = follows_draft & (self._followed != token_ids.roll(1))
        total = wrong.cumsum(0)
        return total == total[self._first]


def _masked(x: Tensor, masks: TokenMasks, *, in_place: bool) -> Tensor:
    """Returns the logits `x` [n, vocab] with -inf for excluded tokens."""
    x = x if in_place else x.clone()
    shifts = torch.arange(8, dtype=torch.uint8, device=x.device)
    parts = zip(masks.requests.split(MASKED_AT_ONCE), masks.bits.split(MASKED_AT_ONCE), strict=True)
    for requests, bits in parts:
        octets = bits.view(torch.uint8).unsqueeze(-1)  # the lowest bits come first: all our machines are little-endian
        allowed = ((octets >> shifts) & 1).view(torch.bool).flatten(1)[:, : x.shape[1]]
        if len(requests) == len(x):
            x.masked_fill_(~allowed, -torch.inf)
        else:
            x[requests] = x[requests].masked_fill_(~allowed, -torch.inf)
    return x


class TokenCounts:
    """The tokens in prompt and answer of each penalised request: [count row][token], on the device.

    Each penalised request owns one count row. The tensors grow as needed and never shrink.
    """

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._in_prompt = torch.zeros(0, vocab, dtype=torch.bool, device=device)
        self._in_answer = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        self._free: list[int] = []

    @property
    def held(self) -> int:
        """The number of count rows in use."""
        return self._in_answer.shape[0] - len(self._free)

    def allocate(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> int:
        """Returns a count row that counts these tokens; the caller owns it until `free`."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._in_prompt[row].zero_()
        self._in_prompt[row].index_fill_(0, self._to_device(prompt_ids), True)
        self._in_answer[row].zero_()
        answer = self._to_device(answer_ids)
        self.add(torch.full_like(answer, row), answer)
        return row

    def free(self, row: int) -> None:
        if row in self._free:
            raise InternalError(f"count row {row} was freed twice")
        self._free.append(row)

    def add(self, rows: Tensor, token_ids: Tensor, kept: Tensor | None = None) -> None:
        """Counts `token_ids[i]` as an answer token in count row `rows[i]`, if `kept[i]` (None: all are kept). A count
        row may occur more than once."""
        entries = rows * self._in_answer.shape[1] + token_ids
        one = torch.ones_like(entries, dtype=torch.int32) if kept is None else kept.int()
        self._in_answer.view(-1).scatter_add_(0, entries, one)

    def penalised(self, x: Tensor, rows: Tensor, penalties: Tensor, guessed: Tensor | None) -> Tensor:
        """Returns `x` [m, vocab] after the repetition, then the presence and frequency penalties, as a new tensor.
        `penalties` [m, 3] float64 are these three. `guessed` [m, vocab] counts further tokens of the answers."""
        repetition, presence, frequency = penalties.to(x.dtype).unsqueeze(-1).unbind(1)  # each [m, 1]
        in_answer = self._in_answer[rows] if guessed is None else self._in_answer[rows] + guessed
        seen = self._in_prompt[rows] | (in_answer > 0)
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        x = x - presence * (in_answer > 0) - frequency * in_answer
        return x.clamp_(max=torch.finfo(x.dtype).max)  # with a repetition penalty below 1, a logit can overflow to inf

    def _to_device(self, token_ids: Sequence[int]) -> Tensor:
        vocab = self._in_answer.shape[1]
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab:
            raise InternalError(f"a token id outside [0, {vocab})")
        return list_to_device(token_ids, torch.int64, self._in_answer.device)

    def _grow(self) -> None:
        before, more = self._in_answer.shape[0], max(1, self._in_answer.shape[0])
        self._in_prompt = torch.cat([self._in_prompt, self._in_prompt.new_zeros(more, self._in_prompt.shape[1])])
        self._in_answer = torch.cat([self._in_answer, self._in_answer.new_zeros(more, self._in_answer.shape[1])])
        self._free.extend(range(before, before + more))
