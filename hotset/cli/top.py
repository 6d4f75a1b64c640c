"""`hotset top` shows the data of the live page in a terminal. It reads the stream at /live of a server or a router."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.base.config import environment_defaults
from hotset.base.errors import ConfigError, HotsetError
from hotset.base.flags import ApiKeyFile, CliCommand, with_key_from_file

if TYPE_CHECKING:
    from hotset.cli.top_screen import Watched

DEFAULT_URL = "http://127.0.0.1:8000"
READ_SECONDS = 15.0  # longest pause of the stream, which has a line every two seconds
RETRY_SECONDS = 1.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # without the proxies of the environment

Json = dict[str, Any]


def add_top(app: typer.Typer) -> None:
    """Adds the command `top` to `app`."""
    app.command(
        "top",
        cls=CliCommand,
        epilog="Examples:\n\n"
        "[bold]hotset top[/bold]  watches the server at http://127.0.0.1:8000\n\n"
        "[bold]hotset top http://gpu:8000 --api-key-file key.txt[/bold]  watches a server or router with a key\n\n"
        "[bold]hotset top --once[/bold]  prints the state once and exits",
    )(top)


def top(
    url: Annotated[str, typer.Argument(help="Address of a server or a router.")] = DEFAULT_URL,
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit.")] = False,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="API key of the server. Default: the environment variable HOTSET_API_KEY.", show_default=False
        ),
    ] = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Watch a server or a router: requests by tier, memory, throughput, latencies and misses. Ctrl-C quits."""
    from rich.console import Console
    from rich.live import Live

    from hotset.cli.top_screen import Watched, frame

    key = with_key_from_file({"api_key": api_key}, api_key_file)["api_key"] or environment_defaults().get("api_key")
    console, watched = Console(), Watched(url)
    if once or not console.is_terminal:
        watched.apply(next(messages(url, key)))
        console.print(frame(watched, console.height))
        return
    try:
        with Live(console=console, auto_refresh=False, screen=True) as shown:
            for message in _messages_with_reconnects(url, key, watched):
                watched.apply(message)
                shown.update(frame(watched, console.height), refresh=True)
    except KeyboardInterrupt:
        return


def messages(url: str, key: str | None) -> Iterator[Json]:
    """Yields the messages of one stream. Raises ConfigError if the address or the key is wrong, and HotsetError if the
    server cannot be reached or the stream breaks off."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"the address of a server must look like {DEFAULT_URL}, got {url!r}")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/live", headers=headers)
        with DIRECT.open(request, timeout=READ_SECONDS) as stream:
            for line in stream:
                yield json.loads(line)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 401:
            raise ConfigError(f"{url} needs an API key; give it with --api-key-file or HOTSET_API_KEY") from None
        if error.code == 404:
            raise ConfigError(f"{url} has no live data; it is not Hotset, or was started with --no-page") from None
        raise HotsetError(f"{url} answered with status {error.code}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise HotsetError(f"cannot read {url}/live: {getattr(error, 'reason', None) or error}") from None


def _messages_with_reconnects(url: str, key: str | None, watched: "Watched") -> Iterator[Json]:
    """Yields the messages of a stream, and of a new one whenever it breaks off. Raises ConfigError like `messages`, and
    every error before the first message."""
    while True:
        try:
            yield from messages(url, key)
        except ConfigError:
            raise
        except HotsetError:
            if not watched.hello:
                raise
        yield {"failure": "the connection is lost; trying again"}
        time.sleep(RETRY_SECONDS)
