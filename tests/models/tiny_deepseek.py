"""A tiny DeepSeek-V3.2 with random weights, as a checkpoint and as a model of transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers  # imports its classes lazily
from models.test_parity import NEAR_TIE, StableTopk, randomise

FIELDS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 7,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "bos_token_id": None,
}


def save_random_deepseek(directory: Path, vocab: int, context: int, eos: int | None = None) -> Any:
    """Writes the checkpoint, and returns the model."""
    sizes = {"vocab_size": vocab, "max_position_embeddings": context, "eos_token_id": eos}
    config = transformers.DeepseekV32Config(**FIELDS, **sizes, attn_implementation="eager")
    model = transformers.DeepseekV32ForCausalLM(config).eval()
    randomise(model, 4)
    model.save_pretrained(directory)
    return model


def oracle_logprobs(model: Any, prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log-probabilities [tokens, vocab], and for each token whether a selection of the indexer, of it or of an
    earlier token, is a near tie, which rounding can reverse. Exact ties count too."""
    with torch.no_grad(), StableTopk().installed() as topk:
        logprobs = model(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    return logprobs, topk.smallest_gaps(len(prompt)) < NEAR_TIE
