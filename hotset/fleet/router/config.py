"""The configuration of a router. Its fields are the flags of `hotset router`."""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from hotset.base.address import MIN_SECRET_CHARACTERS
from hotset.base.errors import ConfigError
from hotset.base.serve_config import HttpSettings
from hotset.base.settings import setting

MAX_URL_CHARACTERS = 512
LOOPBACK_HOSTS = ("127.0.0.0/8", "::1", "localhost")
HOST_NAME = re.compile(r"(?=.*[a-z])[a-z0-9_-]+(\.[a-z0-9_-]+)*")


@dataclass(frozen=True, slots=True)
class RouterConfig(HttpSettings):
    """Worker addresses, limits and timeouts of a router."""

    prefill: tuple[str, ...] = setting((), "URLs of prefill workers.", metavar="URL...")
    decode: tuple[str, ...] = setting((), "URLs of decode workers.", metavar="URL...")
    workers_file: str | None = setting(
        None,
        "File with the URLs of all workers, instead of --prefill and --decode. It is read again whenever it changes: "
        'a JSON object like {"prefill": ["http://host:port"], "decode": []}. Replace it by renaming a complete file.',
    )
    allow_workers: tuple[str, ...] = setting(
        LOOPBACK_HOSTS,
        "Hosts whose workers may join with POST /workers: names, IP addresses or networks like 10.0.0.0/24. Default: "
        "this machine, by its loopback addresses.",
        metavar="HOST...",
    )
    handoff_secret: str | None = setting(
        None,
        "Secret of the workers, with which the router signs the prefill worker of a request. Required if they have "
        "one. Default: the environment variable HOTSET_HANDOFF_SECRET.",
    )
    api_key: str | None = setting(
        None,
        "Bearer token that clients must send. Adding and removing workers requires one. Other users of this machine "
        "can see the flag; prefer --api-key-file or the environment variable HOTSET_API_KEY. Default: no key.",
    )
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
    health_timeout_seconds: float = setting(
        2.0, "Time limit for the answer to a health check, in seconds.", positive=True
    )

    def __post_init__(self) -> None:
        HttpSettings.__post_init__(self)
        if self.handoff_secret is not None and len(self.handoff_secret) < MIN_SECRET_CHARACTERS:
            raise ConfigError(f"the handoff secret must have at least {MIN_SECRET_CHARACTERS} characters")
        for host in self.allow_workers:
            if _network(host) is None and not HOST_NAME.fullmatch(host.lower()):
                raise ConfigError(
                    f"--allow-workers takes host names, IP addresses or networks like 10.0.0.0/24, got {host!r}"
                )
        if self.workers_file is not None and (self.prefill or self.decode):
            raise ConfigError("--workers-file names all workers; leave it out, or leave out --prefill and --decode")
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


def is_allowed(url: str, allowed: Iterable[str]) -> bool:
    """Returns whether the host of a worker's URL is in a list of names, IP addresses and networks.

    A name is not resolved: it must be in the list itself.
    """
    host = urlsplit(url).hostname or ""
    address = _network(host)
    if address is None:
        return host in (entry.lower() for entry in allowed)
    return any(address[0] in network for entry in allowed if (network := _network(entry)) is not None)


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Returns the network, or the network of one address, that `text` denotes. Returns None for any other text."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None
