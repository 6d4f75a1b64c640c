"""Engines with fp8 weights: worker processes give the tokens of one process, and the demo model still retrieves."""

from pathlib import Path
from typing import Any

import pytest
from engine.test_decode_graphs import answers, make_prompts
from harness import DEMO
from models.fp8_models import quantise_checkpoint, save_fp8_model

from hotset import LLM, SamplingParams
from hotset.lab.evaluate.tasks import make_questions
from hotset.models.checkpoint.files import find_model
from hotset.models.tokenizer import Tokenizer

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float64", "max_num_seqs": 3, "progress": False}
SIZES = {"device_kv_tokens": 512, "host_kv_tokens": 1024, "max_num_batched_tokens": 24}
PROMPTS = [{"prompt_token_ids": [(7 * position + 3 * n) % 97 for position in range(9 + 15 * n)]} for n in range(3)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def tiny_answers(model: Path, **settings: Any) -> list[list[int]]:
    with LLM(str(model), **SETTINGS, **SIZES, **settings) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
        llm.audit()
        return found


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_processes_that_divide_an_fp8_model_give_the_tokens_of_one(family: str, tmp_path: Path) -> None:
    model, _ = save_fp8_model(tmp_path, family, seed=6)
    expected = tiny_answers(model)
    assert len({token for tokens in expected for token in tokens}) > 12
    assert tiny_answers(model, tensor_parallel_size=2) == expected
    assert tiny_answers(model, tensor_parallel_size=4) == expected
    assert tiny_answers(model, data_parallel_size=2) == expected
    assert tiny_answers(model, weight_dtype="bfloat16") != expected  # without quantised activations


def correct_answers(model: Path, length: int, **settings: Any) -> int:
    """Returns how many of four questions of about `length` tokens the model answers correctly."""
    tokenizer = Tokenizer.load(find_model(DEMO), None)
    assert tokenizer is not None
    encode = tokenizer.encode
    questions = make_questions(["lookup", "several"], length, 4, 3, lambda text: 1 + len(encode(text)))
    expected = [encode(question.answer) for question in questions]
    prompts = [{"prompt_token_ids": encode("<|bos|>" + question.prompt)} for question in questions]
    found = answers(prompts, model=str(model), tokens=max(len(answer) for answer in expected), **settings)
    return sum(tokens[: len(answer)] == answer for tokens, answer in zip(found, expected, strict=True))


@pytest.mark.slow
def test_the_demo_model_answers_questions_with_fp8_weights(tmp_path: Path) -> None:
    """Its widths are no multiples of 128 (704, 576, 192, 160), so that most weights have partial blocks."""
    fp8 = quantise_checkpoint(Path(DEMO), tmp_path)
    assert correct_answers(fp8, 256, device="cpu", device_kv_tokens=2048, tiers="off", progress=False) >= 3


@pytest.mark.gpu
def test_on_a_gpu_graphs_and_eager_steps_with_fp8_weights_give_the_same_correct_answers(tmp_path: Path) -> None:
    fp8 = quantise_checkpoint(Path(DEMO), tmp_path)
    _, _, prompts = make_prompts(["lookup", "several", "chain"])
    for tiers in ("off", "auto", "always"):
        memory: dict[str, Any] = {"device_kv_tokens": 8192}
        if tiers != "off":
            memory["host_kv_tokens"] = 32768
        settings: dict[str, Any] = {"model": str(fp8), "device": "cuda", "tiers": tiers, **memory}
        assert answers(prompts, **settings) == answers(prompts, cuda_graphs="off", **settings), f"tiers {tiers}"
    assert correct_answers(fp8, 1024, device="cuda", device_kv_tokens=8192, tiers="off") >= 3
