"""On a GPU, prompts of a GQA model in chunks, beside requests that decode, have the logprobs of transformers."""

import random
from pathlib import Path

import pytest
import torch
import transformers

from hotset.base.sampling import SamplingParams
from hotset.engine.llm import LLM

VOCAB = 1000
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "eos_token_id": 1,
}
LENGTHS, ANSWER = (1500, 40, 700, 129, 257), 24
MAX_ERROR = 0.1  # of log-probabilities, as a share of their standard deviation, on average; unrelated ones: more than 1


@pytest.mark.gpu
def test_prompts_in_chunks_beside_decodes_have_the_logprobs_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    oracle = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**CONFIG)).to(torch.bfloat16)
    oracle.save_pretrained(tmp_path)
    draw = random.Random(2)
    prompts = [draw.choices(range(2, VOCAB), k=length) for length in LENGTHS]
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    sizes = {"max_num_batched_tokens": 384, "max_num_seqs": 8, "max_model_len": 2048, "device_kv_tokens": 8192}
    with LLM(str(tmp_path), device="cuda", dtype="bfloat16", tiers="off", progress=False, **sizes) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    oracle.float()
    found: list[float] = []
    expected: list[float] = []
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        ids = [*prompt, *answer.token_ids]
        assert output.prompt_logprobs is not None and answer.logprobs is not None
        for token, logprobs in zip(ids[1:], [*output.prompt_logprobs[1:], *answer.logprobs], strict=True):
            found.append(logprobs[token].logprob)
        with torch.no_grad():
            logits = oracle(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        expected += logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    difference = torch.tensor(found) - torch.tensor(expected)
    error = float(difference.abs().mean() / torch.tensor(expected).std())
    print(f"the mean difference is {error:.4f} of the standard deviation")
    assert error < MAX_ERROR
