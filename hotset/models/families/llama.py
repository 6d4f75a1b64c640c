"""Llama and Qwen3: full attention with grouped heads, and dense MLPs."""

from dataclasses import dataclass
from functools import partial

from hotset.models.attention.gqa_spec import GqaDefaults, GqaSpec
from hotset.models.config_fields import ConfigFields
from hotset.models.families.family import FULL_ATTENTION, Defaults, Family, read_decoder, read_layers
from hotset.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class _LlamaLike:
    """How one of these families differs from the others."""

    defaults: Defaults
    attention: GqaDefaults
    has_mlp_bias: bool  # whether the architecture has the field mlp_bias
    has_window: bool  # whether the architecture has the field sliding_window: null is none, but absent is 4096


def _read(family: _LlamaLike, fields: ConfigFields, generation: ConfigFields, architecture: str) -> ModelSpec:
    attention = GqaSpec.read(fields, family.attention)
    if not family.has_mlp_bias and fields.flag("mlp_bias", False):
        fields.refuse("mlp_bias", "false")
    _refuse_windows(fields, read_layers(fields), family.has_window)
    return read_decoder(
        fields, generation, architecture, family.defaults, attention, attention.head_dim, rope_field="head_dim"
    )


def _refuse_windows(fields: ConfigFields, layers: int, has_window: bool) -> None:
    """Raises `CheckpointError` if any layer uses a sliding window, which is not implemented."""
    if "layer_types" in fields:
        fields.layer_choices("layer_types", layers, FULL_ATTENTION)
        return
    used = fields.flag("use_sliding_window", not has_window)
    first_windowed = fields.count("max_window_layers", 28, low=0) if "use_sliding_window" in fields else 0
    if used and first_windowed < layers:
        if "sliding_window" in fields:
            fields.refuse("sliding_window", "null (full attention in every layer)")
        if has_window and not fields.is_null("sliding_window"):
            fields.refuse("use_sliding_window", "false, or a sliding_window of null (full attention in every layer)")


LLAMA = _LlamaLike(
    Defaults(context=2048, norm_eps=1e-6, eos_ids=(2,)),
    GqaDefaults(head_dim=None, kv_heads=None, qk_norm=False),
    has_mlp_bias=True,
    has_window=False,
)
QWEN3 = _LlamaLike(
    Defaults(context=32768, norm_eps=1e-6, eos_ids=()),
    GqaDefaults(head_dim=128, kv_heads=32, qk_norm=True),
    has_mlp_bias=False,
    has_window=True,
)
FAMILIES = {"llama": Family(partial(_read, LLAMA)), "qwen3": Family(partial(_read, QWEN3))}
