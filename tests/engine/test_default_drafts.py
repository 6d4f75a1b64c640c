"""Tests how many tokens are drafted if `--speculate` is not given."""

import json
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.threaded import ThreadWorkers
from harness import run_all

from hotset.base.config import EngineConfig
from hotset.base.sampling import SamplingParams
from hotset.engine import build, loading
from hotset.engine.drafts.costs import StepCosts
from hotset.engine.drafts.settings import DEFAULT_DRAFTS, with_default_drafts
from hotset.engine.llm import LLM
from hotset.models.checkpoint.safetensors_source import SafetensorsSource
from hotset.models.decoder import Decoder

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-dsa"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TOPK = json.loads((DEMO / "config.json").read_text())["index_topk"]


def drafts(on_gpu: bool = True, **settings: Any) -> int | None:
    return with_default_drafts(EngineConfig(**{"model": str(DEMO)} | settings), on_gpu=on_gpu).speculate


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, DEFAULT_DRAFTS),
        ({"tiers": "off"}, DEFAULT_DRAFTS),
        (
            {"role": "prefill", "control": "127.0.0.1:0"},
            DEFAULT_DRAFTS,
        ),  # decode workers need the rows of the MTP layer
        ({"speculate": 0}, 0),
        ({"speculate": 1}, 1),
        ({"hot_slots": 3 * TOPK}, 2),
        ({"hot_slots": TOPK}, 0),
        ({"cuda_graphs": "off"}, 0),  # drafting without graphs makes steps slower
        ({"dtype": "float32"}, 0),  # has no graphs
        ({"model": "embedded"}, 0),  # has no MTP layer
    ],
    ids=str,
)
def test_a_gpu_drafts_by_default_if_settings_and_model_allow_it(settings: dict[str, Any], expected: int) -> None:
    assert drafts(**settings) == expected


def test_a_cpu_drafts_only_if_told_to() -> None:
    assert drafts(on_gpu=False) == 0 and drafts(on_gpu=False, speculate=2) == 2


def test_a_checkpoint_without_the_weights_of_the_layer_drafts_nothing(tmp_path: Path) -> None:
    """Many converted checkpoints still have the field in their configuration."""
    (tmp_path / "config.json").write_text((DEMO / "config.json").read_text())
    index = {"weight_map": {"model.embed_tokens.weight": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert drafts(model=str(tmp_path), load_format="dummy") == DEFAULT_DRAFTS
    assert drafts(model=str(tmp_path)) == 0


NEVER_PAY = StepCosts((1,), (1.0,), ((1.0, 9.0, 9.0, 9.0),))
ALWAYS_PAY = StepCosts((1,), (1.0,), ((1.0, 1.0, 1.0, 1.0),))


@pytest.mark.parametrize(
    ("settings", "costs"),
    [({}, ALWAYS_PAY), ({}, NEVER_PAY), ({"speculate": 2}, NEVER_PAY), ({"tensor_parallel_size": 2}, NEVER_PAY)],
    ids=["they pay", "they do not", "explicit", "several workers"],
)
def test_default_drafts_that_do_not_pay_are_dropped_with_their_layer_and_nothing_is_loaded_twice(
    settings: dict[str, Any], costs: StepCosts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded: list[Decoder] = []
    warmed: list[int] = []

    class CountedDecoder(Decoder):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            loaded.append(self)

    def measured(started: Any, config: EngineConfig, *_: Any) -> StepCosts | None:
        warmed.append(config.max_drafts)
        return costs if config.max_drafts else None

    read_tensor = SafetensorsSource.read
    reads: Counter[tuple[str, range | None]] = Counter()

    def counted_read(self: SafetensorsSource, name: str, shape: tuple[int, ...], rows: range | None = None) -> Any:
        reads[name, rows] += 1
        return read_tensor(self, name, shape, rows)

    monkeypatch.setattr(SafetensorsSource, "read", counted_read)
    monkeypatch.setattr(loading, "Decoder", CountedDecoder)
    monkeypatch.setattr(build, "_warm_up", measured)
    monkeypatch.setattr(build, "with_default_drafts", lambda config, on_gpu: with_default_drafts(config, on_gpu=True))
    monkeypatch.setattr(build, "_launcher", lambda *_: None)
    monkeypatch.setattr(
        build, "MultiprocessExecutor", lambda config, splits, _, kv_heads, *__: ThreadWorkers(config, splits, kv_heads)
    )
    sizes: dict[str, Any] = {"device_kv_tokens": 512, "host_kv_tokens": 1024, "max_model_len": 256, "max_num_seqs": 2}
    config = EngineConfig(model=str(DEMO), device="cpu", dtype="bfloat16", **sizes, **settings)
    kept = costs is ALWAYS_PAY or "speculate" in settings
    with closing(build.build_engine(config)) as engine:
        assert len(loaded) == config.workers and {decoder.spec.mtp is not None for decoder in loaded} == {kept}
        # Ranks share what they do not divide. The embedding is read whole by none of several ranks.
        assert reads["model.embed_tokens.weight", None] == (config.workers == 1)
        assert set(reads.values()) <= {1, config.workers}, "a tensor was read again"
        drafts = settings.get("speculate", DEFAULT_DRAFTS)
        assert warmed == ([drafts] if kept else [drafts, 0])
        (scheduler,) = engine.schedulers
        assert (scheduler._speculation is not None) == kept
        layers = json.loads((DEMO / "config.json").read_text())["num_hidden_layers"]
        assert {decoder.kv_shape.layers for decoder in loaded} == {layers + kept}
        assert ("--speculate 2 does not pay" in caplog.text) == ("speculate" in settings)
        answer = run_all(engine, [[5, 6, 7] * 20], [GREEDY])[0].token_ids
    monkeypatch.undo()
    if not kept:
        with closing(build.build_engine(replace(config, speculate=0, tensor_parallel_size=1))) as engine:
            assert run_all(engine, [[5, 6, 7] * 20], [GREEDY])[0].token_ids == answer


@pytest.mark.gpu
def test_on_a_gpu_the_demo_model_drafts_by_default_and_gives_the_same_text() -> None:
    """Greedy, because a step that verifies drafts rounds sums differently. In bfloat16 this shifts log-probabilities by
    some hundredths, and that is enough to change a token that is drawn at random."""
    texts, greedy = [], SamplingParams(temperature=0)
    for settings in ({}, {"speculate": 0}):
        with LLM(str(DEMO), device="cuda", max_num_seqs=4, device_kv_tokens=4096, seed=0, **settings) as llm:
            texts.append([output.outputs[0].text for output in llm.generate(["The capital of France is"] * 2, greedy)])
    assert texts[0] == texts[1] and torch.cuda.is_available()
