"""Tiny fp8 checkpoints of each family, as published ones store them, and the same weights expanded, for transformers.

Their sizes allow 4 tensor parallel ranks. Heads, latents and vocabulary are no multiples of a block.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers  # imports its classes lazily
from models.test_parity import randomise
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

GQA_FIELDS = {
    "vocab_size": 97,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": True,
    "max_position_embeddings": 96,
    "eos_token_id": None,
    "bos_token_id": None,
}
DSA_FIELDS = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 96,
    "q_lora_rank": 192,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 40,
    "v_head_dim": 128,
    "index_topk": 12,
    "index_head_dim": 48,
    "index_n_heads": 2,
    "max_position_embeddings": 96,
    "eos_token_id": None,
    "bos_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GQA_FIELDS),
    "deepseek_v32": ("DeepseekV32", DSA_FIELDS | {"num_hidden_layers": 2}),
    "glm_moe_dsa": ("GlmMoeDsa", DSA_FIELDS | {"indexer_types": ["full", "shared", "full"], "attention_bias": True}),
}
QUANTISATION = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FLOAT32 = torch.float32
BLOCK = 128
E4M3_MAX = 448.0
# What published checkpoints store in fp8; mlp.gate is the router.
FP8_TENSOR = re.compile(r".*\.([qkvo]_proj|[qkv]+_[ab]_proj(_with_mqa)?|wq_b|wk|(gate|up|down)_proj)\.weight")
# The inputs of these products are not quantised, although the first one is stored in fp8.
UNQUANTISED_PRODUCTS = ("kv_b_proj", "weights_proj", "lm_head", "mlp.gate.weight", "embed_tokens")


def quantised_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes and the scales of a matrix. The largest value of each block gets the largest code."""
    rows, columns = (math.ceil(size / BLOCK) for size in values.shape)
    scales = torch.empty(rows, columns)
    codes = torch.empty(values.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            block = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
            scales[row, column] = values[block].abs().max() / E4M3_MAX
            codes[block] = (values[block] / scales[row, column]).to(torch.float8_e4m3fn)
    return codes, scales


def expanded_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Returns the values in float64, in which they are exact."""
    factors = scales.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return codes.double() * factors[: codes.shape[0], : codes.shape[1]]


def save_fp8_model(folder: Path, family: str, seed: int, **changes: Any) -> tuple[Path, Any]:
    """Writes a random fp8 checkpoint in several shards without an index. Returns its directory, and the model of
    transformers with the same weights in float64. `changes` replace or add fields of the configuration."""
    prefix, fields = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**fields | changes, attn_implementation="eager")
    model_type = getattr(transformers, f"{prefix}ForCausalLM")
    torch.manual_seed(seed)
    model = model_type(config)
    randomise(model, seed)
    fp8, plain = folder / "fp8", folder / "expanded"
    model.save_pretrained(plain)
    fp8.mkdir()
    tensors = load_file(plain / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, values in tensors.items():
        if FP8_TENSOR.fullmatch(name):
            stored[name], stored[f"{name}_scale_inv"] = quantised_blocks(values)
            tensors[name] = expanded_blocks(stored[name], stored[f"{name}_scale_inv"])
            if "kv_b_proj" in name:  # is expanded to float32 at load
                tensors[name] = tensors[name].float()
        else:
            stored[name] = values
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    written = json.loads((plain / "config.json").read_text())
    (fp8 / "config.json").write_text(json.dumps(written | {"quantization_config": QUANTISATION}))
    names = sorted(stored)
    for shard in range(3):
        part = {name: stored[name] for name in names[shard::3]}
        save_file(part, fp8 / f"model-{shard + 1:05}-of-000003.safetensors")
    loaded = model_type.from_pretrained(plain, attn_implementation="eager", dtype=torch.float64)
    if family != "llama":
        loaded.set_experts_implementation("eager")
    return fp8, loaded.eval()


def quantise_checkpoint(source: Path, target: Path) -> Path:
    """Writes the checkpoint in `source` to `target` in fp8, with links to its other files. Returns `target`."""
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name not in ("config.json", "model.safetensors.index.json"):
            (target / path.name).symlink_to(path.resolve())
    stored = stored_tensors(source)
    for name in [name for name in stored if FP8_TENSOR.fullmatch(name)]:
        stored[name], stored[f"{name}_scale_inv"] = quantised_blocks(stored[name].float())
    save_file(stored, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTISATION}))
    return target


def stored_tensors(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def rounded_inputs(x: Tensor) -> Tensor:
    """Returns x after quantisation per token in groups of BLOCK values: scales and quotients are float32, and the
    nearest code is found by bisection. Of two codes at the same distance, the even one wins."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(FLOAT32)  # ascending magnitudes
    groups = []
    for group in x.to(FLOAT32).split(BLOCK, -1):
        scale = (group.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp_min(1e-30)
        magnitude = (group / scale).abs().clamp(max=E4M3_MAX)
        above = torch.searchsorted(codes, magnitude.contiguous()).clamp(max=126)
        below = (above - 1).clamp(min=0)
        down, up = magnitude - codes[below], codes[above] - magnitude
        chosen = torch.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
        groups.append((codes[chosen] * group.sign()).to(x.dtype) * scale.to(x.dtype))
    return torch.cat(groups, -1)


@contextlib.contextmanager
def quantised_activations(model: torch.nn.Module) -> Iterator[None]:
    """While it is open, `model` quantises the inputs of every product whose weight stays in fp8."""
    storages = {
        parameter.untyped_storage().data_ptr()
        for name, parameter in model.named_parameters()
        if parameter.dim() >= 2 and not any(part in name for part in UNQUANTISED_PRODUCTS)
    }
    linear = F.linear

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.untyped_storage().data_ptr() in storages:
            x = rounded_inputs(x)
        return linear(x, weight, bias)

    F.linear = product  # type: ignore[assignment]
    try:
        yield
    finally:
        F.linear = linear


@contextlib.contextmanager
def float64_throughout() -> Iterator[None]:
    """While it is open, the places where models of transformers convert to float32 convert to float64."""
    to_float = Tensor.float
    torch.float32, torch.float = torch.float64, torch.float64  # type: ignore[misc]
    Tensor.float = Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.float32, torch.float = FLOAT32, FLOAT32  # type: ignore[misc]
        Tensor.float = to_float  # type: ignore[method-assign]
