"""Settings that cannot be met are refused by the name of their flag."""

import math
from typing import Any

import pytest

from hotset.base.config import ServeConfig, flag_name
from hotset.base.errors import ConfigError


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0, -1])
@pytest.mark.parametrize("name", ["max_body_mib", "max_queue", "max_concurrency", "drain_seconds"])
def test_numbers_of_the_server_are_finite_and_above_zero(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^--{flag_name(name)} must be a finite number above 0, got"):
        ServeConfig(**{name: value})


@pytest.mark.parametrize("port", [math.inf, math.nan, -1, 65536])
def test_a_port_is_one_of_those_that_exist(port: Any) -> None:
    with pytest.raises(ConfigError, match=r"^--port"):
        ServeConfig(port=port)


def test_an_empty_key_is_no_key() -> None:
    with pytest.raises(ConfigError, match=r"^--api-key must not be empty"):
        ServeConfig(api_key="")
