"""Measures decode throughput of the embedded model on the CPU, against transformers with the same weights.

    python benchmarks/cpu_decode.py --json cpu_decode.json

In each round, transformers answers one of 8 prompts with `generate` (KV cache, greedy), Hotset answers the same prompt
(batch 1), and Hotset answers all 8 prompts together (batch 8). Times include the prompts, which are short. The table
compares the medians over all rounds. The caption shows for how many prompts both engines generate the same tokens. Bars
(required results): batch 1 is at least as fast as transformers, and batch 8 is at least 3 times as fast as
transformers. A run takes a few minutes on two cores.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from report import make_parser, report
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from hotset.base.sampling import SamplingParams
from hotset.engine.llm import LLM
from hotset.models.checkpoint.files import find_model
from hotset.models.checkpoint.weights import open_weights

PROMPTS = (
    "The history of the bicycle begins",
    "To bake bread at home, you need",
    "The main difference between a list and a tuple in Python is",
    "Once upon a time, in a small village,",
    "Photosynthesis is the process by which",
    "The three laws of motion state that",
    "A good night's sleep is important because",
    "The city of Rome was founded",
)


def transformers_model() -> LlamaForCausalLM:
    """Loads the embedded model's dequantised weights into transformers."""
    files = find_model("embedded")
    spec = files.spec
    attention = spec.attention
    config = LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.mlp_width,
        num_hidden_layers=spec.layers,
        num_attention_heads=attention.heads,
        num_key_value_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        rms_norm_eps=spec.norm_eps,
        rope_theta=spec.rope.theta,
        max_position_embeddings=spec.context,
        tie_word_embeddings=spec.tied_embeddings,
    )
    weights = open_weights(files, torch.float32, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        shapes = LlamaForCausalLM(config).state_dict()
        tensors = {name: weights.load(name, tuple(t.shape)) for name, t in shapes.items() if name != "lm_head.weight"}
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=64, help="generated tokens per prompt")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds; round n uses prompt n modulo 8")
    options = parser.parse_args()
    llm, model = LLM("embedded", progress=False), transformers_model()
    assert llm.tokenizer is not None
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    llm_prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    greedy = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    generation = GenerationConfig(
        max_new_tokens=options.tokens, min_new_tokens=options.tokens, do_sample=False, pad_token_id=0, eos_token_id=None
    )

    def generate_with_transformers(prompt: list[int]) -> list[int]:
        inputs = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=generation)
        return out[0, len(prompt) :].tolist()

    same = sum(
        generate_with_transformers(prompt) == list(llm.generate([llm_prompt], greedy)[0].outputs[0].token_ids)
        for prompt, llm_prompt in zip(prompts, llm_prompts, strict=True)
    )
    speeds: dict[str, list[float]] = {"transformers": [], "hotset batch 1": [], "hotset batch 8": []}

    def measure(name: str, batch: int, generate: Callable[[], object]) -> None:
        start = time.perf_counter()
        generate()
        speeds[name].append(batch * options.tokens / (time.perf_counter() - start))

    for number in range(options.rounds):
        index = number % len(prompts)
        measure("transformers", 1, partial(generate_with_transformers, prompts[index]))
        measure("hotset batch 1", 1, partial(llm.generate, [llm_prompts[index]], greedy))
        measure("hotset batch 8", 8, partial(llm.generate, llm_prompts, greedy))
    base = statistics.median(speeds["transformers"])
    rows = [
        {"engine": name, "tokens/s": statistics.median(values), "ratio": statistics.median(values) / base}
        for name, values in speeds.items()
    ]
    notes = f"bars: batch 1 >= 1x, batch 8 >= 3x; same greedy tokens for {same} of {len(prompts)} prompts"
    report("CPU decode, SmolLM2-135M-Instruct, float32", rows, options.json, notes)


if __name__ == "__main__":
    main()
