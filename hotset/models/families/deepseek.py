"""DeepSeek-V3.2 and GLM-5: DeepSeek sparse attention, experts, and a layer for multi-token prediction (MTP)."""

from dataclasses import replace

from hotset.models.attention.dsa_spec import IndexSpec, MlaSpec, read_full_layers
from hotset.models.config_fields import ConfigFields
from hotset.models.families.family import INDEXED_ATTENTION, Family, read_decoder, read_layers
from hotset.models.feed_forward import MoeSpec
from hotset.models.spec import ModelSpec, MtpSpec


def _read_deepseek_v32(fields: ConfigFields, generation: ConfigFields) -> ModelSpec:
    layers = read_layers(fields)
    index = IndexSpec.read(fields, tuple(range(layers)), heads=64, interleaved_rope=False)
    attention = MlaSpec.read(fields, index, q_lora_rank=1536, nope_dim=128, v_dim=128)
    moe = MoeSpec.read(fields, layers, groups=8, topk_group=4)
    spec = _read(fields, generation, "deepseek_v32", attention, context=163840, norm_eps=1e-6)
    return replace(spec, moe=moe, mtp=_read_mtp(fields, carries_normed=False))


def _read_glm5(fields: ConfigFields, generation: ConfigFields) -> ModelSpec:
    layers = read_layers(fields)
    index = IndexSpec.read(fields, read_full_layers(fields, layers), heads=32, interleaved_rope=True)
    attention = MlaSpec.read(fields, index, q_lora_rank=2048, nope_dim=192, v_dim=256)
    moe = MoeSpec.read(fields, layers, groups=1, topk_group=1)
    spec = _read(fields, generation, "glm_moe_dsa", attention, context=202752, norm_eps=1e-5)
    return replace(spec, moe=moe, mtp=_read_mtp(fields, carries_normed=True))


def _read(
    fields: ConfigFields, generation: ConfigFields, architecture: str, attention: MlaSpec, context: int, norm_eps: float
) -> ModelSpec:
    """Reads the fields that mean the same in both models. Leaves out experts and MTP layer."""
    if fields.flag("mlp_bias", False):
        fields.refuse("mlp_bias", "false")
    fields.layer_choices("layer_types", read_layers(fields), INDEXED_ATTENTION)
    return read_decoder(
        fields,
        generation,
        architecture,
        attention,
        attention.rope_dim,
        context=context,
        norm_eps=norm_eps,
        eos_ids=(1,),
    )


def _read_mtp(fields: ConfigFields, carries_normed: bool) -> MtpSpec | None:
    """Returns None unless there is exactly one MTP layer. No published model has more."""
    if fields.count("num_nextn_predict_layers", 0, low=0) != 1:
        return None
    return MtpSpec(carries_normed, shares_selection=fields.flag("index_share_for_mtp_iteration", False))


FAMILIES = {
    "deepseek_v32": Family(_read_deepseek_v32, "deepseek_v32.jinja"),
    "glm_moe_dsa": Family(_read_glm5, "glm5.jinja"),
}
