"""Decode speed on the CPU against transformers: the embedded model, the same weights, one run.

transformers answers one prompt at a time with `generate` (KV cache, greedy). We answer the same prompts alone
(batch 1) and together (batch 8). The bars: batch 1 at least as fast, batch 8 at least 3x its one-by-one throughput.
Rounds alternate between the three, and the ratios are of medians, because machines are noisy.
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch
from report import make_parser, report
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from hotset.base.sampling import SamplingParams
from hotset.engine.llm import LLM
from hotset.models.checkpoint import find_model, open_weights

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


def oracle() -> LlamaForCausalLM:
    """The embedded model in transformers: our dequantised weights under transformers' own code."""
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
    parser.add_argument("--tokens", type=int, default=64, help="answer tokens per prompt")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    llm, model = LLM("embedded", progress=False), oracle()
    assert llm.tokenizer is not None
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    ours = [{"prompt_token_ids": prompt} for prompt in prompts]
    greedy = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    generation = GenerationConfig(
        max_new_tokens=options.tokens, min_new_tokens=options.tokens, do_sample=False, pad_token_id=0, eos_token_id=None
    )

    def transformers_one(at: int) -> list[int]:
        inputs = torch.tensor([prompts[at]])
        with torch.inference_mode():
            out = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=generation)
        return out[0, len(prompts[at]) :].tolist()

    agreeing = sum(
        transformers_one(at) == list(llm.generate([ours[at]], greedy)[0].outputs[0].token_ids)
        for at in range(len(prompts))
    )
    speeds: dict[str, list[float]] = {"transformers": [], "hotset batch 1": [], "hotset batch 8": []}

    def timed(name: str, prompts_answered: int, run: object) -> None:
        start = time.perf_counter()
        run()  # type: ignore[operator]
        speeds[name].append(prompts_answered * options.tokens / (time.perf_counter() - start))

    for number in range(options.rounds):
        at = number % len(prompts)
        timed("transformers", 1, lambda at=at: transformers_one(at))
        timed("hotset batch 1", 1, lambda at=at: llm.generate([ours[at]], greedy))
        timed("hotset batch 8", 8, lambda: llm.generate(ours, greedy))
    base = statistics.median(speeds["transformers"])
    rows = [
        {"engine": name, "tokens/s": statistics.median(each), "ratio": statistics.median(each) / base}
        for name, each in speeds.items()
    ]
    notes = f"bars: batch 1 >= 1x, batch 8 >= 3x; the same greedy tokens on {agreeing} of {len(prompts)} prompts"
    report("CPU decode, SmolLM2-135M-Instruct, float32", rows, options.json, notes)


if __name__ == "__main__":
    main()
