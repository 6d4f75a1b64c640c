"""Prefill and decode engines with several ranks each give the tokens of one engine, and change no byte of a context.

The tests marked `gpu` need the multi-process service, because all ranks of both engines share one GPU: `scripts/gpu
handoffs` starts it, runs them and ends it. They compute in float32. With 16 bits, another split rounds sums so
differently that tokens can differ for this reason alone.
"""

import json
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from engine.handoff_pair import Pair
from engine.test_gpu_ranks import on_gpu, on_one_gpu
from harness import DEMO

from hotset import LLM, SamplingParams
from hotset.base.config import EngineConfig
from hotset.base.request_options import LandingChoice
from hotset.engine.build import build_engine

DSA: dict[str, Any] = json.loads((Path(DEMO) / "config.json").read_text()) | {"num_hidden_layers": 4}
GQA: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
}
TP1, TP2, TP4 = ({"tensor_parallel_size": size} for size in (1, 2, 4))
PP2, DP4 = {"pipeline_parallel_size": 2}, {"data_parallel_size": 4}
CROSSINGS: dict[str, tuple[dict[str, Any], list[dict[str, int]], dict[str, int]]] = {
    "TP4 -> DP4 + EP4": (DSA, [TP4], DP4),
    "TP2 -> TP4, 8 KV heads": (GQA, [TP2], TP4),
    "PP2 -> TP2": (DSA, [PP2], TP2),
    "TP1 and TP4 -> TP2": (DSA, [TP1, TP4], TP2),
}
SIZES: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "max_model_len": 2048,
    "device_kv_tokens": 16384,
    "host_kv_tokens": 32768,
    "speculate": 0,
    "load_format": "dummy",
}
LENGTHS = (1, 64, 130, 512, 700, 1100, 1500, 1900)
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(7)
    return [rng.choices(range(50, 200), k=length) for length in lengths]


@lru_cache
def tokens_of_one_engine(folder: str, device: str, dtype: str, lengths: tuple[int, ...]) -> list[list[int]]:
    with LLM(folder, device=device, dtype=dtype, progress=False, **SIZES) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts(lengths)], PARAMS)
        return [list(output.outputs[0].token_ids) for output in outputs]


@contextmanager
def engines(folder: str, prefills: list[dict[str, int]], decode: dict[str, int], **settings: Any) -> Iterator[Pair]:
    """Yields prefill engines and a decode engine over NIXL, each with its own split."""
    with ExitStack() as stack:
        started = []
        for role, split in (("decode", decode), *(("prefill", split) for split in prefills)):
            placed = on_one_gpu(split) if settings["device"] == "cuda" else split
            config = EngineConfig(model=folder, role=role, transfer="nixl", **SIZES, **settings | placed)
            started.append(build_engine(config))
            stack.callback(started[-1].close)
        decode_engine, first, *further = started
        pair = Pair(first, decode_engine, *further)
        stack.callback(pair.close)
        yield pair


def check_crossing(tmp_path: Path, crossing: str, device: str, dtype: str, lengths: tuple[int, ...]) -> None:
    model, prefills, decode = CROSSINGS[crossing]
    (tmp_path / "config.json").write_text(json.dumps(model))
    landings: tuple[LandingChoice, ...] = ("host", "auto")
    with engines(str(tmp_path), prefills, decode, device=device, dtype=dtype) as pair:
        for landing in landings:
            found = pair.answers(prompts(lengths), PARAMS, landing, salt=landing)
            assert found == tokens_of_one_engine(str(tmp_path), device, dtype, lengths)
        requests = pair.comparer.requests.values()
        on_host = sum(request.landing.startswith("host") and "device" not in request.landing for request in requests)
        compared = sum(comparer.num_compared for comparer in (pair.comparer, *pair.further_comparers))
        assert compared >= on_host, "not every context that landed on the host was compared with its source"
        if device == "cpu" and "pipeline_parallel_size" not in decode:
            assert on_host < 2 * len(lengths), "no context landed in the memory of a worker process"


@on_gpu
@pytest.mark.parametrize("crossing", CROSSINGS)
def test_ranks_on_one_gpu_hand_over_to_other_splits(crossing: str, tmp_path: Path) -> None:
    check_crossing(tmp_path, crossing, "cuda", "float32", LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("crossing", CROSSINGS)
def test_ranks_on_cpus_hand_over_to_other_splits(crossing: str, tmp_path: Path) -> None:
    check_crossing(tmp_path, crossing, "cpu", "float64", (1, 64, 130, 257))
