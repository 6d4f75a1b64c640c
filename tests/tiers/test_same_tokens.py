"""Logits and answers are equal bit for bit with `tiers` "always" and "off"."""

from typing import Any

import pytest
import torch
from harness import RandomWeights, Recorder, make_engine, run_all

from hotset.base.config import EngineConfig
from hotset.base.sampling import SamplingParams
from hotset.engine.model_checks import kv_storage
from hotset.models.attention.dsa_spec import IndexSpec, MlaSpec
from hotset.models.decoder import Decoder
from hotset.models.feed_forward import MoeSpec
from hotset.models.spec import ModelSpec, RopeSpec

VOCAB, TOPK, SLOTS, CONTEXT = 61, 5, 8, 256  # a full context has 32 times as many tokens as there are slots


def spec(full_layers: tuple[int, ...], interleaved: bool, rank: int) -> ModelSpec:
    index = IndexSpec(heads=2, head_dim=8, topk=TOPK, interleaved_rope=interleaved, full_layers=full_layers)
    attention = MlaSpec(2, 12, rank, 8, 4, 8, False, index)
    moe = MoeSpec(6, 2, 8, shared=1, groups=2, topk_group=1, scale=1.5, normalise=True, layers=(1, 2))
    return ModelSpec(
        "deepseek_v32", VOCAB, 24, 4, 32, False, 1e-6, False, CONTEXT, RopeSpec(4), attention, moe, "float32", (3,)
    )


SPECS = {
    "deepseek_v32": spec(
        (0, 1, 2, 3), interleaved=False, rank=18
    ),  # 18 fp8 values fill neither a scale block nor a multiple of 16 bytes
    "glm_moe_dsa": spec((0, 2), interleaved=True, rank=16),
}


def answers(
    model: Recorder, spec: ModelSpec, prompts: list[list[int]], tokens: int, **settings: Any
) -> list[list[int]]:
    """Runs the prompts one after another, so that matrix products have the same shapes with and without tiers."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    engine = make_engine(model, spec, max_num_seqs=1, **settings)
    return [run_all(engine, [prompt], [params])[0].token_ids for prompt in prompts]


@pytest.mark.filterwarnings("ignore:.*mkldnn:UserWarning")  # torch warns about bf16 on CPUs without bf16 instructions
@pytest.mark.parametrize(
    ("family", "dtype", "kv_dtype"),  # every pair of values
    [
        ("deepseek_v32", torch.float32, "auto"),
        ("deepseek_v32", torch.bfloat16, "fp8"),
        ("glm_moe_dsa", torch.float32, "fp8"),
        ("glm_moe_dsa", torch.bfloat16, "auto"),
    ],
)
def test_logits_are_equal_bit_for_bit_with_tiers_always_and_off(family: str, dtype: torch.dtype, kv_dtype: Any) -> None:
    model_spec = SPECS[family]
    store = kv_storage(EngineConfig(kv_dtype=kv_dtype, index_dtype=kv_dtype), model_spec)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in (1, 150)]
    recorders, tokens = [], []
    for tiers in ("off", "always"):
        recorder = Recorder(Decoder(model_spec, RandomWeights(dtype, seed=5), store))
        hot_slots = None if tiers == "off" else SLOTS
        chunks = {"max_num_batched_tokens": 37, "page_rows": 8, "hot_slots": hot_slots, "kv_dtype": kv_dtype}
        tokens.append(answers(recorder, model_spec, prompts, 12, device_kv_tokens=CONTEXT, tiers=tiers, **chunks))
        recorders.append(recorder)
    off, always = recorders
    assert tokens[0] == tokens[1]
    assert off.recorded.keys() == always.recorded.keys()
    for context, rows in off.recorded.items():
        assert torch.equal(torch.stack(rows), torch.stack(always.recorded[context])), (
            f"logits differ at position {len(context) - 1}"
        )
