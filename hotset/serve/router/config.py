"""The configuration of a router. Its fields are the flags of `hotset router`."""

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from hotset.base.config import flag_name
from hotset.base.errors import ConfigError

MAX_URL_CHARACTERS = 512


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Worker addresses, limits and timeouts of a router."""

    prefill: tuple[str, ...] = _setting((), "URLs of prefill workers (hotset serve --role prefill).")
    decode: tuple[str, ...] = _setting((), "URLs of decode workers (hotset serve --role decode).")
    host: str = _setting("127.0.0.1", "Address to listen on; 0.0.0.0 accepts connections from other machines.")
    port: int = _setting(8000, "Port to listen on; 0 picks a free one.")
    api_key: str | None = _setting(
        None,
        "Bearer token that clients must send. Adding and removing workers requires one. "
        "Default: the environment variable HOTSET_API_KEY, else no key.",
    )
    cors_origin: str | None = _setting(None, "Origin that browsers may call from, or '*' for any. Default: none.")
    max_body_mib: float = _setting(8.0, "Largest request body, in MiB; a larger one is answered with 413.")
    max_concurrency: int = _setting(
        4096, "Maximum number of completion requests in progress; further ones are answered with 429."
    )
    response_timeout_seconds: float = _setting(
        600.0, "Time limit for the first byte of a response, retries included; then the router answers 504."
    )
    idle_timeout_seconds: float = _setting(
        120.0, "Longest pause between two pieces of a streamed response before the router ends it with an error."
    )
    poll_seconds: float = _setting(0.5, "Interval between two health checks of a worker.")
    drain_seconds: float = _setting(30.0, "Time that running requests get to finish after SIGTERM.")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must lie in [0, 65535], got {self.port}")
        for name in (
            "max_body_mib",
            "max_concurrency",
            "response_timeout_seconds",
            "idle_timeout_seconds",
            "poll_seconds",
            "drain_seconds",
        ):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"--{flag_name(name)} must be a finite number above 0, got {getattr(self, name)}")
        if self.api_key == "":
            raise ConfigError("--api-key must not be empty; leave it out to serve without a key")
        urls = [worker_url(url) for url in (*self.prefill, *self.decode)]
        repeated = next((url for url in urls if urls.count(url) > 1), None)
        if repeated is not None:
            raise ConfigError(f"worker {repeated} is named twice; name each worker once")


def worker_url(text: str) -> str:
    """Returns the base URL of a worker, without a trailing slash. Raises ConfigError if `text` is not such a URL."""
    invalid = ConfigError(f"a worker's address must look like http://host:port, got {text[:MAX_URL_CHARACTERS]!r}")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise invalid from None
    bare = not (parts.path.strip("/") or parts.query or parts.fragment or parts.username or parts.password)
    if parts.scheme not in ("http", "https") or not parts.hostname or not bare or len(text) > MAX_URL_CHARACTERS:
        raise invalid
    if not text.isascii() or not text.isprintable() or " " in text or port == 0:
        raise invalid
    return f"{parts.scheme}://{parts.netloc}"
