"""Llama and Qwen3: full attention with grouped heads, and dense MLPs."""

from hotset.models.attention.gqa_spec import GqaSpec
from hotset.models.config_fields import ConfigFields
from hotset.models.families.family import FULL_ATTENTION, Family, read_decoder, read_layers
from hotset.models.spec import ModelSpec


def _read_llama(fields: ConfigFields, generation: ConfigFields) -> ModelSpec:
    attention = GqaSpec.read(fields, head_dim=None, kv_heads=None, qk_norm=False)
    _refuse_windows(fields, has_window=False)
    return read_decoder(
        fields, generation, "llama", attention, attention.head_dim, context=2048, norm_eps=1e-6, eos_ids=(2,)
    )


def _read_qwen3(fields: ConfigFields, generation: ConfigFields) -> ModelSpec:
    attention = GqaSpec.read(fields, head_dim=128, kv_heads=32, qk_norm=True)
    if fields.flag("mlp_bias", False):
        fields.refuse("mlp_bias", "false")
    _refuse_windows(fields, has_window=True)
    return read_decoder(
        fields, generation, "qwen3", attention, attention.head_dim, context=32768, norm_eps=1e-6, eos_ids=()
    )


def _refuse_windows(fields: ConfigFields, *, has_window: bool) -> None:
    """Raises `CheckpointError` if any layer uses a sliding window, which is not implemented.

    `has_window` says whether the architecture has the field sliding_window. If so, null means no window, but an absent
    field means a window of 4096.
    """
    layers = read_layers(fields)
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


FAMILIES = {"llama": Family(_read_llama), "qwen3": Family(_read_qwen3)}
