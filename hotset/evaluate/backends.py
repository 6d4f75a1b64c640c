"""Where questions go: an engine in this process, or an OpenAI-compatible server."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from hotset.base.errors import ConfigError, MissingDependency, RequestError, StartupError
from hotset.base.sampling import SamplingParams

if TYPE_CHECKING:
    from hotset.engine.llm import LLM

BOS = "<|bos|>"  # of the demo model, whose tokenizer does not put it there by itself
IN_FLIGHT = 8
ANSWER_SECONDS = 600.0


class LocalBackend:
    """An `LLM` in this process. The caller closes it."""

    def __init__(self, llm: "LLM") -> None:
        tokenizer = llm.tokenizer
        if tokenizer is None:
            raise ConfigError(f"{llm.card.name} came without a tokenizer; name one with --tokenizer")
        self._llm = llm
        self._tokenizer = tokenizer
        self.name = llm.card.name
        self.context = llm.card.max_model_len
        self._prefix = BOS if len(tokenizer.encode(BOS)) == 1 else ""

    def count_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(self._prefix + text))

    def answer(self, prompts: Sequence[str], max_tokens: int) -> list[str]:
        greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        outputs = self._llm.generate([self._prefix + prompt for prompt in prompts], greedy)
        return [output.outputs[0].text for output in outputs]


class ServerBackend:
    """A server that has `/v1/models` with `max_model_len`, `/v1/completions` and `/tokenize`.

    StartupError if it cannot be reached or answers otherwise. The caller closes it.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            import httpx
        except ImportError as error:
            raise MissingDependency("--url needs httpx; run: pip install httpx") from error
        self._failures = (httpx.HTTPError, httpx.InvalidURL)
        self._url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(ANSWER_SECONDS, connect=10.0))
        model = self._ask("GET", "/v1/models", None, lambda reply: reply["data"][0])
        self.name = str(model["id"])
        self.context = int(model.get("max_model_len") or 0)
        if self.context < 1:
            raise StartupError(f"{self._url} does not say how long a context {self.name} has (max_model_len)")
        self._prefix = ""
        self._prefix = BOS if self.count_tokens(BOS) == 1 else ""

    def count_tokens(self, text: str) -> int:
        return int(self._ask("POST", "/tokenize", {"prompt": self._prefix + text}, lambda reply: reply["count"]))

    def answer(self, prompts: Sequence[str], max_tokens: int) -> list[str]:
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            return list(pool.map(lambda prompt: self._complete(prompt, max_tokens), prompts))

    def close(self) -> None:
        self._client.close()

    def _complete(self, prompt: str, max_tokens: int) -> str:
        body = {"model": self.name, "prompt": self._prefix + prompt, "max_tokens": max_tokens, "temperature": 0}
        return str(self._ask("POST", "/v1/completions", body, lambda reply: reply["choices"][0]["text"]))

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, wanted: Any) -> Any:
        try:
            reply = self._client.request(method, self._url + path, json=body)
        except self._failures as error:
            raise StartupError(f"{self._url} cannot be reached: {str(error) or type(error).__name__}") from error
        if reply.status_code != 200:
            raise RequestError(f"{self._url}{path} answered {reply.status_code}: {reply.text[:200]}")
        try:
            return wanted(reply.json())
        except (ValueError, LookupError, TypeError) as error:
            raise StartupError(f"{self._url}{path} did not answer as an OpenAI-compatible server does") from error
