"""Invalid settings are refused with an error that names their flag."""

import math
from typing import Any

import pytest

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError
from hotset.base.serve_config import ServeConfig
from hotset.base.settings import flag_name


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0, -1])
@pytest.mark.parametrize("name", ["max_body_mib", "max_queue", "max_concurrency", "drain_seconds"])
def test_limits_of_the_server_must_be_finite_and_positive(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^--{flag_name(name)} must be a finite number above 0, got"):
        ServeConfig(**{name: value})


@pytest.mark.parametrize("port", [math.inf, math.nan, -1, 65536])
def test_a_port_must_be_a_number_from_0_to_65535(port: Any) -> None:
    with pytest.raises(ConfigError, match=r"^--port"):
        ServeConfig(port=port)


@pytest.mark.parametrize("share", [0, -0.1, 1.01, math.inf, math.nan])
def test_the_share_of_a_gpus_memory_is_above_0_and_at_most_1(share: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^--gpu-memory-utilization must (lie in \[0, 1\]|be a finite number above 0)"
    ):
        EngineConfig(gpu_memory_utilization=share)
    assert EngineConfig(gpu_memory_utilization=1).gpu_memory_utilization == 1


SECRET = "at least sixteen characters"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"control": "127.0.0.1:7001"}, "--control is for --role prefill and decode"),
        ({"advertise": "10.0.0.1:0"}, "--advertise is for"),
        ({"handoff_secret": SECRET}, "--handoff-secret is for"),
        ({"transfer": "mooncake"}, "--transfer is for"),
        ({"transfer_protocol": "rdma"}, "--transfer-protocol is for --role"),
        ({"role": "decode", "transfer_protocol": "rdma"}, "NIXL chooses its protocol"),
        ({"role": "decode", "transfer": "mooncake", "transfer_protocol": "udp"}, "must be one of 'tcp', 'rdma', got"),
        ({"role": "decode", "control": "tcp://127.0.0.1:1"}, "takes the form host:port"),
        ({"role": "decode", "control": "0.0.0.0:1", "handoff_secret": SECRET}, "as in --advertise 10"),
        ({"role": "decode", "control": "0.0.0.0:1", "advertise": "10.0.0.1:0"}, "needs a shared secret"),
        ({"role": "decode", "handoff_secret": "short"}, "at least 16 characters"),
        ({"transfer_interface": "lo"}, "--transfer-interface is for"),
        ({"role": "decode", "control": "10.0.0.1:0", "handoff_secret": SECRET}, "must name the interface"),
        ({"role": "decode", "transfer_interface": "eth77"}, "no interface 'eth77'; it has lo "),
        ({"role": "decode", "transfer": "mooncake", "transfer_interface": "lo,lo"}, "is none of this machine's"),
    ],
)
def test_handoff_settings_that_are_invalid_or_without_effect_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_valid_handoff_settings_of_a_prefill_worker_are_accepted() -> None:
    reachable = {
        "control": "0.0.0.0:1",
        "advertise": "10.0.0.1:0",
        "handoff_secret": SECRET,
        "transfer_interface": "lo",
    }
    EngineConfig(role="prefill", transfer="mooncake", transfer_protocol="rdma", **reachable)


def test_an_empty_api_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--api-key must not be empty"):
        ServeConfig(api_key="")
