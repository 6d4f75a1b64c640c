"""What the families share: the fields of `config.json` that mean the same in all of them. Does not import torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast, get_args

from hotset.models.attention.spec import AttentionSpec
from hotset.models.config_fields import ConfigFields
from hotset.models.formats import read_weight_formats
from hotset.models.spec import ModelSpec, RopeKind, RopeSpec

MAX_LAYERS = 1024
DTYPES = ("bfloat16", "float16", "float32", "float64")
FULL_ATTENTION = ("full_attention", "attention")
INDEXED_ATTENTION = ("indexed_attention", "deepseek_sparse_attention")


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`."""

    # Reads config.json and generation_config.json. Raises `CheckpointError` for fields that are missing, have the wrong
    # type, or request a feature that Hotset does not implement.
    read: Callable[[ConfigFields, ConfigFields], ModelSpec]
    chat_template: str | None = None  # the file in `chat_formats` for checkpoints that have no template


def read_layers(fields: ConfigFields) -> int:
    return fields.count("num_hidden_layers", high=MAX_LAYERS)


def read_decoder(
    fields: ConfigFields,
    generation: ConfigFields,
    architecture: str,
    attention: AttentionSpec,
    rope_dim: int,
    *,
    context: int,
    norm_eps: float,
    eos_ids: tuple[int, ...],
) -> ModelSpec:
    """Returns a model whose layers have this attention and dense MLPs. The last three arguments are the defaults of
    absent fields."""
    context = fields.count("max_position_embeddings", context)
    fields.choice("hidden_act", "silu", ("silu",))
    return ModelSpec(
        architecture=architecture,
        vocab=fields.count("vocab_size"),
        hidden=fields.count("hidden_size"),
        layers=read_layers(fields),
        mlp_width=fields.count("intermediate_size"),
        mlp_bias=fields.flag("mlp_bias", False),
        norm_eps=fields.number("rms_norm_eps", norm_eps),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        context=context,
        rope=_read_rope(fields, rope_dim, context),
        attention=attention,
        moe=None,
        dtype=_read_dtype(fields),
        eos_ids=_read_eos(fields, generation, eos_ids),
        weight_formats=read_weight_formats(fields),
    )


def _read_rope(fields: ConfigFields, dim: int, context: int) -> RopeSpec:
    """Reads `rope_scaling` (older files) or `rope_parameters`. `rope_theta` is in that section or at the top level."""
    rope = fields.section("rope_scaling" if fields.get("rope_scaling") else "rope_parameters")
    for section in (fields, rope):
        if section.number("partial_rotary_factor", 1.0) != 1.0:
            section.refuse("partial_rotary_factor", "1.0")
    for layer_type in (*FULL_ATTENTION, *INDEXED_ATTENTION, "sliding_attention"):
        if layer_type in rope:
            rope.refuse(layer_type, "one rope for all layers")
    kind = rope.choice("rope_type" if "rope_type" in rope else "type", "default", get_args(RopeKind))
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0, above=1.0), above=1.0)
    if kind == "default":
        return RopeSpec(dim, theta)
    section = fields if "original_max_position_embeddings" in fields else rope
    original = section.count("original_max_position_embeddings", context)
    factor_is_null = kind == "yarn" and rope.is_null("factor")
    low_freq = rope.number("low_freq_factor", None if kind == "llama3" else 1.0)
    high_freq = rope.number("high_freq_factor", None if kind == "llama3" else 4.0)
    if kind == "llama3" and low_freq >= high_freq:
        rope.refuse("low_freq_factor", f"a number below high_freq_factor ({high_freq:g})")
    return RopeSpec(
        dim,
        theta,
        kind=cast(RopeKind, kind),
        factor=rope.number("factor", context / original if factor_is_null else None),
        original_context=original if kind in ("llama3", "yarn") else 0,
        low_freq_factor=low_freq,
        high_freq_factor=high_freq,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        attention_factor=rope.optional_number("attention_factor"),
        truncate=rope.flag("truncate", not rope.is_null("truncate")),
    )


def _read_dtype(fields: ConfigFields) -> str:
    name = "dtype" if "dtype" in fields else "torch_dtype"
    value = fields.get(name) if name in fields else "float32"
    plain = value.removeprefix("torch.") if isinstance(value, str) else None
    if plain not in DTYPES:
        fields.refuse(name, ", ".join(DTYPES))
    return plain


def _read_eos(fields: ConfigFields, generation: ConfigFields, default: tuple[int, ...]) -> tuple[int, ...]:
    section = generation if "eos_token_id" in generation else fields
    ids = section.ids("eos_token_id")
    if ids is None:
        ids = () if fields.is_null("eos_token_id") else default
    vocab = fields.count("vocab_size")
    if any(token >= vocab for token in ids):
        section.refuse("eos_token_id", f"token ids below vocab_size ({vocab})")
    return ids
