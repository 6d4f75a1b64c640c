"""The fingerprint of answers changes with what may change their tokens, and with nothing else."""

from typing import Any

import pytest

from hotset.base.config import EngineConfig
from hotset.engine.input_processor import ModelCard
from hotset.serve.service import fingerprint

CARD = ModelCard("m", "llama", 128, 50, (), tiers=True, resident_len=128, device="cpu", dtype="float32")
EVENTS = {"kv_events": "tcp://127.0.0.1:5557", "kv_events_replay": "tcp://127.0.0.1:5558", "kv_events_topic": "t"}


@pytest.mark.parametrize(
    ("settings", "is_same"),
    [
        ({"model": "/elsewhere/m"}, True),
        ({"seed": 5}, True),
        ({"step_timeout": 9.0}, True),
        ({"role": "decode", "control": "127.0.0.1:7001", "handoff_secret": "at-least-16-characters"}, True),
        (EVENTS, True),
        ({"kv_dtype": "fp8"}, False),
        ({"max_num_batched_tokens": 7}, False),
        ({"prefix_cache": False}, False),
    ],
    ids=str,
)
def test_the_fingerprint_depends_on_settings_that_may_change_tokens(settings: dict[str, Any], is_same: bool) -> None:
    assert (fingerprint(EngineConfig(**settings), CARD) == fingerprint(EngineConfig(), CARD)) is is_same
