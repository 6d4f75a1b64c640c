"""What a router is told. The fields are the flags of `hotset router`."""

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from hotset.base.config import flag_name
from hotset.base.errors import ConfigError

LONGEST_URL = 512


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Addresses, limits and times of a router."""

    prefill: tuple[str, ...] = _setting((), "Addresses of prefill workers (hotset serve --role prefill).")
    decode: tuple[str, ...] = _setting((), "Addresses of decode workers (hotset serve --role decode).")
    host: str = _setting("127.0.0.1", "Address to listen on.")
    port: int = _setting(8000, "Port to listen on; 0 picks a free one.")
    api_key: str | None = _setting(
        None, "Bearer token that clients must send, also for changing the workers (or set HOTSET_API_KEY)."
    )
    cors_origin: str | None = _setting(None, "Origin that browsers may call from, or '*'. Default: none.")
    max_body_mib: float = _setting(8.0, "Largest request body.")
    max_concurrency: int = _setting(4096, "Most generating requests handled at once; further ones get 429.")
    answer_seconds: float = _setting(600.0, "Longest wait for an answer's first byte, all attempts together.")
    silence_seconds: float = _setting(120.0, "Longest silence within an answer that has begun.")
    poll_seconds: float = _setting(0.5, "Between two looks at each worker.")
    drain_seconds: float = _setting(30.0, "How long SIGTERM lets running requests finish.")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must lie in [0, 65535], got {self.port}")
        for name in (
            "max_body_mib",
            "max_concurrency",
            "answer_seconds",
            "silence_seconds",
            "poll_seconds",
            "drain_seconds",
        ):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"--{flag_name(name)} must be a finite number above 0, got {getattr(self, name)}")
        if self.api_key == "":
            raise ConfigError("--api-key must not be empty; leave it out to serve without a key")
        urls = [worker_url(url) for url in (*self.prefill, *self.decode)]
        twice = next((url for url in urls if urls.count(url) > 1), None)
        if twice is not None:
            raise ConfigError(f"worker {twice} is named twice")


def worker_url(given: str) -> str:
    """`given` as the base of a worker's paths. ConfigError where it is no such address."""
    wrong = ConfigError(f"a worker's address is like http://host:port, not {given[:LONGEST_URL]!r}")
    try:
        parts = urlsplit(given)
        port = parts.port
    except ValueError:
        raise wrong from None
    plain = not (parts.path.strip("/") or parts.query or parts.fragment or parts.username or parts.password)
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain or len(given) > LONGEST_URL:
        raise wrong
    if not given.isascii() or not given.isprintable() or " " in given or port == 0:
        raise wrong
    return f"{parts.scheme}://{parts.netloc}"
