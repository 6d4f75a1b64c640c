"""The configuration of a benchmark. Its fields are the flags of `hotset bench`."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from hotset.base.errors import ConfigError
from hotset.base.settings import check_settings, flag_name, setting

Number = TypeVar("Number", int, float)

DEFAULT_NUM_REQUESTS = 32
DEFAULT_CONCURRENCY = 4
MAX_CONCURRENCY = 1 << 16
OBJECTIVES = ("ttft", "tpot", "e2e")
NEEDS = {"burstiness": "rate", "trace_speed": "trace", "scale_lengths": "trace"}  # the first has no effect without it
REPLACES = {  # a source of requests -> the flags that have no effect with it
    "trace": ("input_tokens", "output_tokens", "prefix_tokens"),
    "dataset": ("input_tokens", "prefix_tokens", "prompt_format"),
}


@dataclass(frozen=True, slots=True)
class Load:
    """When requests are sent. At most one field is set. With the times of a trace, none is set."""

    concurrency: int | None = None  # closed loop: this many requests are always running
    rate: float | None = None  # open loop: requests per second, whether or not earlier ones have finished

    @property
    def label(self) -> str:
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        if self.rate is None:
            return "times of the trace"
        return f"{self.rate:g} requests/s" if math.isfinite(self.rate) else "all requests at once"

    @property
    def value(self) -> str:
        """The number alone, for a table or an axis that names its unit."""
        return f"{self.concurrency or self.rate:g}"


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Lengths in tokens. Each length from `shortest` to `longest` is equally likely."""

    shortest: int
    longest: int


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What is sent to the server, and when."""

    model: str | None = setting(None, "Model name to send. Default: the first one that the server lists.")
    api_key: str | None = setting(
        None,
        "Bearer token to send. Other users of this machine can see the flag; prefer --api-key-file or the environment "
        "variable HOTSET_API_KEY. Default: none.",
    )
    endpoint: Literal["completions", "chat"] = setting(
        "completions",
        "Endpoint to measure: /v1/completions or /v1/chat/completions.",
    )
    prompt_format: Literal["auto", "ids", "text"] = setting(
        "auto",
        "How prompts are sent: as token ids, which makes their lengths exact, or as text. 'auto': token ids, if the "
        "endpoint is completions and the server has /tokenize.",
    )
    concurrency: str | None = setting(
        None,
        f"Number of requests that run at the same time. Several numbers (1,4,16) are measured one after the other. "
        f"Default: {DEFAULT_CONCURRENCY}, unless --rate or --trace is given.",
    )
    rate: str | None = setting(
        None,
        "Requests per second, sent whether or not earlier ones have finished; 'inf' sends all of them at once. Several "
        "numbers (1,2,4) are measured one after the other.",
    )
    burstiness: float = setting(
        1.0, "Spacing of the requests of --rate. 1: random (Poisson); below 1: in bursts; 'inf': evenly spaced."
    )
    num_requests: int | None = setting(
        None,
        f"Number of requests to measure, for each load. Default: {DEFAULT_NUM_REQUESTS}, or without limit if "
        "--duration or --trace is given.",
        minimum=1,
    )
    duration: float | None = setting(
        None,
        "Time in which requests are started, in seconds, for each load. Requests that run at its end are finished.",
        positive=True,
    )
    warmup: int = setting(1, "Requests that are sent before the first measurement and not counted.", minimum=0)
    input_tokens: str = setting("256", "Length of prompts, in tokens: a number, or a range like 512-2048.")
    output_tokens: str = setting("64", "Length of answers, in tokens: a number, or a range like 16-256.")
    prefix_tokens: int = setting(
        0, "Tokens at the beginning of the prompt that are the same in all requests; part of --input-tokens.", minimum=0
    )
    trace: str | None = setting(
        None,
        "JSON Lines file with the fields timestamp (milliseconds), input_length, output_length and hash_ids (one for "
        "each block of 512 tokens; equal ids mean equal tokens). Its times apply unless --rate or --concurrency is "
        "given.",
    )
    trace_speed: float = setting(1.0, "Replay --trace this many times as fast.", positive=True)
    scale_lengths: float = setting(1.0, "Factor for the lengths of --trace, for example 0.1.", positive=True)
    dataset: str | None = setting(
        None,
        "JSON Lines file with prompts to send instead of random words: the field prompt or messages, and optionally "
        "output_tokens. It is repeated as often as needed.",
    )
    temperature: float = setting(0.0, "Sampling temperature of the requests.", minimum=0)
    extra_body: str | None = setting(
        None, 'JSON object with further fields of the requests, for example \'{"tiers": "tiered"}\'.'
    )
    seed: int | None = setting(
        None, "Seed of prompts, lengths and times. Default: a new one for each run, which the report shows."
    )
    request_timeout: float = setting(
        600.0, "Time for one request, in seconds. After that it counts as failed.", positive=True
    )
    slo: str | None = setting(
        None,
        "Limits in milliseconds, like ttft:500,tpot:50 (also e2e). The report shows how many requests meet all of "
        "them (goodput).",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.burstiness > 0:
            raise ConfigError(f"--burstiness must be above 0, got {self.burstiness:g}")
        self._check_effects()
        if self.concurrency is not None and self.rate is not None:
            raise ConfigError("--concurrency and --rate are two kinds of load; leave one of them out")
        if self.trace is not None and self.dataset is not None:
            raise ConfigError("--trace and --dataset both give the requests; leave one of them out")
        if self.endpoint == "chat" and self.prompt_format == "ids":
            raise ConfigError("--prompt-format ids needs --endpoint completions: chat messages are text")
        if self.num_requests is None and any(load.rate == math.inf for load in self.loads):
            raise ConfigError("--rate inf sends all requests at once; say how many with --num-requests")
        if self.dataset is None and self.trace is None and self.prefix_tokens >= self.input_lengths.shortest:
            raise ConfigError(
                f"--prefix-tokens {self.prefix_tokens} must be less than the shortest prompt, which has "
                f"{self.input_lengths.shortest} tokens (--input-tokens)"
            )
        # These properties raise ConfigError for a text that cannot be parsed.
        _ = self.output_lengths, self.objectives, self.extra_fields

    def _check_effects(self) -> None:
        """Raises ConfigError for a flag that has no effect, because another flag is missing or replaces it."""
        given = {field.name for field in fields(self) if getattr(self, field.name) != field.default}
        for name, needed in NEEDS.items():
            if name in given and needed not in given:
                raise ConfigError(f"--{flag_name(name)} has no effect without --{needed}")
        for source, names in REPLACES.items():
            for name in names:
                if source in given and name in given:
                    raise ConfigError(f"--{flag_name(name)} has no effect with --{source}, which gives the requests")

    @property
    def loads(self) -> list[Load]:
        """The loads to measure, one after the other."""
        if self.rate is not None:
            rates = _numbers("rate", self.rate, float)
            if not all(rate > 0 for rate in rates):
                raise ConfigError(f"--rate must be above 0, got {self.rate}")
            return [Load(rate=rate) for rate in rates]
        if self.concurrency is not None:
            counts = _numbers("concurrency", self.concurrency, int)
            if not all(1 <= count <= MAX_CONCURRENCY for count in counts):
                raise ConfigError(f"--concurrency must lie in [1, {MAX_CONCURRENCY}], got {self.concurrency}")
            return [Load(concurrency=count) for count in counts]
        return [Load() if self.trace is not None else Load(concurrency=DEFAULT_CONCURRENCY)]

    @property
    def max_requests(self) -> int | None:
        """The number of requests of each load, or None if there is no limit."""
        if self.num_requests is None and self.duration is None and self.trace is None:
            return DEFAULT_NUM_REQUESTS
        return self.num_requests

    @property
    def input_lengths(self) -> LengthRange:
        return _length_range("input-tokens", self.input_tokens)

    @property
    def output_lengths(self) -> LengthRange:
        return _length_range("output-tokens", self.output_tokens)

    @property
    def objectives(self) -> dict[str, float]:
        """The limits of --slo in seconds, by the name of the latency."""
        limits: dict[str, float] = {}
        for part in () if self.slo is None else self.slo.split(","):
            name, _, milliseconds = part.strip().partition(":")
            try:
                limits[name] = float(milliseconds) / 1e3
            except ValueError:
                limits[name] = math.nan
            if name not in OBJECTIVES or not limits[name] > 0:
                names = ", ".join(OBJECTIVES)
                raise ConfigError(f"--slo {self.slo}: write limits in milliseconds for {names}, like ttft:500,tpot:50")
        return limits

    @property
    def extra_fields(self) -> dict[str, Any]:
        try:
            values = json.loads(self.extra_body or "{}")
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise ConfigError(f"--extra-body must be a JSON object like '{{\"top_p\": 0.9}}', got {self.extra_body}")
        return values


def _numbers(flag: str, text: str, convert: Callable[[str], Number]) -> list[Number]:
    try:
        return [convert(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--{flag} {text}: write a number, or several separated by commas") from None


def _length_range(flag: str, text: str) -> LengthRange:
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text.strip())
    if match is None:
        raise ConfigError(f"--{flag} {text}: write a number of tokens, or a range like 512-2048")
    shortest, longest = int(match[1]), int(match[2] or match[1])
    if not 1 <= shortest <= longest:
        raise ConfigError(f"--{flag} {text}: lengths must be at least 1, and a range must begin with the smaller one")
    return LengthRange(shortest, longest)
