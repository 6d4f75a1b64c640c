"""Reads the metadata of Llama-family GGUF files as a `ModelSpec`. This module does not import torch."""

from typing import Any

from hotset.base.errors import CheckpointError
from hotset.models.checkpoint.gguf_file import GgufFile
from hotset.models.config_fields import ConfigFields
from hotset.models.families import read_spec
from hotset.models.spec import ModelSpec

F32, F16 = 0, 1
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_spec(file: GgufFile) -> ModelSpec:
    """Returns the spec of the model in the file. Raises `CheckpointError` for features that decoders do not support."""
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{file.path}: general.architecture is {architecture!r}; supported in GGUF files: llama")
    if metadata.get("llama.expert_count"):
        raise CheckpointError(
            f"{file.path}: llama.expert_count is {metadata['llama.expert_count']}; supported: no experts"
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    embedding = file.tensors.get(TOP_NAMES["model.embed_tokens.weight"])
    heads = metadata.get("llama.attention.head_count")
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": metadata.get("llama.vocab_size", len(tokens) if isinstance(tokens, list) else None),
        "hidden_size": metadata.get("llama.embedding_length"),
        "num_hidden_layers": metadata.get("llama.block_count"),
        "intermediate_size": metadata.get("llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": metadata.get("llama.attention.key_length"),
        "rms_norm_eps": metadata.get("llama.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.get("llama.context_length"),
        "tie_word_embeddings": TOP_NAMES["lm_head.weight"] not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "dtype": {F32: "float32", F16: "float16"}.get(embedding.type_id if embedding else F32, "bfloat16"),
        "eos_token_id": list(gguf_eos_ids(file)) or None,
        "rope_parameters": _rope(file),
    }
    spec = read_spec(config, {}, str(file.path))
    rotated_dims = metadata.get("llama.rope.dimension_count", spec.rope.dim)
    if rotated_dims != spec.rope.dim:
        raise CheckpointError(f"{file.path}: llama.rope.dimension_count is {rotated_dims}; supported: {spec.rope.dim}")
    return spec


def gguf_eos_ids(file: GgufFile) -> tuple[int, ...]:
    """Returns the tokens that end a text or a turn of a chat."""
    fields = ConfigFields(file.metadata, str(file.path))
    names = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot"))
    return tuple(dict.fromkeys(fields.count(name, low=0) for name in names if name in fields))


def _rope(file: GgufFile) -> dict[str, Any]:
    metadata = file.metadata
    theta = ConfigFields(metadata, str(file.path)).number("llama.rope.freq_base", 10000.0, above=1.0)
    rope: dict[str, Any] = {"rope_theta": theta}
    kind = metadata.get("llama.rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        return rope | _llama3_rope(file, theta)
    if kind == "none":
        return rope
    return rope | {
        "rope_type": kind,
        "factor": metadata.get("llama.rope.scaling.factor"),
        "original_max_position_embeddings": metadata.get("llama.rope.scaling.original_context_length"),
        "attention_factor": metadata.get("llama.rope.scaling.attn_factor"),
    }


def _llama3_rope(file: GgufFile, theta: float) -> dict[str, Any]:
    """Recovers the parameters of Llama 3's scaled rope from the divisor of each frequency, which converters store.

    The largest divisor is the factor itself. The other parameters are the same in every Llama 3 model. A file with
    other parameters is refused, because those of Llama 3 would give slightly wrong results.
    """
    import numpy  # takes longer to import than the rest of the command line

    tensor = file.tensors[ROPE_FACTORS]
    count = tensor.shape[0] if len(tensor.shape) == 1 and tensor.type_id == F32 else 0
    if not 0 < count * 4 <= len(file.mapped) - tensor.offset:
        raise CheckpointError(f"{file.path}: tensor {ROPE_FACTORS} is damaged or cut short")
    stored = numpy.frombuffer(file.mapped, dtype="<f4", count=count, offset=tensor.offset).astype(numpy.float64)
    factor = float(stored.max())
    turns = LLAMA3_ROPE["original_max_position_embeddings"] / (2 * numpy.pi * theta ** (numpy.arange(count) / count))
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    kept = numpy.clip((turns - low) / (high - low), 0.0, 1.0)
    # stored = 1 / (kept + (1 - kept) / factor), rearranged so that damaged numbers cannot cause a division by zero
    if factor < 1.0 or not numpy.allclose(stored * (kept * factor + 1.0 - kept), factor, rtol=1e-4):
        raise CheckpointError(f"{file.path}: tensor {ROPE_FACTORS} holds rope factors other than those of Llama 3")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}
