"""Options of a request that do not change its answer, like where its KV is stored and whose prefixes it may reuse."""

from dataclasses import dataclass
from typing import Literal, get_args

from hotset.base.errors import RequestError

TiersChoice = Literal["auto", "resident", "tiered"]
LandingChoice = Literal["auto", "host", "device"]
MAX_CACHE_SALT_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of one request, which the HTTP server or `LLM` passes to the scheduler. Invalid values raise
    RequestError. `InputProcessor` checks the options against the model, and normalizes `prefill_at`.
    """

    tiers: TiersChoice = "auto"  # where KV is stored; 'auto': the engine decides
    landing: LandingChoice = "auto"  # where KV from a prefill worker arrives
    cache_salt: str | None = None  # only requests with the same salt reuse each other's prefixes
    prefill_at: str | None = None  # control address of the prefill worker that computes the prompt; None: this engine

    def __post_init__(self) -> None:
        if self.cache_salt is not None:
            check_cache_salt(self.cache_salt)
        for name, choices in (("tiers", get_args(TiersChoice)), ("landing", get_args(LandingChoice))):
            if (given := getattr(self, name)) not in choices:
                raise RequestError(f"{name} must be one of {', '.join(choices)}, not {given!r}", param=name)


DEFAULT_OPTIONS = RequestOptions()


def check_cache_salt(salt: object) -> str:
    """Returns the salt of a request. Raises RequestError if it is not a text of 1 to MAX_CACHE_SALT_CHARACTERS
    characters."""
    if not isinstance(salt, str):
        raise _invalid_salt(f"must be a text, but is of type {type(salt).__name__}")
    if not 1 <= len(salt) <= MAX_CACHE_SALT_CHARACTERS:
        raise _invalid_salt(f"must have 1 to {MAX_CACHE_SALT_CHARACTERS} characters, but has {len(salt)}")
    if any("\ud800" <= character <= "\udfff" for character in salt):
        raise _invalid_salt("must not contain lone surrogates")
    return salt


def _invalid_salt(problem: str) -> RequestError:
    advice = "send a random text or a hash, or leave it out to share prefixes with all requests without a salt"
    return RequestError(f"cache_salt {problem}; {advice}", param="cache_salt", code="invalid_value")
