"""`hotset cluster`: engines and routers on a Ray cluster."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from hotset.base.errors import ConfigError, StartupError
from hotset.base.flags import ApiKeyFile, CliCommand, CliGroup, with_key_from_file
from hotset.base.logs import print_note
from hotset.base.packages import check_packages
from hotset.base.status_line import StatusLine, TaskProgress

if TYPE_CHECKING:
    from hotset.fleet.cluster.application import Status

POLL_SECONDS = 0.5
# Ray reads this when it is imported. Without it, Ray replaces 127.0.0.1 by the address of an interface, listens there,
# and does not find a cluster that listens on loopback. It does not affect connections to other clusters.
RAY_ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

app = typer.Typer(cls=CliGroup, no_args_is_help=True, rich_markup_mode="rich")

Address = Annotated[
    str | None,
    typer.Option(
        help="Address of the Ray head, like 10.0.0.1:6379. Default: the environment variable RAY_ADDRESS, else the "
        "cluster that runs on this machine.",
        show_default=False,
    ),
]
Name = Annotated[str, typer.Option(help="Name of the application, as its spec gives it.")]


@app.callback(
    epilog="To try it on this machine: [bold]hotset cluster up docs/clusters/laptop.yaml --local[/bold]. On a Ray "
    "cluster ([bold]ray start --head[/bold] on one machine, [bold]ray start --address HEAD:6379[/bold] on the others): "
    "[bold]hotset cluster up SPEC.yaml[/bold]. docs/cluster.md explains the spec.",
)
def cluster() -> None:
    """Run prefill engines, decode engines and routers on a Ray cluster."""
    os.environ.update(RAY_ON_LOOPBACK)


@app.command(
    cls=CliCommand,
    epilog="Examples:\n\n[bold]hotset cluster up docs/clusters/laptop.yaml --local[/bold]\n\n"
    "[bold]hotset cluster up spec.yaml --address 10.0.0.1:6379 --api-key-file key.txt[/bold]",
)
def up(
    spec: Annotated[Path, typer.Argument(help="File that describes the application, in YAML.", metavar="SPEC.yaml")],
    local: Annotated[
        bool, typer.Option("--local", help="Start a Ray cluster on this machine only, which ends with this command.")
    ] = False,
    address: Address = None,
    api_key_file: ApiKeyFile = None,
    wait_seconds: Annotated[
        float, typer.Option(help="Time for all processes to become ready, in seconds.", min=1)
    ] = 3600,
) -> None:
    """Start an application and wait until it serves."""
    check_packages("cluster", "serve", "cluster")
    from hotset.fleet.cluster.application import (
        check_cluster,
        check_local,
        connected,
        local_cluster,
        log_folder,
        start_application,
    )
    from hotset.fleet.cluster.spec import load_spec

    if local and address is not None:
        raise ConfigError("--local starts a cluster of its own; leave out --address")
    loaded = load_spec(spec)
    if local:
        check_local(loaded)
    api_key = with_key_from_file({"api_key": None}, api_key_file)["api_key"]
    with local_cluster(loaded.name) if local else connected(address, loaded.name) as ray_address:
        if local:
            print_note(f"started a Ray cluster at {ray_address}; its logs are in {log_folder()}")
        check_cluster(loaded)
        with _Signals() as signals:
            start_application(loaded, api_key)
            try:
                _wait_until_complete(wait_seconds, signals if local else None)
                if local:
                    signals.received.wait()
            finally:
                if local:
                    _end(signals)


@app.command(cls=CliCommand)
def status(
    address: Address = None,
    name: Name = "hotset",
    as_json: Annotated[bool, typer.Option("--json", help="Print the status as one JSON object.")] = False,
) -> None:
    """Show the processes of an application, their nodes and their load."""
    with _connected(address, name) as call:
        found = call("status")
        if as_json:
            print(json.dumps(found, indent=2))
        else:
            _print_status(found)


@app.command(
    cls=CliCommand,
    epilog="Example:\n\n[bold]hotset cluster scale decode=4[/bold]  New engines get requests when they are ready. "
    "Engines that are removed first finish theirs.",
)
def scale(
    counts: Annotated[
        list[str], typer.Argument(metavar="ROLE=N...", help="Number of prefill or decode engines or of routers.")
    ],
    address: Address = None,
    name: Name = "hotset",
) -> None:
    """Change the number of engines or routers."""
    with _connected(address, name) as call:
        from hotset.fleet.cluster.application import check_scale

        wanted = _parse_counts(counts)
        check_scale(call("spec"), {**call("status")["counts"], **wanted})
        call("scale", wanted)
    print_note("the controller now starts or ends processes; `hotset cluster status` shows its progress")


@app.command(
    cls=CliCommand,
    epilog="Example:\n\n[bold]hotset cluster drain 10.0.0.3[/bold]  Each process ends when its replacement on another "
    "node is ready and its own requests have finished.",
)
def drain(
    node: Annotated[str, typer.Argument(help="IP address of the node, or the beginning of its id.")],
    now: Annotated[bool, typer.Option("--now", help="Do not wait until replacements are ready.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Use the node again.")] = False,
    address: Address = None,
    name: Name = "hotset",
) -> None:
    """Move all processes away from a node, for example before it is shut down."""
    with _connected(address, name) as call:
        from hotset.fleet.cluster.application import find_node

        found = find_node(node)
        if undo:
            call("undrain", found.id)
        else:
            call("drain", found.id, now=now)
    print_note(f"node {found.label} is {'used again' if undo else 'being drained'}; see `hotset cluster status`")


@app.command(cls=CliCommand)
def down(
    now: Annotated[bool, typer.Option("--now", help="Do not wait until requests have finished.")] = False,
    address: Address = None,
    name: Name = "hotset",
) -> None:
    """End an application: routers first, then decode engines, then prefill engines."""
    with _connected(address, name):
        from hotset.fleet.cluster.application import end_application

        with StatusLine("Ending the application") as line:
            end_application(now=now, report=lambda found: line.show(_progress(found)))


class _Signals:
    """Counts SIGINT and SIGTERM during the block, instead of ending the process."""

    def __init__(self) -> None:
        self.received = threading.Event()
        self.repeated = threading.Event()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        (self.repeated if self.received.is_set() else self.received).set()


@contextmanager
def _connected(address: str | None, name: str) -> Iterator[Any]:
    """Connects to Ray. Yields the function that calls a method of the controller."""
    check_packages("cluster", "serve", "cluster")
    from hotset.fleet.cluster.application import call_controller, connected

    with connected(address, name):
        yield call_controller


def _parse_counts(words: Sequence[str]) -> dict[Any, int]:
    from hotset.fleet.cluster.spec import MAX_PROCESSES, Role

    roles = get_args(Role)
    counts: dict[Any, int] = {}
    for word in words:
        role, _, number = word.partition("=")
        role = role.removesuffix("s") if role == "routers" else role
        if role not in roles or not number.isdigit() or not 1 <= int(number) <= MAX_PROCESSES or role in counts:
            raise ConfigError(
                f"expected the number of processes of each role once, like decode=4, got {word!r}; roles are "
                f"{', '.join(roles)}, and numbers are from 1 to {MAX_PROCESSES}"
            )
        counts[role] = int(number)
    return counts


def _wait_until_complete(seconds: float, signals: _Signals | None) -> None:
    """Waits until all processes are ready, and prints how to reach them. Prints the failures on the way."""
    from hotset.fleet.cluster.application import call_controller, is_complete, router_urls

    deadline = time.monotonic() + seconds
    shown: set[str] = set()
    with StatusLine("Starting the application") as line:
        while not is_complete(found := call_controller("status")):
            for member in found["members"]:
                if member["phase"] == "failed" and member["name"] not in shown:
                    shown.add(member["name"])
                    line.print(f"{member['name']} failed: {member['error']}")
            if signals is not None and signals.received.is_set():
                return
            if time.monotonic() > deadline:
                raise StartupError(
                    f"not all processes were ready after {seconds:g} s; `hotset cluster status` shows them, and "
                    "`hotset cluster down` ends them"
                )
            line.show(_progress(found))
            time.sleep(POLL_SECONDS)
    print(
        f"Hotset serves {found['model']} at {', '.join(router_urls(found))} (application {found['name']})", flush=True
    )


def _end(signals: _Signals) -> None:
    """Ends the application of a local cluster. After a second signal, it does not wait for requests."""
    from hotset.fleet.cluster.application import call_controller, end_application

    print_note("stopping in order: routers, decode engines, prefill engines; press Ctrl-C again to stop at once")
    hurried = False

    def report(found: "Status") -> None:
        nonlocal hurried
        if signals.repeated.is_set() and not hurried:
            hurried = True
            call_controller("shut_down", now=True)

    end_application(now=False, report=report)


def _progress(found: "Status") -> TaskProgress:
    members = found["members"]
    ready = sum(member["phase"] == "ready" for member in members)
    total = len(members) if found["shutdown"] != "no" else sum(found["counts"].values())
    details = ", ".join(f"{member['name']} is {_phase_of(member)}" for member in members if member["phase"] != "ready")
    return TaskProgress("ready", ready, total, details=details[:120])


def _phase_of(member: dict[str, Any]) -> str:
    if member["phase"] == "starting" and member["node"] is None:
        return "waiting for resources"
    return str(member["phase"])


def _print_status(found: "Status") -> None:
    from rich.console import Console
    from rich.table import Table

    counts = ", ".join(f"{count} {role}" for role, count in found["counts"].items())
    table = Table(title=f"{found['name']}: {found['model']}, wanted: {counts}; {found['restarts']} restarts")
    for column in ("process", "state", "for", "node", "address", "running", "waiting", "KV in use", "failures"):
        table.add_column(column)
    for member in sorted(found["members"], key=lambda member: (member["role"], member["name"])):
        load = member["load"]
        loads = (str(load["running"]), str(load["waiting_requests"]), f"{load['kv_usage']:.0%}")
        table.add_row(
            member["name"],
            _phase_of(member),
            f"{member['seconds']:.0f} s",
            (member["node"] or "-")[:8],
            member["url"] or "-",
            *(("-", "-", "-") if member["role"] == "router" else loads),
            str(member["failures"]),
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    for member in found["members"]:
        if member["error"]:
            print(f"{member['name']}: {member['error']}")
    if found["drained"]:
        print("drained nodes:", ", ".join(node[:8] for node in found["drained"]))
    if found["controller_error"]:
        print("the controller cannot act:", found["controller_error"])
