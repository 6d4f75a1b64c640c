"""On a GPU, an engine whose KV cache takes all memory that is left never runs out of memory."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from hotset.base.sampling import SamplingParams
from hotset.engine.llm import LLM

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-dsa"
VOCAB, SEATS = 154_880, 256
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "dsa": json.loads((DEMO / "config.json").read_text())
    | {"num_hidden_layers": 3, "max_position_embeddings": 1 << 17},
    "gqa": {
        "model_type": "qwen3",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 1 << 17,
        "eos_token_id": 1,
        "dtype": "bfloat16",
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "largest KV": {"tiers": "off"},
    "largest KV and prompts": {"tiers": "off", "max_num_batched_tokens": 16_384},
    "no graphs": {"tiers": "off", "cuda_graphs": "off"},
    "tiers": {"tiers": "auto", "device_kv_gib": 4.0, "host_kv_gib": 24.0, "max_model_len": 65_536},
}


@pytest.mark.gpu
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_256_seats_with_a_large_vocabulary_have_enough_memory(tmp_path: Path, architecture: str, settings: str) -> None:
    config = ARCHITECTURES[architecture] | {"vocab_size": VOCAB}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, total = torch.cuda.mem_get_info()
    llm = LLM(str(tmp_path), load_format="dummy", max_num_seqs=SEATS, seed=0, progress=False, **SETTINGS[settings])
    try:
        free_after_start, _ = torch.cuda.mem_get_info()
        if "KV" in settings:
            assert total - free_after_start > 0.85 * total, "KV does not take all that weights and steps leave of 0.92"
        draw = random.Random(1)
        lengths = [200 + (13 * seat if seat % 8 == 0 else 0) for seat in range(SEATS)]
        prompts = [{"prompt_token_ids": draw.choices(range(5, VOCAB), k=length)} for length in lengths]
        params = [
            SamplingParams(
                max_tokens=24,
                temperature=1.0,
                top_p=0.95,
                min_p=0.001,
                repetition_penalty=1.1,
                frequency_penalty=0.2,
                logprobs=20,
                prompt_logprobs=5 if seat % 32 == 0 else None,
                ignore_eos=True,
            )
            for seat in range(SEATS)
        ]
        for _ in range(2):
            outputs = llm.generate(prompts, params)
            assert [len(output.outputs[0].token_ids) for output in outputs] == [24] * SEATS
        free_at_end, _ = torch.cuda.mem_get_info()
        assert free_at_end > 0.02 * total, "the engine took memory outside of its share"
        assert free_after_start - free_at_end < 0.02 * total, "requests took memory that start-up had not measured"
    finally:
        llm.close()
        del llm  # the traceback of a failure would keep its memory from the next test
