"""The configuration of a router. Its fields are the flags of `hotset router`."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from hotset.base.config import (
    MAX_CONNECTIONS_HELP,
    RECEIVE_TIMEOUT_HELP,
    SEND_TIMEOUT_HELP,
    check_settings,
    setting,
)
from hotset.base.errors import ConfigError

MAX_URL_CHARACTERS = 512


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Worker addresses, limits and timeouts of a router."""

    prefill: tuple[str, ...] = setting((), "URLs of prefill workers (hotset serve --role prefill).")
    decode: tuple[str, ...] = setting((), "URLs of decode workers (hotset serve --role decode).")
    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 accepts connections from other machines.")
    port: int = setting(8000, "Port to listen on; 0 picks a free one.", minimum=0, maximum=65535)
    api_key: str | None = setting(
        None,
        "Bearer token that clients must send. Adding and removing workers requires one. Other users of this machine "
        "can see the flag; prefer --api-key-file or the environment variable HOTSET_API_KEY. Default: no key.",
    )
    cors_origin: str | None = setting(None, "Origin that browsers may call from, or '*' for any. Default: none.")
    max_body_mib: float = setting(
        8.0, "Largest request body, in MiB; a larger one is answered with 413.", positive=True
    )
    max_concurrency: int = setting(
        4096, "Maximum number of completion requests in progress; further ones are answered with 429.", positive=True
    )
    max_connections: int = setting(8192, MAX_CONNECTIONS_HELP, positive=True)
    receive_timeout_seconds: float = setting(60.0, RECEIVE_TIMEOUT_HELP, positive=True)
    send_timeout_seconds: float = setting(60.0, SEND_TIMEOUT_HELP, positive=True)
    response_timeout_seconds: float = setting(
        600.0,
        "Time limit for the first byte of a response, including retries, in seconds; then the router answers 504.",
        positive=True,
    )
    idle_timeout_seconds: float = setting(
        120.0,
        "Longest pause within a streamed response, in seconds; then the router ends it with an error.",
        positive=True,
    )
    poll_seconds: float = setting(0.5, "Interval between two health checks of a worker, in seconds.", positive=True)
    drain_seconds: float = setting(
        30.0, "Time that running requests get to finish after SIGTERM, in seconds.", positive=True
    )

    def __post_init__(self) -> None:
        check_settings(self)
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
