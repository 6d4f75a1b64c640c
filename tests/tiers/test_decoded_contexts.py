"""Contexts of prompts that are decoded from fp8 once per layer (`View.short_contexts`).

The logits are the same as if every token decoded the rows that it reads.
"""

from typing import Any

import pytest
import torch
from harness import RandomWeights, Recorder, make_engine, run_all
from test_same_tokens import CONTEXT, SLOTS, SPECS, VOCAB

from hotset.base.config import EngineConfig
from hotset.base.sampling import SamplingParams
from hotset.engine.model_checks import kv_storage
from hotset.kernels.decode_rows import decode_rows
from hotset.memory import resident, view
from hotset.models.attention.dsa import DsaAttention
from hotset.models.decoder import Decoder
from hotset.tiers import view as tiers_view

FP8: dict[str, Any] = {"kv_dtype": "fp8", "index_dtype": "fp8"}


class Counter:
    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return self.function(*arguments)


def recorded(
    decodes: bool, lengths: tuple[int, ...] = (9, 60, 150), **settings: Any
) -> tuple[list[list[int]], Recorder]:
    """Returns the answers to prompts of these lengths, which run at the same time, and the recorded logits."""
    spec = SPECS["glm_moe_dsa"]
    decoder = Decoder(spec, RandomWeights(torch.float32, seed=5), kv_storage(EngineConfig(**FP8), spec))
    for layer in decoder._layers:
        assert isinstance(layer.attention, DsaAttention)
        assert not layer.attention._decodes_contexts, "contexts are decoded on a CPU"
        layer.attention._decodes_contexts = decodes
    recorder = Recorder(decoder)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)] * len(prompts)
    engine_settings = {"max_num_seqs": 3, "max_num_batched_tokens": 37, "page_rows": 8, **FP8, **settings}
    engine = make_engine(recorder, spec, **engine_settings)
    return [answer.token_ids for answer in run_all(engine, prompts, params)], recorder


@pytest.mark.parametrize(
    ("settings", "streams"),
    [
        ({"tiers": "off", "device_kv_tokens": 3 * CONTEXT}, False),
        # The second prompt is streamed while the first request decodes.
        ({"lengths": (9, 150), "tiers": "auto", "device_kv_tokens": CONTEXT // 2, "hot_slots": SLOTS}, True),
    ],
    ids=["resident", "streamed"],
)
def test_decoded_contexts_give_the_same_logits(
    settings: dict[str, Any], streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, streamed = Counter(decode_rows), Counter(tiers_view.StreamedSegment)
    expected_tokens, expected = recorded(decodes=False, **settings)
    monkeypatch.setattr(view, "decode_rows", decoded)
    monkeypatch.setattr(tiers_view, "StreamedSegment", streamed)
    tokens, got = recorded(decodes=True, **settings)
    assert decoded.calls > 10 and (streamed.calls > 1) == streams
    assert tokens == expected_tokens
    assert got.recorded.keys() == expected.recorded.keys()
    for context, rows in expected.recorded.items():
        assert all(map(torch.equal, rows, got.recorded[context]))


def test_contexts_above_a_limit_of_rows_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = Counter(decode_rows)
    monkeypatch.setattr(view, "decode_rows", decoded)
    for name in ("MAX_ROWS_PER_TOKEN", "MAX_CONTEXT_ROWS"):
        with monkeypatch.context() as patched:
            patched.setattr(resident, name, 0)
            recorded(decodes=True, tiers="off", device_kv_tokens=3 * CONTEXT)
    assert decoded.calls == 0
