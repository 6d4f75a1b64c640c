"""`--disaggregate` and `hotset router`: rejected settings, the command lines of child processes, and a child
that does not start, dies, or does not answer."""

import asyncio
import os
import re
import signal
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from processes import wait_until_ended

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError, StartupError
from hotset.base.flags import config_values
from hotset.base.serve_config import ServeConfig
from hotset.base.units import GIB
from hotset.cli import app
from hotset.engine.progress import STOP_SECONDS, closing_seconds
from hotset.fleet.local import deployment as local_deployment
from hotset.fleet.local.deployment import router_arguments, stop_seconds, worker_arguments
from hotset.fleet.local.shares import RoleEngine
from hotset.fleet.router.config import RouterConfig

SECRET = "s3cret that is long enough"


def parsed(arguments: list[str]) -> dict[str, object]:
    """Returns the parameters that `hotset` parses from a command line."""
    name, *options = arguments
    command = typer.main.get_command(app).commands[name]
    return dict(command.make_context(name, options).params)


def test_worker_arguments_contain_the_settings_of_the_engine() -> None:
    config = EngineConfig(
        model="m",
        role="decode",
        page_rows=16,
        seed=3,
        handoff_secret=SECRET,
        kv_dtype="fp8",
        prefix_cache=False,
        pack_weights=False,
        transfer="mooncake",
        transfer_interface="lo",
        data_parallel_size=2,
        gpus="1,3",
        device_kv_gib=2.5,
        host_kv_gib=4.0,
    )
    serve = ServeConfig(host="0.0.0.0", port=80, api_key="k3y", max_queue=7, served_model_name="name")
    arguments = worker_arguments(config, serve)
    assert not {SECRET, "k3y"} & set(arguments), "every user of the machine can read a process's arguments"
    received = parsed(arguments)
    expected = {"model": "m", "page_rows": 16, "seed": 3, "kv_dtype": "fp8", "role": "decode", "gpus": "1,3"}
    expected |= {"device_kv_gib": 2.5, "host_kv_gib": 4.0, "max_queue": 7, "served_model_name": "name"}
    expected |= {"host": "127.0.0.1", "port": 0, "transfer": "mooncake", "transfer_interface": "lo"}
    expected |= {"prefix_cache": False, "pack_weights": False, "data_parallel_size": 2}
    assert {name: received[name] for name in expected} == expected


def test_workers_publish_kv_events_only_if_the_user_asks_for_them() -> None:
    def events(**settings: Any) -> tuple[object, object]:
        received = parsed(worker_arguments(EngineConfig(**settings), ServeConfig()))
        return received["kv_events"], received["kv_events_replay"]

    assert events() == (None, None)
    assert events(kv_events="tcp://127.0.0.2:0") == ("tcp://127.0.0.2:0", None)


def test_a_worker_is_not_killed_before_its_own_stop_timeout() -> None:
    def engine_seconds(gib: float) -> float:
        """Returns the time after the drain until the HTTP process of a worker kills its engine process."""
        return STOP_SECONDS + closing_seconds(int(gib * GIB), with_endpoint=True)

    assert stop_seconds([EngineConfig(host_kv_gib=1.0), EngineConfig(host_kv_gib=64.0)]) > engine_seconds(64.0)
    assert stop_seconds([EngineConfig(host_kv_tokens=1 << 20)]) > engine_seconds(1.0), (
        "the size of the host store in bytes is unknown, so the limit must suffice for the whole memory of the machine"
    )


class Unavailable(BaseHTTPRequestHandler):
    """Answers every request with 503."""

    def do_GET(self) -> None:
        self.send_error(503)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_child_that_does_not_answer_ends_the_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_deployment, "HEALTH_POLL_SECONDS", 0.1)
    monkeypatch.setattr(local_deployment, "HEALTH_TIMEOUT_SECONDS", 0.3)
    engine = RoleEngine("decode 1", EngineConfig(role="decode", step_timeout=1.0))

    async def watch(url: str) -> None:
        deployment = local_deployment._Deployment([engine], ServeConfig())
        deployment._urls = {"decode 1": url}
        async with asyncio.timeout(60):
            await deployment._watch_answers()

    message = r"^decode 1 has not answered for 1 s \(--step-timeout\)$"
    # Linux accepts connections to this socket, as it does for a process that is stopped.
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(StartupError, match=message):
        asyncio.run(watch(f"http://127.0.0.1:{silent.getsockname()[1]}"))


def test_a_child_that_answers_with_an_error_has_answered() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Unavailable) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            assert local_deployment._health(f"http://127.0.0.1:{server.server_port}") == {}
        finally:
            server.shutdown()


def test_router_arguments_contain_the_address_and_the_workers() -> None:
    serve = ServeConfig(host="0.0.0.0", port=81, api_key="k3y", cors_origin="*", max_body_mib=2.0)
    arguments = router_arguments(serve, ["http://a:1", "http://b:1"], ["http://c:1"])
    assert "k3y" not in arguments
    received = parsed(arguments)
    assert (list(received["prefill"]), list(received["decode"])) == (["http://a:1", "http://b:1"], ["http://c:1"])  # type: ignore[call-overload]
    assert (received["host"], received["port"], received["cors_origin"], received["max_body_mib"]) == (
        "0.0.0.0",
        81,
        "*",
        2.0,
    )


def test_worker_urls_may_follow_one_flag_or_repeated_flags() -> None:
    received = parsed(["router", "--prefill", "a", "b", "--port", "1", "--decode", "c", "--decode", "d", "e"])
    assert (received["prefill"], received["decode"], received["port"]) == (["a", "b"], ["c", "d", "e"], 1)


@pytest.mark.parametrize("url", ["", "x", "http://", "ftp://h:1", "http://h:0", "http://h:99999", "http://h:1/path"])
def test_an_invalid_worker_url_is_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match="address must look like"):
        RouterConfig(decode=(url,))


def test_a_worker_named_twice_is_rejected() -> None:
    with pytest.raises(ConfigError, match="named twice"):
        RouterConfig(prefill=("http://h:1",), decode=("http://h:1/",))


def test_a_secret_in_the_environment_applies_only_to_workers_of_handoffs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_HANDOFF_SECRET", SECRET)
    for role, secret in (("both", None), ("decode", SECRET)):
        assert EngineConfig(**config_values(EngineConfig, {"role": role})).handoff_secret == secret


# Stands for Python: its first argument is -m, the third one is the command.
CHILD = """#!/bin/sh
case "$*" in
  *"--role decode"*) role=decode ;;
  *"--role prefill"*) role=prefill ;;
  *) role=router ;;
esac
echo "$role $$ $HOTSET_API_KEY" >> {children}
if [ "$role" = "{damaged}" ]; then
  echo "error: model.safetensors is damaged" >&2
  exit 1
fi
echo "Hotset serves m at http://127.0.0.1:9"
exec sleep 600
"""


@pytest.mark.parametrize("damaged", ["prefill", "none"])
def test_a_child_that_fails_stops_all_others(damaged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = tmp_path / "children"
    child = tmp_path / "child"
    child.write_text(CHILD.format(children=children, damaged=damaged))
    child.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(child))
    monkeypatch.setattr(local_deployment, "_health", lambda url: {"prefill": 1, "decode": 1})
    engines = [RoleEngine(f"{role} 1", EngineConfig(role=role)) for role in ("prefill", "decode")]
    deployment = local_deployment._Deployment(engines, ServeConfig(api_key="k3y"))

    def started() -> dict[str, int]:
        """Returns the process of each child. All of them have the API key."""
        lines = [line.split() for line in children.read_text().splitlines()] if children.exists() else []
        assert all(key == "k3y" for _, _, key in lines)
        return {role: int(pid) for role, pid, _ in lines}

    async def serve() -> None:
        serving = asyncio.create_task(deployment.run("http://127.0.0.1:9"))
        while damaged == "none" and "router" not in started():
            await asyncio.sleep(0.01)
        if damaged == "none":
            os.kill(started()["prefill"], signal.SIGKILL)
        await asyncio.wait_for(serving, 60)

    cause = "SIGKILL" if damaged == "none" else "exit code 1): model.safetensors is damaged"
    message = rf"^prefill 1 ended \({re.escape(cause)}.*; the other processes are stopped$"
    with pytest.raises(StartupError, match=message):
        asyncio.run(serve())
    wait_until_ended(started().values())
