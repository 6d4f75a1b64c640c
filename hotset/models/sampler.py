"""The sampler: one token per row of logits, by each running request's own parameters."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.base.sampling import SamplingParams
from hotset.kernels.device_copies import list_to_device
from hotset.models.draw import LISTED, WEIGHT_ONE, DrawRules, draw, draw_key, leading, uniforms

_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny  # in float32, less would be a division by 0


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities of the `m` batch rows that asked for them.

    Ranks start at 1 and are unique: ties are ranked by ascending id. A token that the model rules out has -inf.
    """

    wanted: Mapping[int, tuple[int, int]]  # batch row -> its row in the tensors, how many alternatives it asked for
    chosen_ids: Tensor  # [m] int64
    chosen_logprobs: Tensor  # [m]
    chosen_ranks: Tensor  # [m] int64
    top_ids: Tensor  # [m, most] int64, likeliest first
    top_logprobs: Tensor  # [m, most]

    def to_host(self) -> "LogprobRows":
        """The same rows in host memory. Waits for the device once, where `row` would wait at every call."""
        return LogprobRows(
            self.wanted,
            self.chosen_ids.cpu(),
            self.chosen_logprobs.cpu(),
            self.chosen_ranks.cpu(),
            self.top_ids.cpu(),
            self.top_logprobs.cpu(),
        )

    def row(self, batch_row: int) -> dict[int, tuple[float, int]] | None:
        """Token id -> (log-probability, rank): the chosen token first, then the likeliest ones; None: not asked."""
        if batch_row not in self.wanted:
            return None
        at, count = self.wanted[batch_row]
        found = {int(self.chosen_ids[at]): (float(self.chosen_logprobs[at]), int(self.chosen_ranks[at]))}
        ids, logprobs = self.top_ids[at, :count].tolist(), self.top_logprobs[at, :count].tolist()
        for rank, (token, logprob) in enumerate(zip(ids, logprobs, strict=True), start=1):
            found.setdefault(token, (logprob, rank))
        return found


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of one step. Tensors lie on the logits' device and may still be under computation there."""

    token_ids: Tensor  # [n] int64
    logprobs: LogprobRows | None  # None: no row asked


@dataclass(frozen=True, slots=True)
class _Seat:
    """What the host knows of a running request; numbers that the device needs lie in the sampler's tables."""

    params: SamplingParams
    top_k: int
    barred_ids: tuple[int, ...]  # not to be sampled before min_tokens answer tokens exist
    count_row: int | None  # None: not penalised


@dataclass(frozen=True, slots=True)
class _Cells:
    """Cells of [n, vocab] logits."""

    rows: Tensor  # [cells] int64
    ids: Tensor  # [cells] int64


@dataclass(frozen=True, slots=True)
class _Batch:
    """What a step needs to know of its seats; stays valid until a seat is admitted or released."""

    seats: tuple[int, ...]
    index: Tensor  # [n] int64: the seats
    greedy: bool  # all rows
    narrow: bool  # all rows: at most LISTED tokens survive top_k
    biased: _Cells | None
    biases: Tensor  # [cells] float64
    barred: _Cells | None
    penalised: Tensor | None  # [m] int64: batch rows
    count_rows: Tensor  # [m] int64
    logprobs: Mapping[int, tuple[int, int]]  # batch row -> place among those that asked, alternatives asked for
    logprob_index: Tensor  # [asked] int64: batch rows

    @property
    def adjusts(self) -> bool:
        return self.biased is not None or self.barred is not None or self.penalised is not None


class Sampler:
    """Sampling state of up to `seats` running requests. A seat is a running request's fixed place in the worker's
    tensors.

    All work is queued on the current stream, and nothing waits for a CUDA device. One thread uses a sampler.
    """

    def __init__(self, seats: int, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self._device = device
        self._seats: list[_Seat | None] = [None] * seats
        # [seat] draw key, top_k, least weight, first position where the barred ids are free
        self._whole = torch.zeros(seats, 4, dtype=torch.int64, device=device)
        # [seat] temperature, top_p, repetition, presence and frequency penalty
        self._real = torch.ones(seats, 5, dtype=torch.float64, device=device)
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
        """Seats a request, replacing whoever sat there. `token_ids` are its prompt and the answer so far: a
        request that comes back goes on as if it had never left. `params.seed` is drawn by now, one per choice; ids in
        `logit_bias` lie within the vocabulary, since the engine refuses others.
        """
        assert params.seed is not None, "a request reached the sampler without a seed"
        biased = params.logit_bias or {}
        assert all(token < self._vocab for token in biased), "a logit_bias id outside the vocabulary"
        self.release(seat)
        # Greedy is a draw among one token, so that rows of both kinds take the same path.
        top_k = 1 if params.greedy else min(params.top_k or self._vocab, self._vocab)
        temperature = 1.0 if params.greedy else max(params.temperature, _LEAST_TEMPERATURE)
        least_weight = math.ceil(params.min_p * WEIGHT_ONE)
        whole = [draw_key(params.seed), top_k, least_weight, prompt_length + params.min_tokens]
        penalties = [params.repetition_penalty, params.presence_penalty, params.frequency_penalty]
        self._whole[seat] = list_to_device(whole, torch.int64, self._device)
        self._real[seat] = list_to_device([temperature, params.top_p, *penalties], torch.float64, self._device)
        answered = len(token_ids) - prompt_length
        barred = sorted(token for token in stop_ids if token < self._vocab) if answered < params.min_tokens else ()
        count_row = None
        if params.penalised:
            count_row = self._counts.take(token_ids[:prompt_length], token_ids[prompt_length:])
        self._seats[seat] = _Seat(params, top_k, tuple(barred), count_row)

    def release(self, seat: int) -> None:
        """Frees the seat and what it holds. Idempotent."""
        leaving = self._seats[seat]
        if leaving is not None and leaving.count_row is not None:
            self._counts.give_back(leaving.count_row)
        self._seats[seat] = None
        self._batch = None

    def sample(self, logits: Tensor, seats: Sequence[int], positions: Tensor) -> Sampled:
        """Samples row i of `logits` [n, vocab] for the request on `seats[i]`; the logits are left as they are.

        `positions` [n] int64: where each new token will stand in its context (prompt length: the first of the answer).
        The token is counted where its request is penalised. NaN counts as -inf; a row of nothing else gives token 0.
        """
        batch = self._described(seats)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        raw = logits.to(dtype).nan_to_num(nan=-torch.inf, posinf=torch.finfo(dtype).max, neginf=-torch.inf)
        x = self._adjusted(raw, batch, positions) if batch.adjusts else raw
        token_ids = x.argmax(dim=-1) if batch.greedy else self._drawn(x, batch, positions)
        if batch.penalised is not None:
            self._counts.add(batch.count_rows, token_ids[batch.penalised])
        if not batch.logprobs:
            return Sampled(token_ids, None)
        asked = batch.logprob_index
        return Sampled(token_ids, logprob_rows(raw[asked], token_ids[asked], batch.logprobs))

    def _adjusted(self, raw: Tensor, batch: _Batch, positions: Tensor) -> Tensor:
        """A copy of `raw` after bias, penalties and barred ids, in this order."""
        x = raw.clone()
        if batch.biased is not None:
            cells = (batch.biased.rows, batch.biased.ids)
            x[cells] = x[cells] + batch.biases.to(x.dtype)
        if batch.penalised is not None:
            penalties = Penalties(*self._real[batch.index[batch.penalised], 2:].unbind(-1))
            x[batch.penalised] = self._counts.penalised(x[batch.penalised], batch.count_rows, penalties)
        if batch.barred is not None:
            cells = (batch.barred.rows, batch.barred.ids)
            free = (positions >= self._whole[batch.index, 3])[batch.barred.rows]
            x[cells] = torch.where(free, x[cells], -torch.inf)
        return x

    def _drawn(self, x: Tensor, batch: _Batch, positions: Tensor) -> Tensor:
        keys, top_k, least_weight, _ = self._whole[batch.index].unbind(-1)
        temperature, top_p = self._real[batch.index, :2].unbind(-1)
        rules = DrawRules(temperature, top_k, top_p, least_weight)
        return draw(x, rules, uniforms(keys, positions), narrow=batch.narrow)

    def _described(self, seats: Sequence[int]) -> _Batch:
        seats = tuple(seats)
        if self._batch is None or self._batch.seats != seats:
            self._batch = self._describe(seats)
        return self._batch

    def _describe(self, seats: tuple[int, ...]) -> _Batch:
        taken: list[_Seat] = []
        for seat in seats:
            sitting = self._seats[seat]
            assert sitting is not None, f"seat {seat} is sampled, but nobody sits there"
            taken.append(sitting)
        biases = [
            (row, *pair) for row, seat in enumerate(taken) for pair in sorted((seat.params.logit_bias or {}).items())
        ]
        barred = [(row, token) for row, seat in enumerate(taken) for token in seat.barred_ids]
        counted = [(row, seat.count_row) for row, seat in enumerate(taken) if seat.count_row is not None]
        asked = [(row, seat.params.logprobs) for row, seat in enumerate(taken) if seat.params.logprobs is not None]
        return _Batch(
            seats=seats,
            index=self._indices(seats),
            greedy=all(seat.params.greedy for seat in taken),
            narrow=all(seat.top_k <= LISTED for seat in taken),
            biased=self._cells([(row, token) for row, token, _ in biases]),
            biases=list_to_device([bias for _, _, bias in biases], torch.float64, self._device),
            barred=self._cells(barred),
            penalised=self._indices([row for row, _ in counted]) if counted else None,
            count_rows=self._indices([count_row for _, count_row in counted]),
            logprobs={row: (place, count) for place, (row, count) in enumerate(asked)},
            logprob_index=self._indices([row for row, _ in asked]),
        )

    def _cells(self, cells: Sequence[tuple[int, int]]) -> _Cells | None:
        if not cells:
            return None
        return _Cells(self._indices([row for row, _ in cells]), self._indices([token for _, token in cells]))

    def _indices(self, numbers: Sequence[int]) -> Tensor:
        return list_to_device(numbers, torch.int64, self._device)


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of the penalised rows of a batch, each [m] float64."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor


class TokenCounts:
    """Rows of counts, [row][token], handed out one per penalised request. Grows as needed, never shrinks."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._in_prompt = torch.zeros(0, vocab, dtype=torch.bool, device=device)
        self._answers = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        self._free: list[int] = []

    @property
    def held(self) -> int:
        return self._answers.shape[0] - len(self._free)

    def take(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> int:
        """A row that counts these tokens; the caller owns it until `give_back`."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._in_prompt[row].zero_()
        self._in_prompt[row].index_fill_(0, self._sent(prompt_ids), True)
        self._answers[row].zero_()
        answers = self._sent(answer_ids)
        self.add(torch.full_like(answers, row), answers)
        return row

    def give_back(self, row: int) -> None:
        assert row not in self._free, f"count row {row} was given back twice"
        self._free.append(row)

    def add(self, rows: Tensor, token_ids: Tensor) -> None:
        """Counts `token_ids` [m] as answer tokens, each in its own of `rows` [m]; a row may occur more than once."""
        cells = rows * self._answers.shape[1] + token_ids
        one = torch.ones_like(cells, dtype=torch.int32)
        self._answers.view(-1).scatter_add_(0, cells, one)

    def penalised(self, x: Tensor, rows: Tensor, penalties: Penalties) -> Tensor:
        """`x` [m, vocab] after the repetition, then the presence and frequency penalties; `x` itself is kept."""
        repetition, presence, frequency = (
            penalty.unsqueeze(-1).to(x.dtype)
            for penalty in (penalties.repetition, penalties.presence, penalties.frequency)
        )
        answers = self._answers[rows]
        seen = self._in_prompt[rows] | (answers > 0)
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        x = x - presence * (answers > 0) - frequency * answers
        return x.clamp_(max=torch.finfo(x.dtype).max)  # a repetition penalty below 1 may overflow to inf

    def _sent(self, token_ids: Sequence[int]) -> Tensor:
        vocab = self._answers.shape[1]
        assert all(0 <= token < vocab for token in token_ids), f"a token id outside [0, {vocab})"
        return list_to_device(token_ids, torch.int64, self._answers.device)

    def _grow(self) -> None:
        before, more = self._answers.shape[0], max(1, self._answers.shape[0])
        self._in_prompt = torch.cat([self._in_prompt, self._in_prompt.new_zeros(more, self._in_prompt.shape[1])])
        self._answers = torch.cat([self._answers, self._answers.new_zeros(more, self._answers.shape[1])])
        self._free.extend(range(before, before + more))


def logprob_rows(logits: Tensor, chosen_ids: Tensor, wanted: Mapping[int, tuple[int, int]]) -> LogprobRows:
    """`logits` [m, vocab] and `chosen_ids` [m] are those of the rows that asked, in the order of `wanted`. No NaN."""
    m, vocab = logits.shape
    most = min(vocab, max(count for _, count in wanted.values()))
    logprobs = torch.log_softmax(logits, dim=-1).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
    chosen = chosen_ids.unsqueeze(-1)
    # Ranks follow the logits: log_softmax may round two of them to one value.
    value = logits.gather(-1, chosen)
    earlier = torch.arange(vocab, device=logits.device) < chosen
    ranks = 1 + ((logits > value) | ((logits == value) & earlier)).sum(dim=-1)
    top_ids = leading(logits, most).ids if most else chosen.new_empty(m, 0)
    return LogprobRows(
        wanted, chosen_ids, logprobs.gather(-1, chosen).squeeze(-1), ranks, top_ids, logprobs.gather(-1, top_ids)
    )
