"""DeepSeek-V3.2 and GLM-5: DeepSeek sparse attention, experts, and a layer for multi-token prediction (MTP)."""

from dataclasses import dataclass, replace
from functools import partial

from hotset.models.attention.dsa_spec import DsaDefaults, MlaSpec
from hotset.models.config_fields import ConfigFields
from hotset.models.families.family import INDEXED_ATTENTION, Defaults, Family, read_decoder, read_layers
from hotset.models.feed_forward import MoeDefaults, MoeSpec
from hotset.models.spec import ModelSpec, MtpSpec


@dataclass(frozen=True, slots=True)
class _DeepseekLike:
    """How one of these families differs from the others."""

    defaults: Defaults
    attention: DsaDefaults
    moe: MoeDefaults
    carries_normed: bool  # `MtpSpec.carries_normed`


def _read(family: _DeepseekLike, fields: ConfigFields, generation: ConfigFields, architecture: str) -> ModelSpec:
    layers = read_layers(fields)
    if fields.flag("mlp_bias", False):
        fields.refuse("mlp_bias", "false")
    fields.layer_choices("layer_types", layers, INDEXED_ATTENTION)
    attention = MlaSpec.read(fields, family.attention, layers)
    spec = read_decoder(
        fields, generation, architecture, family.defaults, attention, attention.rope_dim, rope_field="qk_rope_head_dim"
    )
    return replace(spec, moe=MoeSpec.read(fields, family.moe, layers), mtp=_read_mtp(fields, family.carries_normed))


def _read_mtp(fields: ConfigFields, carries_normed: bool) -> MtpSpec | None:
    """Returns None unless there is exactly one MTP layer. No published model has more."""
    if fields.count("num_nextn_predict_layers", 0, low=0) != 1:
        return None
    return MtpSpec(carries_normed, shares_selection=fields.flag("index_share_for_mtp_iteration", False))


DEEPSEEK_V32 = _DeepseekLike(
    Defaults(context=163840, norm_eps=1e-6, eos_ids=(1,)),
    DsaDefaults(
        q_lora_rank=1536,
        nope_dim=128,
        v_dim=128,
        index_heads=64,
        interleaved_index_rope=False,
        shares_indexers=False,
    ),
    MoeDefaults(groups=8, topk_group=4),
    carries_normed=False,
)
GLM5 = _DeepseekLike(
    Defaults(context=202752, norm_eps=1e-5, eos_ids=(1,)),
    DsaDefaults(
        q_lora_rank=2048,
        nope_dim=192,
        v_dim=256,
        index_heads=32,
        interleaved_index_rope=True,
        shares_indexers=True,
    ),
    MoeDefaults(groups=1, topk_group=1),
    carries_normed=True,
)
FAMILIES = {
    "deepseek_v32": Family(partial(_read, DEEPSEEK_V32), "deepseek_v32.jinja"),
    "glm_moe_dsa": Family(partial(_read, GLM5), "glm5.jinja"),
}
