"""The parameters of a request: a prompt, how its continuation is sampled, and when it ends."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotset.base.errors import RequestError
from hotset.base.structure import Structure

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024


def _refuse(param: str, message: str) -> None:
    raise RequestError(f"{param} {message}", param=param, code="invalid_value")


def _check_number(param: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        _refuse(param, f"must be a finite number, got {value!r}")
    elif not low <= value <= high:
        _refuse(param, f"must lie in [{low:g}, {high:g}], got {value!r}")


def _check_count(param: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(param, f"must be a whole number, got {value!r}")
    elif value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        _refuse(param, f"must be {bound}, got {value}")


def _as_tuple(param: str, values: object) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        _refuse(param, f"must be a list, got {values!r}")
        return ()
    return tuple(values)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the continuation of a prompt is sampled and when it ends. Invalid values raise RequestError.

    The parameters take effect on the logits in this order: `logit_bias`, repetition, presence and frequency penalties,
    `min_tokens` (stop ids are excluded), `structure` (tokens that do not fit it are excluded), temperature, `top_k`,
    `top_p`, `min_p`, draw. The random number of a draw depends only on the seed and the token's position, so it does
    not change if the request is parked or handed over. Reported log-probabilities, those of the prompt too, are those
    of the logits before any of these changes.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0  # 0 means all tokens; so does -1, which becomes 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None means that the engine draws a seed for each request
    max_tokens: int | None = 16  # None means up to the end of the context; with 0, only the prompt is computed
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # number of alternatives to report in addition to the sampled token
    prompt_logprobs: int | None = None  # the same for every token of the prompt, except the first
    logit_bias: Mapping[int, float] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structure: Structure | None = None  # what the answer must look like; stop tokens are allowed only where it may end

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, f"must be true or false, got {getattr(self, name)!r}")
        bias_given: object = self.logit_bias
        if bias_given is not None and not isinstance(bias_given, Mapping):
            _refuse("logit_bias", f"must map token ids to numbers, got {bias_given!r}")
        _check_count("n", self.n, 1, MAX_CHOICES)
        _check_number("temperature", self.temperature, 0.0, 10.0)
        _check_count("top_k", self.top_k, 0)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            _refuse("top_p", "must be above 0; use temperature 0 for the most likely token")
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_count("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        if self.max_tokens is not None:
            _check_count("max_tokens", self.max_tokens, 0)
        _check_count("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", f"is {self.min_tokens}, but must not exceed max_tokens ({self.max_tokens})")
        if len(stop) > MAX_STOP_STRINGS:
            _refuse("stop", f"must have at most {MAX_STOP_STRINGS} strings, got {len(stop)}")
        if any(not isinstance(text, str) or not text for text in stop):
            _refuse("stop", "must be a list of non-empty strings")
        if any(len(text) > MAX_STOP_CHARACTERS for text in stop):
            _refuse("stop", f"must have strings of at most {MAX_STOP_CHARACTERS} characters")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            _refuse("stop_token_ids", f"must have at most {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}")
        if len(self.logit_bias or ()) > MAX_LOGIT_BIASES:
            _refuse("logit_bias", f"must have at most {MAX_LOGIT_BIASES} entries, got {len(self.logit_bias or ())}")
        for token in self.stop_token_ids:
            _check_count("stop_token_ids", token, 0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), 0, MAX_LOGPROBS)
        for token, bias in (self.logit_bias or {}).items():
            _check_count("logit_bias", token, 0)
            _check_number("logit_bias", bias, -100.0, 100.0)
        if self.structure is not None:
            self._check_structure(self.structure)

    def _check_structure(self, structure: object) -> None:
        if not isinstance(structure, Structure):
            _refuse("structure", f"must be a Structure, got {structure!r}")
        if self.ignore_eos:
            _refuse("ignore_eos", "cannot be combined with a structure: the answer ends where its structure ends")
        if self.min_tokens:
            _refuse("min_tokens", "cannot be combined with a structure, which may end earlier; leave it out")

    def with_seed(self, seed: int) -> "SamplingParams":
        """Returns these parameters with another seed, without checking the others again."""
        changed = copy.copy(self)
        object.__setattr__(changed, "seed", seed)
        return changed

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """True if penalties are set, so that earlier tokens change the logits of the next one."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """A prompt and how to continue it. The front end, the scheduler, the runner and peers all use this one value."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()  # tokens that end the request; not sampled before `params.min_tokens`
    cache_salt: str = ""  # only requests with the same salt reuse each other's prefixes

    def __len__(self) -> int:
        return len(self.token_ids)
