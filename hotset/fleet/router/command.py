"""`hotset router`: serves the OpenAI API in front of prefill and decode workers."""

from typing import Any

import typer

from hotset.base.flags import ApiKeyFile, CliCommand, config_values, with_flags, with_key_from_file
from hotset.base.listeners import bound_socket
from hotset.base.packages import check_packages
from hotset.fleet.router.config import RouterConfig


class RouterCommand(CliCommand):
    """A command whose worker flags take several values: `--prefill A B` means `--prefill A --prefill B`."""

    REPEATED = ("--prefill", "--decode", "--allow-workers")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        expanded: list[str] = []
        flag = ""
        for word in args:
            if word.startswith("-"):
                flag = word
            elif flag in self.REPEATED and expanded[-1] != flag:
                expanded.append(flag)
            expanded.append(word)
        return super().parse_args(ctx, expanded)


def add_router(app: typer.Typer) -> None:
    """Adds the command `router` to `app`."""
    app.command(
        "router",
        cls=RouterCommand,
        epilog="Example:\n\n"
        "[bold]hotset router --prefill http://a:8001 --decode http://b:8001 http://c:8001 --api-key-file key.txt"
        "[/bold]\n\n"
        "Start workers with [bold]hotset serve MODEL --role prefill[/bold] and [bold]--role decode[/bold]. To add a "
        "worker later, send [bold]POST /workers[/bold] with the API key and "
        '{"url": "http://host:port"}; [bold]DELETE /workers[/bold] removes one.',
    )(router)


@with_flags(RouterConfig)
def router(api_key_file: ApiKeyFile = None, **values: Any) -> None:
    """Serve the OpenAI API with separate prefill and decode workers."""
    config = RouterConfig(**config_values(RouterConfig, with_key_from_file(values, api_key_file)))
    check_packages("router", "serve")
    with bound_socket(config.host, config.port) as listener:
        from hotset.fleet.router.server import run

        run(config, listener)
