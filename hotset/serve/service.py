"""The state that all endpoints share: engine client, configuration, metrics, load, and checks of requests."""

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from hotset import __version__
from hotset.base.config import EVENT_SETTINGS, HANDOFF_SETTINGS, EngineConfig
from hotset.base.errors import EngineStopped, NoRoomLeft, QueueFull, RequestError, UnknownModel, WrongRole
from hotset.base.job_pool import MAX_WORKERS
from hotset.base.request_options import RequestOptions
from hotset.base.sampling import SamplingParams
from hotset.base.serve_config import ServeConfig
from hotset.base.structure import Structure, needs_tokenizer
from hotset.engine.client import EngineClient
from hotset.engine.input_processor import ModelCard, check_token_ids
from hotset.engine.outputs import EngineStats
from hotset.models.tokenizer import Tokenizer
from hotset.serve.fair_queue import FairQueue
from hotset.serve.metrics import Metrics
from hotset.serve.prefill_header import PREFILL_HEADER, check_prefill
from hotset.serve.protocol import GenerationFields, SamplingFields
from hotset.serve.responses import Health, KvEventsPorts, TokenizerInfo, WorkerState
from hotset.serve.retry_after import Turnover
from hotset.serve.structured_output import structure_of
from hotset.serve.traces import Traces

SAMPLING_NAMES = tuple(field.name for field in fields(SamplingParams))

NOT_IN_FINGERPRINT = {"model", "tokenizer", "device", "role", "seed", "step_timeout"}
NOT_IN_FINGERPRINT |= {*HANDOFF_SETTINGS, *EVENT_SETTINGS}
# The numbers of EngineStats that /handoff reports under the same names.
REPORTED_STATS = (
    "kv_usage",
    "tier_pressure",
    "resident",
    "tiered",
    "parked",
    "device_pages_held",
    "device_pages_total",
    "tokens_generated",
    "tokens_prefilled",
)
TEXT_THREADS = 2
JOBS_AT_ONCE = MAX_WORKERS // 2
MAX_TEXT_TOKENS = 1 << 18  # what /tokenize returns and /detokenize accepts, unless the model's context is longer

T = TypeVar("T")


def fingerprint(config: EngineConfig, model: ModelCard) -> str:
    """Returns a stable hash of what may change the tokens of a seeded request: the version of Hotset, the model, and
    the settings of the engine, without the paths of the model, addresses, secrets and time limits."""
    settings = {name: value for name, value in asdict(config).items() if name not in NOT_IN_FINGERPRINT}
    described = [__version__, model.name, model.architecture, model.device.partition(":")[0], model.dtype, settings]
    return "fp_" + hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:12]


class ServerLoad:
    """The load that routers compare. Reading it never waits for the engine, which may be in a long step."""

    def __init__(self) -> None:
        self.waiting_tokens = 0
        self.queue = Turnover()  # the requests that wait for their first token
        self._refresh: asyncio.Task[None] | None = None

    @contextmanager
    def waiting(self, tokens: int) -> Iterator[Callable[[], None]]:
        """Counts a request and its prompt tokens as waiting until the yielded function is called or the block ends."""
        is_waiting = True
        self.waiting_tokens += tokens
        self.queue.arrive()

        def started() -> None:
            nonlocal is_waiting
            if is_waiting:
                is_waiting = False
                self.waiting_tokens -= tokens
                self.queue.leave()

        try:
            yield started
        finally:
            started()

    def seconds_until_started(self) -> int:
        """Estimates the time until all requests that wait now have started."""
        return self.queue.seconds_until(self.queue.present)

    def stats(self, client: EngineClient) -> EngineStats:
        """Returns the statistics that were received last, and requests new ones in the background, unless the engine
        has not answered the previous request yet. While requests run, the engine also reports them by itself."""
        if self._refresh is None or self._refresh.done():
            self._refresh = asyncio.create_task(self._fetch(client))
        return EngineStats() if client.newest_stats is None else client.newest_stats.stats

    async def _fetch(self, client: EngineClient) -> None:
        with suppress(EngineStopped):
            await client.stats()


@dataclass(frozen=True)
class Service:
    """One served model. Borrows the engine client, which its creator closes."""

    client: EngineClient
    config: ServeConfig
    aliases: frozenset[str] = frozenset()
    handoff_secret: str | None = None
    fingerprint: str = ""  # the system_fingerprint of answers
    metrics: Metrics = field(default_factory=Metrics)
    load: ServerLoad = field(default_factory=ServerLoad)
    traces: Traces | None = None  # None without a collector
    started: int = field(default_factory=lambda: int(time.time()))
    # Few threads handle long texts and bodies, so that only a few of these need memory at a time. Templates and
    # structures have threads of their own, which wait for processes: a slow process must not delay other requests.
    text_threads: Executor = field(default_factory=lambda: ThreadPoolExecutor(TEXT_THREADS, "hotset-text"))
    templates: FairQueue = field(default_factory=lambda: FairQueue("rendering of templates", JOBS_AT_ONCE))
    structures: FairQueue = field(default_factory=lambda: FairQueue("checks of structures", JOBS_AT_ONCE))

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.client.model.name

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError if the model has none."""
        if self.client.tokenizer is None:
            raise RequestError("this model has no tokenizer; send token ids to /v1/completions", code="no_tokenizer")
        return self.client.tokenizer

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name and name not in self.aliases:
            raise UnknownModel(f"model {name!r} does not exist; this server has {self.model_name!r}", param="model")

    def check_open(self, choices: int = 1) -> None:
        """Raises QueueFull if the queue has no room for `choices` more, and EngineStopped if the engine has ended.

        If the queue is empty, a request is accepted however many choices it has: waiting would not help it.
        """
        self.client.check()
        waiting = self.client.waiting
        limit = self.config.max_queue
        if waiting and waiting + choices > limit:
            raise QueueFull(
                f"{waiting} choices are waiting, and the queue holds {limit} (--max-queue)",
                retry_after_s=self.load.seconds_until_started(),
            )

    def check_role(self) -> None:
        """Raises WrongRole at a prefill worker, which does not answer completion requests."""
        if self.client.role == "prefill":
            raise WrongRole(
                "this is a prefill worker, which does not answer completion requests; send them to a router "
                "(hotset router) or to a decode worker"
            )

    def request_options(self, body: GenerationFields, headers: Mapping[str, str]) -> RequestOptions:
        """Returns the options of a request. Raises the errors of `_prefill_at`."""
        return body.request_options(self._prefill_at(headers))

    def _prefill_at(self, headers: Mapping[str, str]) -> str | None:
        """Returns the control address of the prefill worker that the router chose, or None if the header is missing.

        Raises WrongRole if a server that is not a decode worker gets the header, and NotAllowed if its router did not
        choose the address. The engine client checks the form of the address.
        """
        address = headers.get(PREFILL_HEADER)
        if address is None:
            return None
        if self.client.role != "decode":
            raise WrongRole(f"{PREFILL_HEADER} is only for decode workers, and this server is not one; leave it out")
        check_prefill(headers, secret=self.handoff_secret, http_host=self.config.host)
        return address

    def describe(self) -> dict[str, Any]:
        """Describes this server to the live page."""
        model = self.client.model
        return {
            "kind": "server",
            "version": __version__,
            "model": self.model_name,
            "role": self.client.role,
            "device": model.device,
            "split": model.split,
            "max_model_len": model.max_model_len,
            "bus": model.bus_bytes_per_second,
        }

    def health(self) -> Health:
        """Returns the progress of the engine. Raises EngineStopped with the reason if it has died or hangs, and
        NoRoomLeft while quarantine leaves too few pages for a request of the maximum length."""
        self.client.check()
        progress = self.client.progress
        if (lack := self.lack_of_room()) is not None:
            raise NoRoomLeft(lack)
        return Health(
            steps=progress.steps,
            seconds_since_step=progress.seconds_since_step,
            seconds_without_progress=self.client.seconds_without_progress,
            open_requests=progress.open_requests,
        )

    def lack_of_room(self) -> str | None:
        """Returns why a request of the maximum length cannot be admitted now, or None if it can."""
        stats = self.load.stats(self.client)
        if not stats.lacks_room:
            return None
        total = stats.device_pages_total + stats.host_pages_total
        return (
            f"{stats.quarantined_pages} of {total} pages are in quarantine, because lost prefill workers could still "
            f"write to them; the others are too few for {self.client.model.max_model_len} tokens. Quarantine ends when "
            "these workers answer or have ended"
        )

    def state(self) -> WorkerState:
        """Returns this worker's role, address and load for a router. Raises EngineStopped if the engine has ended."""
        self.client.check()
        stats = self.load.stats(self.client)
        hasher = self.client.model.page_hasher
        return WorkerState(
            role=self.client.role,
            control=self.client.control,
            model=self.model_name,
            waiting_tokens=max(self.load.waiting_tokens, stats.tokens_to_prefill),
            waiting=max(stats.waiting, self.client.waiting),
            running=stats.running,
            degraded=self.lack_of_room(),
            kv_events=[
                KvEventsPorts(live=events.live.port, replay=None if events.replay is None else events.replay.port)
                for events in self.client.model.kv_events
            ],
            stored_tokens=0 if hasher is None else (stats.host_pages_held + stats.host_pages_cached) * hasher.page_rows,
            host_tokens=0 if hasher is None else stats.host_pages_total * hasher.page_rows,
            **{name: getattr(stats, name) for name in REPORTED_STATS},
        )

    @property
    def max_text_tokens(self) -> int:
        """The maximum number of tokens of /tokenize and /detokenize."""
        return max(self.client.model.max_model_len, MAX_TEXT_TOKENS)

    async def encode(self, text: str, max_tokens: int | None = None, *, add_special: bool = True) -> list[int]:
        """Returns the token ids of a prompt. Raises ContextLengthExceeded for a long text with more than `max_tokens`
        tokens; the default is the model's context length."""
        limit = max_tokens or self.client.model.max_model_len
        return await self.in_text_thread(lambda: self.tokenizer.encode(text, add_special=add_special, max_tokens=limit))

    def tokenizer_info(self) -> TokenizerInfo:
        return TokenizerInfo(model_max_length=self.client.model.max_model_len, **self.tokenizer.description)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of token ids, including special tokens. Raises RequestError if there are too many, or if one
        is outside the vocabulary."""
        if len(token_ids) > self.max_text_tokens:
            message = f"tokens has {len(token_ids)} ids, and the limit is {self.max_text_tokens}; send fewer"
            raise RequestError(message, param="tokens", code="invalid_value")
        check_token_ids("tokens", token_ids, self.client.model.vocab)
        return await self.in_text_thread(lambda: self.tokenizer.decode(token_ids, skip_special=False))

    def max_untruncated(self, body: SamplingFields) -> int:
        """Returns how many tokens a prompt may have before it is truncated. Without truncation, the context length."""
        return self.client.model.max_model_len if body.truncate_prompt_tokens is None else self.max_text_tokens

    def truncated(self, prompt: list[int], body: SamplingFields, answer_tokens: int) -> list[int]:
        """Returns the last `truncate_prompt_tokens` tokens of a prompt, or all if the request sets no limit. -1 leaves
        room for `answer_tokens`, and for at least one token."""
        kept = body.truncate_prompt_tokens
        if kept == -1:
            kept = max(1, self.client.model.max_model_len - max(1, answer_tokens, body.min_tokens or 0))
        return prompt if kept is None else prompt[-kept:]

    async def texts(self, prompts: Sequence[Sequence[int]], *, skip_special: bool) -> list[str]:
        """Returns the texts of prompts. They are empty, as the texts of answers are, if the model has no tokenizer."""
        tokenizer = self.client.tokenizer
        if tokenizer is None:
            return [""] * len(prompts)
        return await self.in_text_thread(
            lambda: [tokenizer.decode(prompt, skip_special=skip_special) for prompt in prompts]
        )

    async def check_structure(self, client: str, structure: Structure | None) -> None:
        """Raises RequestError if a structure that `client` demands cannot be compiled within limits."""
        if structure is None:
            return
        checks = self.client.structure_checks
        if checks is None:
            raise needs_tokenizer()
        if not checks.has_passed(structure):
            await self.structures.run(client, lambda: checks.check(structure))

    async def in_text_thread(self, work: Callable[[], T]) -> T:
        """Does work that takes too long for the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.text_threads, work)

    def completion_params(
        self, body: SamplingFields, *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """Returns the sampling parameters of a request to one of the completion endpoints."""
        if max_tokens == 0 and not body.shows_prompt:
            message = "max_tokens is 0, so that nothing is generated: this is only for echo or prompt_logprobs"
            raise RequestError(message, param="max_tokens", code="invalid_value")
        bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
        structure = structure_of(body.response_format, body.structured_outputs)
        return self.sampling_params(
            body, max_tokens=max_tokens, logprobs=logprobs, logit_bias=bias or None, structure=structure
        )

    def sampling_params(self, body: GenerationFields, **converted: Any) -> SamplingParams:
        """Returns sampling parameters: the client's values, else the model's defaults, else Hotset's defaults.

        `converted` are parameters whose fields have other names or forms. All others are fields of `body`.
        """
        names = [name for name in SAMPLING_NAMES if name in type(body).model_fields and name not in converted]
        given = {name: value for name in names if (value := getattr(body, name)) is not None}
        return SamplingParams(**{**self.client.defaults, **given, **converted})
