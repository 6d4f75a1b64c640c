"""Worker processes that divide an fp8 checkpoint give the tokens of one process."""

from pathlib import Path
from typing import Any

import pytest
from models.fp8_models import save_fp8_model

from hotset import LLM, SamplingParams

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float64", "max_num_seqs": 3, "progress": False}
SIZES = {"device_kv_tokens": 512, "host_kv_tokens": 1024, "max_num_batched_tokens": 24}
PROMPTS = [{"prompt_token_ids": [(7 * position + 3 * n) % 97 for position in range(9 + 15 * n)]} for n in range(3)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def answers(model: Path, **settings: Any) -> list[list[int]]:
    with LLM(str(model), **SETTINGS, **SIZES, **settings) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
        llm.audit()
        return found


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_processes_that_divide_an_fp8_model_give_the_tokens_of_one(family: str, tmp_path: Path) -> None:
    model, _ = save_fp8_model(tmp_path, family, seed=6)
    expected = answers(model)
    assert len({token for tokens in expected for token in tokens}) > 12
    assert answers(model, tensor_parallel_size=2) == expected
    assert answers(model, tensor_parallel_size=4) == expected
    assert answers(model, data_parallel_size=2) == expected
    assert answers(model, weight_dtype="bfloat16") != expected  # without quantised activations
