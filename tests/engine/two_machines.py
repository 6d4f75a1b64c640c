"""Handoffs between engine processes at given addresses; and which of their ports another machine can reach.

Run as a program in a network namespace of its own (`unshare -rnm`), this file checks the ports of workers. A second
namespace, which is connected by a virtual network, stands for the other machine.
"""

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import pytest
from harness import tiny_directory
from listening import Listening, listening

from hotset.base.config import EngineConfig
from hotset.base.errors import HandoffLost
from hotset.base.request_options import RequestOptions
from hotset.base.sampling import SamplingParams
from hotset.engine.client import EngineClient
from hotset.engine.process import EngineProcess, StopEngine

SECRET = "a secret that both workers share"
FOUR_TOKENS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SETTINGS: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "device_kv_tokens": 256, "page_rows": 4}
SCENARIO_S = 200.0
INTERFACE, HERE, THERE = "hot0", "10.77.0.1", "10.77.0.2"  # of the virtual network
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()"


async def hand_over(
    model: str, prefill_host: str, decode_host: str, interface: str, transfer: Literal["nixl", "mooncake"] = "nixl"
) -> None:
    """Hands a prompt over from a worker at `prefill_host` to one that listens on all addresses and advertises
    `decode_host`. Checks that the tokens are those of one engine, and that a prompt that is too long is refused."""
    common = SETTINGS | {"model": model, "handoff_secret": SECRET, "prefix_cache": False}
    common |= {"transfer": transfer, "transfer_interface": interface}
    configs = [
        EngineConfig(role="prefill", control=f"{prefill_host}:0", max_model_len=64, **common),
        EngineConfig(role="decode", control="0.0.0.0:0", advertise=f"{decode_host}:0", **common),
    ]
    processes = [EngineProcess(config) for config in configs]
    prefill, decode = (EngineClient.start(*started) for started in zip(configs, processes, strict=True))
    try:
        async with asyncio.timeout(SCENARIO_S):
            assert prefill.control is not None and prefill.control.startswith(f"{prefill_host}:")
            prompt = list(range(3, 40))
            local, handed_off = [
                [
                    token
                    async for delta in decode.generate(name, prompt, FOUR_TOKENS, RequestOptions(prefill_at=prefill_at))
                    for token in delta.token_ids
                ]
                for name, prefill_at in (("local", None), ("handed off", prefill.control))
            ]
            assert local == handed_off
            with pytest.raises(HandoffLost, match="the prompt has 80 tokens, but this worker computes 1 to 63"):
                await anext(decode.generate("long", [5] * 80, FOUR_TOKENS, RequestOptions(prefill_at=prefill.control)))
            assert (await decode.stats()).landed == 1
    finally:
        await asyncio.gather(prefill.close(0.0), decode.close(0.0))


def listeners_of_worker(config: EngineConfig, other: subprocess.Popen[bytes]) -> dict[Listening, bool]:
    """Starts an engine process and returns its listening sockets, each with whether `other` can connect to it."""
    process = EngineProcess(config)
    try:
        process.wait_ready()
        assert process.pid is not None
        found = {listener: can_reach(other, listener.port) for listener in listening([process.pid])}
        process.pipe.send(StopEngine())
    finally:
        process.end()
    return found


def can_reach(other: subprocess.Popen[bytes], port: int) -> bool:
    """Returns whether a process in the other namespace can connect to a port at address HERE."""
    command = ["nsenter", "-t", str(other.pid), "-n", sys.executable, "-c", CONNECT, HERE, str(port)]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def connect_namespaces(other: subprocess.Popen[bytes]) -> None:
    """Connects this network namespace with that of `other`."""
    inside = f"nsenter -t {other.pid} -n"
    for command in (
        "mount -t sysfs sysfs /sys",  # UCX finds interfaces there
        "ip link set lo up",
        f"ip link add {INTERFACE} type veth peer name hot1 netns {other.pid}",
        f"ip addr add {HERE}/24 dev {INTERFACE}",
        f"ip link set {INTERFACE} up",
        f"{inside} ip addr add {THERE}/24 dev hot1",
        f"{inside} ip link set hot1 up",
    ):
        subprocess.run(command.split(), check=True)


def check_ports(model: str, other: subprocess.Popen[bytes]) -> None:
    common = SETTINGS | {"model": model, "handoff_secret": SECRET, "prefix_cache": False}
    for transfer in ("nixl", "mooncake"):
        on_loopback = EngineConfig(role="decode", transfer=transfer, **common)  # type: ignore[arg-type]
        found = listeners_of_worker(on_loopback, other)
        assert len(found) > 1 and not any(found.values()), f"another machine reaches {transfer} on loopback: {found}"
    common |= {"transfer_interface": INTERFACE}
    found = listeners_of_worker(EngineConfig(role="prefill", control=f"{HERE}:0", **common), other)
    assert len(found) > 1 and all(found.values()) and {listener.host for listener in found} == {HERE}, found
    on_all = {"control": "0.0.0.0:0", "advertise": f"{HERE}:0"}
    found = listeners_of_worker(EngineConfig(role="decode", transfer="mooncake", **on_all, **common), other)
    interfaces = sorted(listener.interface for listener in found)
    assert all(found.values()) and interfaces == ["", INTERFACE, INTERFACE], found


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(["unshare", "-n", "sh", "-c", "echo ready; read _"], stdin=-1, stdout=-1) as other,
    ):
        assert other.stdout is not None and other.stdout.readline() == b"ready\n"
        model = tiny_directory(Path(folder))
        connect_namespaces(other)
        check_ports(model, other)
        asyncio.run(hand_over(model, HERE, HERE, INTERFACE))
        asyncio.run(hand_over(model, HERE, HERE, INTERFACE, "mooncake"))
        other.communicate(b"\n")


if __name__ == "__main__":
    main()
