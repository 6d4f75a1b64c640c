"""The engine and transformers compute the same greedy tokens for the demo model, except at near ties."""

from pathlib import Path

import pytest
import torch
import transformers  # imports its classes lazily
from harness import CPU, make_engine, run_all
from models.test_parity import NEAR_TIE, StableTopk

from hotset.base.sampling import SamplingParams
from hotset.lab.evaluate.tasks import TASKS, make_questions
from hotset.models.checkpoint.files import find_model
from hotset.models.checkpoint.weights import open_weights
from hotset.models.decoder import Decoder
from hotset.models.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-dsa"
ANSWER_TOKENS = 16
# The number of prompts by their length in tokens:
ONE_PROMPT = {256: 1}
FIFTY_PROMPTS = {1024: 20, 2048: 20, 4096: 10}


def make_prompts(lengths: dict[int, int]) -> list[list[int]]:
    tokenizer = Tokenizer.load(find_model(str(DEMO)), None)
    assert tokenizer is not None

    def encode(prompt: str) -> list[int]:
        return tokenizer.encode("<|bos|>" + prompt)

    questions = [
        question
        for length, count in lengths.items()
        for question in make_questions(list(TASKS), length, count, 11, lambda text: len(encode(text)))
    ]
    return [encode(question.prompt) for question in questions]


@pytest.mark.parametrize(
    "lengths", [ONE_PROMPT, pytest.param(FIFTY_PROMPTS, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_greedy_tokens_on_long_prompts_match_transformers_except_at_near_ties(lengths: dict[int, int]) -> None:
    """transformers scores prompt and answer in one pass.

    If its best token equals ours at every position of the answer, its own greedy answer is the same, by induction.
    """
    prompts = make_prompts(lengths)
    files = find_model(str(DEMO))
    weights = open_weights(files, torch.float32, CPU)
    model = Decoder(files.spec, weights)
    weights.finish()
    engine = make_engine(model, files.spec, max_num_seqs=4, device_kv_tokens=5 * max(lengths))
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    answers = run_all(engine, prompts, [params] * len(prompts))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        DEMO, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    differing = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad(), StableTopk().installed():
            sequence = torch.tensor([prompt + answer.token_ids[:-1]])
            logits = oracle(sequence, use_cache=False, logits_to_keep=ANSWER_TOKENS).logits[0]
        best = torch.topk(logits, 2, dim=-1)
        differ = best.indices[:, 0] != torch.tensor(answer.token_ids)
        differing += bool(differ.any())
        assert bool((best.values[differ, 0] - best.values[differ, 1] < NEAR_TIE).all()), (
            "tokens differ without a near tie"
        )
    print(f"{differing} of {len(prompts)} answers differ from transformers at near ties")
    assert differing <= 1
