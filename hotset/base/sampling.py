"""The parameters of a request: a prompt, how its continuation is sampled, and when it ends."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NoReturn

from hotset.base.errors import RequestError
from hotset.base.structure import Structure

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
Alternatives = Mapping[int, tuple[float, int]]  # token id -> (log-probability, rank); includes the sampled token


def _refuse(param: str, message: str) -> NoReturn:
    raise RequestError(f"{param} {message}", param=param, code="invalid_value")


@dataclass(frozen=True, slots=True)
class Parameter:
    """The declaration of a numeric sampling parameter. Its range holds for every source of values: clients, peers, and
    the defaults of a model."""

    low: float
    high: float | None = None  # None: there is no limit
    whole: bool = False
    optional: bool = False  # the value may be None
    # "all": every endpoint that generates has a field of this name. "completions": /v1/responses and /v1/messages have
    # none. None: an endpoint that has such a field declares it itself.
    fields: Literal["all", "completions"] | None = None
    help: str | None = None  # describes these fields
    recommended: bool = False  # `generation_config.json` of a model may set the default
    effect: Literal["truncates", "penalises"] | None = None  # of every value except the default

    def check(self, name: str, value: object) -> None:
        """Raises RequestError unless the value is a number in the range."""
        if value is None and self.optional:
            return
        if self.whole:
            self._check_count(name, value)
        else:
            self._check_number(name, value)

    def _check_number(self, name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            _refuse(name, f"must be a finite number, got {value!r}")
        elif value < self.low or (self.high is not None and value > self.high):
            _refuse(name, f"must lie in [{self.low:g}, {self.high:g}], got {value!r}")

    def _check_count(self, name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            _refuse(name, f"must be a whole number, got {value!r}")
        elif value < self.low or (self.high is not None and value > self.high):
            bound = f"at least {self.low}" if self.high is None else f"between {self.low} and {self.high}"
            _refuse(name, f"must be {bound}, got {value}")


def _number(default: float, low: float, high: float, **declared: Any) -> Any:
    return field(default=default, metadata={"parameter": Parameter(low, high, **declared)})


def _count(default: int | None, low: int, high: int | None = None, **declared: Any) -> Any:
    return field(default=default, metadata={"parameter": Parameter(low, high, whole=True, **declared)})


_TOKEN_ID = Parameter(0, whole=True)
_BIAS = Parameter(-100.0, 100.0)


def _as_tuple(param: str, values: object) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        _refuse(param, f"must be a list, got {values!r}")
    return tuple(values)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the continuation of a prompt is sampled and when it ends. Invalid values raise RequestError.

    The parameters take effect on the logits in this order: `logit_bias`, repetition, presence and frequency penalties,
    `min_tokens` (stop ids are excluded), `structure` (tokens that do not fit it are excluded), temperature, `top_k`,
    `top_p`, `min_p`, draw. The random number of a draw depends only on the seed and the token's position, so it does
    not change if the request is parked or handed over. Reported log-probabilities, also those of the prompt, are
    computed from the logits before any of these changes.
    """

    n: int = _count(1, 1, MAX_CHOICES)
    temperature: float = _number(
        1.0, 0.0, 10.0, fields="all", help="0 selects the most likely token.", recommended=True
    )
    # 0 means all tokens; so does -1, which becomes 0
    top_k: int = _count(0, 0, fields="all", help="0 or -1 considers all tokens.", recommended=True, effect="truncates")
    top_p: float = _number(1.0, 0.0, 1.0, fields="all", recommended=True, effect="truncates")
    min_p: float = _number(0.0, 0.0, 1.0, fields="all", recommended=True, effect="truncates")
    repetition_penalty: float = _number(1.0, 0.01, 100.0, fields="completions", recommended=True, effect="penalises")
    presence_penalty: float = _number(0.0, -2.0, 2.0, fields="completions", effect="penalises")
    frequency_penalty: float = _number(0.0, -2.0, 2.0, fields="completions", effect="penalises")
    # None means that the engine draws a seed for each request
    seed: int | None = _count(None, -(1 << 63), (1 << 63) - 1, optional=True, fields="all")
    # None means up to the end of the context; with 0, only the prompt is computed
    max_tokens: int | None = _count(16, 0, optional=True)
    min_tokens: int = _count(0, 0)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    # The number of alternatives to report in addition to the sampled token
    logprobs: int | None = _count(None, 0, MAX_LOGPROBS, optional=True)
    # The number of alternatives to report for each token of the prompt, except the first
    prompt_logprobs: int | None = _count(None, 0, MAX_LOGPROBS, optional=True)
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
        for name, parameter in PARAMETERS.items():
            parameter.check(name, getattr(self, name))
        if self.top_p == 0.0:
            _refuse("top_p", "must be above 0; use temperature 0 for the most likely token")
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
            _TOKEN_ID.check("stop_token_ids", token)
        for token, bias in (self.logit_bias or {}).items():
            _TOKEN_ID.check("logit_bias", token)
            _BIAS.check("logit_bias", bias)
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
    def truncated(self) -> bool:
        """True if parameters restrict which tokens can be drawn. They have no effect on a greedy request."""
        return self._has_effect("truncates")

    @property
    def penalised(self) -> bool:
        """True if penalties are set, so that earlier tokens change the logits of the next one."""
        return self._has_effect("penalises")

    def _has_effect(self, effect: str) -> bool:
        return any(getattr(self, name) != default for name, default in _DEFAULTS_BY_EFFECT[effect].items())


_DECLARED = {declared.name: declared for declared in fields(SamplingParams) if "parameter" in declared.metadata}
PARAMETERS: Mapping[str, Parameter] = {name: declared.metadata["parameter"] for name, declared in _DECLARED.items()}
_DEFAULTS_BY_EFFECT = {
    effect: {name: _DECLARED[name].default for name, parameter in PARAMETERS.items() if parameter.effect == effect}
    for effect in ("truncates", "penalises")
}


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """A prompt and how to continue it. The front end, the scheduler, the runner and peers all use this one value."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()  # tokens that end the request; not sampled before `params.min_tokens`
    cache_salt: str = ""  # only requests with the same salt reuse each other's prefixes

    def __len__(self) -> int:
        return len(self.token_ids)
