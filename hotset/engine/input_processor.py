"""Checks prompts and sampling parameters against the limits of the model, and splits requests into choices."""

import random
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hotset.base.address import Address, EventsEndpoint
from hotset.base.errors import ContextLengthExceeded, RequestError
from hotset.base.request_options import DEFAULT_OPTIONS, RequestOptions
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.schedule.request import Request
from hotset.tiers.ledger import LAND_ANYWHERE, LandingPolicy
from hotset.tiers.prefix_cache import PageHasher


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Describes a running model to front ends."""

    name: str
    architecture: str
    max_model_len: int
    vocab: int
    eos_ids: tuple[int, ...]
    tiers: bool  # whether requests can be tiered
    resident_len: int  # the longest context that can be resident
    device: str
    dtype: str
    role: str = "both"
    control: str | None = None  # the address at which peers reach the handoff agent; None with role 'both'
    control_listens_on: Address | None = None  # the address on which the handoff agent listens
    kv_events: tuple[EventsEndpoint, ...] = ()  # one for each data parallel rank; empty if none are published
    host_store: bool = False
    split: str = ""  # how the model is divided over workers, like "TP2 x PP4"; empty with one worker
    bus_bytes_per_second: float | None = None  # from the host to all GPUs together; None without GPUs, or if unknown
    page_hasher: PageHasher | None = field(default=None, compare=False)  # None without a prefix cache
    landing: LandingPolicy = LAND_ANYWHERE  # where KV from prefill workers may arrive


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the `n` answers to a prompt, before it becomes a `Request` of the scheduler. It can be sent to another
    process."""

    request_id: str
    index: int
    prompt: PromptSpec
    max_length: int
    options: RequestOptions = DEFAULT_OPTIONS

    def to_request(self) -> Request:
        return Request(self.request_id, self.prompt, self.max_length, self.options)


class InputProcessor:
    """Checks requests against the model and assigns a seed to each choice."""

    def __init__(self, card: ModelCard, seed: int | None) -> None:
        self._card = card
        self._seeds = random.Random(seed)

    def accept(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> list[Choice]:
        """Returns the `n` choices of a request. Raises RequestError if the request is invalid. Allocates no KV."""
        card = self._card
        if not prompt:
            raise RequestError("the prompt is empty; it needs at least one token", param="prompt", code="empty_prompt")
        # The prompt is followed by room for at least one token: with max_tokens 0, that token is sampled and dropped.
        answer_tokens = max(1, params.min_tokens if params.max_tokens is None else params.max_tokens)
        length = len(prompt) + answer_tokens
        if length > card.max_model_len:
            raise ContextLengthExceeded(
                f"this model's context holds {card.max_model_len} tokens, but {length} were requested ({len(prompt)} "
                f"in the prompt, {answer_tokens} for the answer); shorten the prompt or lower max_tokens",
                param="prompt",
            )
        # The length is checked before the ids, because a prompt can have millions of them.
        self._check_ids("prompt", prompt)
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("stop_token_ids", params.stop_token_ids)
        max_length = card.max_model_len if params.max_tokens is None else length
        self._check_tiers(options, length)
        prefill_at = None if options.prefill_at is None else self._normalized_peer(options.prefill_at)
        if params.prompt_logprobs is not None or params.max_tokens == 0:
            # A handoff brings the KV of a prompt, but not its logits: this worker computes the prompt.
            prefill_at = None
        options = replace(options, prefill_at=prefill_at)
        self._check_landing(options, length)
        if options.tiers == "resident":
            max_length = min(max_length, card.resident_len)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(card.eos_ids))
        if params.structure is not None and not stop_ids:
            raise RequestError(
                "this model has no end-of-text token, with which an answer with a structure could end; give "
                "stop_token_ids",
                param="stop_token_ids",
            )
        token_ids = tuple(prompt)
        first_seed = params.seed if params.seed is not None else self._seeds.getrandbits(62)
        # Choice 0 has the seed of the request, so it equals the answer with n = 1.
        return [
            Choice(
                request_id=f"{request_id}/{index}",
                index=index,
                prompt=PromptSpec(
                    token_ids, params.with_seed(_signed(first_seed + index)), stop_ids, options.cache_salt or ""
                ),
                max_length=max_length,
                options=options,
            )
            for index in range(params.n)
        ]

    def _check_tiers(self, options: RequestOptions, tokens: int) -> None:
        card = self._card
        if options.tiers == "tiered" and not card.tiers:
            raise RequestError(
                "tiers 'tiered' needs a model with sparse attention and an engine with tiers; leave it out",
                param="tiers",
            )
        if options.tiers == "resident" and tokens > card.resident_len:
            raise ContextLengthExceeded(
                f"the device holds at most {card.resident_len} tokens of one resident request, but {tokens} were "
                "requested; leave tiers out or shorten the request",
                param="tiers",
            )

    def _normalized_peer(self, prefill_at: str) -> str:
        """Returns the normalized address of a prefill worker.

        Raises RequestError if this worker is not a decode worker, or if no peer could be reached at the address.
        """
        if self._card.role != "decode":
            raise RequestError("this worker does not receive KV from prefill workers; start it with --role decode")
        peer = Address.parse(prefill_at)
        if peer is None or not peer.reachable:
            raise RequestError(
                f"a prefill worker must be given by its control address (host:port), got {prefill_at!r}",
                code="invalid_value",
            )
        return str(peer)

    def _check_landing(self, options: RequestOptions, tokens: int) -> None:
        card, landing = self._card, options.landing
        if landing != "auto" and options.prefill_at is None:
            raise RequestError(
                f"landing {landing!r} is for prompts that a prefill worker computes, and this prompt is computed here; "
                "leave it out",
                param="landing",
            )
        if landing == "host" and not card.host_store:
            raise RequestError("landing 'host' needs a host store, which --tiers off disables", param="landing")
        if landing == "device" and not card.landing.on_device:
            raise RequestError(
                "landing 'device' needs an engine without pipeline stages, and this one has several; leave it out",
                param="landing",
            )
        if landing == "device" and (options.tiers == "tiered" or tokens > card.resident_len):
            raise RequestError(
                f"landing 'device' is for resident requests of at most {card.resident_len} tokens; leave it out",
                param="landing",
            )

    def _check_ids(self, param: str, token_ids: Collection[int]) -> None:
        check_token_ids(param, token_ids, self._card.vocab)


def check_token_ids(param: str, token_ids: Collection[int], vocab: int) -> None:
    """Raises RequestError if an id is outside the vocabulary. The error names the first such id."""
    if not all_in_vocabulary(token_ids, vocab):
        invalid = next(token for token in token_ids if not 0 <= token < vocab)
        raise RequestError(
            f"{param} contains token id {invalid}, but the vocabulary ends at {vocab - 1}",
            param=param,
            code="invalid_token_id",
        )


def all_in_vocabulary(token_ids: Collection[int], vocab: int) -> bool:
    """Returns True if every id is in [0, vocab). It runs on event loops, so it looks at each id only once, and in C."""
    try:
        unsigned = np.frombuffer(array("I", token_ids), np.uintc)
    except OverflowError:  # an id is negative or has more than 32 bits
        return False
    return not len(unsigned) or int(unsigned.max()) < vocab


def _signed(seed: int) -> int:
    """Wraps a seed into the range of signed 64-bit integers."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
