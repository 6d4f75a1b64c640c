"""Reads `config.json` and `generation_config.json` of a Hugging Face directory into a `ModelSpec`.

Absent optional fields take the defaults of the `transformers` library. Features that the decoders do not implement are
refused here, by name, before any weight is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from hotset.models.config_fields import ConfigFields
from hotset.models.formats import read_weight_formats
from hotset.models.spec import GqaSpec, IndexSpec, MlaSpec, ModelSpec, MoeSpec, MtpSpec, RopeSpec

MAX_LAYERS = 1024
MAX_PARTS = 1 << 16  # attention heads, or experts
MAX_TOPK = (1 << 15) - 1  # slots of hot buffers have 16-bit numbers
RopeKind = Literal["default", "linear", "llama3", "yarn"]

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
DTYPES = ("bfloat16", "float16", "float32", "float64")
FULL_ATTENTION = ("full_attention", "attention")
INDEXED_ATTENTION = ("indexed_attention", "deepseek_sparse_attention")


@dataclass(frozen=True, slots=True)
class _GqaDefaults:
    context: int
    eos_ids: tuple[int, ...]
    head_dim: int | None  # None: hidden_size / num_attention_heads
    kv_heads: int | None  # None: the number of attention heads
    qk_norm: bool
    has_mlp_bias: bool  # whether the architecture has the field mlp_bias
    has_window: bool  # whether the architecture has the field sliding_window: null is none, but absent is 4096


@dataclass(frozen=True, slots=True)
class _DsaDefaults:
    context: int
    norm_eps: float
    q_lora_rank: int
    nope_dim: int
    v_dim: int
    index_heads: int
    groups: int
    topk_group: int
    interleaved_index_rope: bool
    shares_indexers: bool
    carries_normed: bool  # `MtpSpec.carries_normed`


GQA_DEFAULTS = {
    "llama": _GqaDefaults(
        2048, eos_ids=(2,), head_dim=None, kv_heads=None, qk_norm=False, has_mlp_bias=True, has_window=False
    ),
    "qwen3": _GqaDefaults(
        32768, eos_ids=(), head_dim=128, kv_heads=32, qk_norm=True, has_mlp_bias=False, has_window=True
    ),
}
DSA_DEFAULTS = {
    "deepseek_v32": _DsaDefaults(
        context=163840,
        norm_eps=1e-6,
        q_lora_rank=1536,
        nope_dim=128,
        v_dim=128,
        index_heads=64,
        groups=8,
        topk_group=4,
        interleaved_index_rope=False,
        shares_indexers=False,
        carries_normed=False,
    ),
    "glm_moe_dsa": _DsaDefaults(
        context=202752,
        norm_eps=1e-5,
        q_lora_rank=2048,
        nope_dim=192,
        v_dim=256,
        index_heads=32,
        groups=1,
        topk_group=1,
        interleaved_index_rope=True,
        shares_indexers=True,
        carries_normed=True,
    ),
}
ARCHITECTURES = (*GQA_DEFAULTS, *DSA_DEFAULTS)


def read_spec(
    config: Mapping[str, Any], generation: Mapping[str, Any], source: str, *, with_mtp: bool = False
) -> ModelSpec:
    """Returns the model that `config` describes. Stop tokens in `generation` take precedence over those in `config`.

    Unless `with_mtp`, the spec says that there is no MTP layer, so that none is loaded.
    Error messages start with `source`, the path of the file that `config` comes from, or with generation_config.json.
    Without a dtype, the model's is float32; `find_model` replaces it by that of the weights.
    Raises `CheckpointError`, with a message of one line, for fields that are missing, have the wrong type, or request a
    feature that Hotset does not implement.
    """
    fields = ConfigFields(config, source)
    architecture = fields.get("model_type")
    if architecture is None:
        fields.missing("model_type")
    fields.choice("model_type", "", ARCHITECTURES)
    fields.choice("hidden_act", "silu", ("silu",))
    read: Callable[[ConfigFields, ConfigFields, str], ModelSpec]
    read = _read_gqa if architecture in GQA_DEFAULTS else _read_dsa
    spec = read(fields, ConfigFields(generation, "generation_config.json"), architecture)
    return spec if with_mtp else replace(spec, mtp=None)


def _read_gqa(fields: ConfigFields, generation: ConfigFields, architecture: str) -> ModelSpec:
    defaults = GQA_DEFAULTS[architecture]
    heads = fields.count("num_attention_heads", high=MAX_PARTS)
    kv_heads = fields.count("num_key_value_heads", defaults.kv_heads or heads)
    if fields.is_null("num_key_value_heads"):
        kv_heads = heads
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    hidden = fields.count("hidden_size")
    head_dim = fields.count("head_dim", defaults.head_dim or hidden // heads)
    if "head_dim" not in fields and defaults.head_dim is None and hidden % heads:
        fields.refuse("hidden_size", f"a multiple of num_attention_heads ({heads}), unless head_dim is set")
    if not defaults.has_mlp_bias and fields.flag("mlp_bias", False):
        fields.refuse("mlp_bias", "false")
    layers = fields.count("num_hidden_layers", high=MAX_LAYERS)
    _refuse_windows(fields, layers, defaults.has_window)
    bias = fields.flag("attention_bias", False)
    attention = GqaSpec(heads, kv_heads, head_dim, qkv_bias=bias, out_bias=bias, qk_norm=defaults.qk_norm)
    return ModelSpec(
        architecture=architecture,
        vocab=fields.count("vocab_size"),
        hidden=hidden,
        layers=layers,
        mlp_width=fields.count("intermediate_size"),
        mlp_bias=fields.flag("mlp_bias", False),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        context=fields.count("max_position_embeddings", defaults.context),
        rope=_read_rope(fields, head_dim, "head_dim", fields.count("max_position_embeddings", defaults.context)),
        attention=attention,
        moe=None,
        dtype=_read_dtype(fields),
        eos_ids=_read_eos(fields, generation, defaults.eos_ids),
        weight_formats=read_weight_formats(fields),
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


def _read_dsa(fields: ConfigFields, generation: ConfigFields, architecture: str) -> ModelSpec:
    defaults = DSA_DEFAULTS[architecture]
    layers = fields.count("num_hidden_layers", high=MAX_LAYERS)
    context = fields.count("max_position_embeddings", defaults.context)
    if fields.flag("mlp_bias", False):
        fields.refuse("mlp_bias", "false")
    if fields.is_null("q_lora_rank"):
        fields.refuse("q_lora_rank", "a whole number (a low-rank query projection)")
    if not fields.flag("rope_interleave", True):
        fields.refuse("rope_interleave", "true")
    fields.layer_choices("layer_types", layers, INDEXED_ATTENTION)
    attention = MlaSpec(
        heads=fields.count("num_attention_heads", high=MAX_PARTS),
        q_lora_rank=fields.count("q_lora_rank", defaults.q_lora_rank),
        kv_lora_rank=fields.count("kv_lora_rank", 512),
        nope_dim=fields.count("qk_nope_head_dim", defaults.nope_dim),
        rope_dim=fields.count("qk_rope_head_dim", 64),
        v_dim=fields.count("v_head_dim", defaults.v_dim),
        bias=fields.flag("attention_bias", False),
        index=_read_index(fields, defaults, layers),
    )
    return ModelSpec(
        architecture=architecture,
        vocab=fields.count("vocab_size"),
        hidden=fields.count("hidden_size"),
        layers=layers,
        mlp_width=fields.count("intermediate_size"),
        mlp_bias=False,
        norm_eps=fields.number("rms_norm_eps", defaults.norm_eps),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        context=context,
        rope=_read_rope(fields, attention.rope_dim, "qk_rope_head_dim", context),
        attention=attention,
        moe=_read_moe(fields, defaults, layers),
        dtype=_read_dtype(fields),
        eos_ids=_read_eos(fields, generation, (1,)),
        weight_formats=read_weight_formats(fields),
        mtp=_read_mtp(fields, defaults),
    )


def _read_mtp(fields: ConfigFields, defaults: _DsaDefaults) -> MtpSpec | None:
    """Returns None unless there is exactly one MTP layer. No published model has more."""
    if fields.count("num_nextn_predict_layers", 0, low=0) != 1:
        return None
    return MtpSpec(
        carries_normed=defaults.carries_normed, shares_selection=fields.flag("index_share_for_mtp_iteration", False)
    )


def _read_index(fields: ConfigFields, defaults: _DsaDefaults, layers: int) -> IndexSpec:
    if fields.flag("indexer_rope_interleave", defaults.interleaved_index_rope) != defaults.interleaved_index_rope:
        fields.refuse("indexer_rope_interleave", str(defaults.interleaved_index_rope).lower())
    head_dim = fields.count("index_head_dim", 128)
    if head_dim < fields.count("qk_rope_head_dim", 64):
        fields.refuse("index_head_dim", f"at least qk_rope_head_dim ({fields.count('qk_rope_head_dim', 64)})")
    return IndexSpec(
        heads=fields.count("index_n_heads", defaults.index_heads, high=MAX_PARTS),
        head_dim=head_dim,
        topk=fields.count("index_topk", 2048, high=MAX_TOPK),
        interleaved_rope=defaults.interleaved_index_rope,
        full_layers=_full_layers(fields, layers) if defaults.shares_indexers else tuple(range(layers)),
    )


def _full_layers(fields: ConfigFields, layers: int) -> tuple[int, ...]:
    """Returns the layers that run their own indexer: from a list, a pattern, or a frequency and an offset."""
    pattern = fields.get("index_topk_pattern")
    if "indexer_types" in fields:
        name = "indexer_types"
        types = fields.layer_choices(name, layers, ("full", "shared")) or []
    elif isinstance(pattern, str):
        name = "index_topk_pattern"
        if len(pattern) < layers or not set(pattern) <= {"F", "S"}:
            fields.refuse(name, f"a letter F (full) or S (shared) for each of {layers} layers")
        types = ["full" if letter == "F" else "shared" for letter in pattern[:layers]]
    elif pattern is not None:
        name = "index_topk_pattern"
        types = fields.layer_choices(name, layers, ("full", "shared")) or []
    else:
        name = "index_skip_topk_offset"
        every = max(fields.count("index_topk_freq", 1, low=0), 1)
        offset = fields.count(name, 2, low=-(1 << 31))
        types = ["full" if max(layer - offset + 1, 0) % every == 0 else "shared" for layer in range(layers)]
    if types[0] != "full":
        fields.refuse(name, "a first layer that runs its own indexer (full)")
    return tuple(layer for layer, kind in enumerate(types) if kind == "full")


def _read_moe(fields: ConfigFields, defaults: _DsaDefaults, layers: int) -> MoeSpec | None:
    sparse = _moe_layers(fields, layers)
    if not sparse:
        return None
    fields.choice("scoring_func", "sigmoid", ("sigmoid",))
    fields.choice("topk_method", "noaux_tc", ("noaux_tc",))
    names = ("num_local_experts", "num_experts", "n_routed_experts")  # the first one that is present counts
    name = next((candidate for candidate in names if candidate in fields), "n_routed_experts")
    experts = fields.count(name, 256, high=MAX_PARTS)
    groups = fields.count("n_group", defaults.groups)
    topk_group = fields.count("topk_group", defaults.topk_group)
    experts_per_token = fields.count("num_experts_per_tok", 8)
    if experts % groups:
        fields.refuse("n_group", f"a divisor of {name} ({experts})")
    if groups > 1 and experts // groups < 2:
        fields.refuse("n_group", f"groups of at least two experts ({name} is {experts})")
    if topk_group > groups:
        fields.refuse("topk_group", f"at most n_group ({groups})")
    if experts_per_token > topk_group * (experts // groups):
        fields.refuse(
            "num_experts_per_tok",
            f"at most {topk_group * (experts // groups)}, the number of experts in topk_group groups",
        )
    return MoeSpec(
        experts=experts,
        experts_per_token=experts_per_token,
        width=fields.count("moe_intermediate_size", 2048),
        shared=fields.count("n_shared_experts", 1, low=0),
        groups=groups,
        topk_group=topk_group,
        scale=fields.number("routed_scaling_factor", 2.5),
        normalise=fields.flag("norm_topk_prob", True),
        layers=sparse,
    )


def _moe_layers(fields: ConfigFields, layers: int) -> tuple[int, ...]:
    types = fields.layer_choices("mlp_layer_types", layers, ("dense", "sparse"))
    if types is not None:
        return tuple(layer for layer, kind in enumerate(types) if kind == "sparse")
    dense = fields.count("first_k_dense_replace", 3, low=0)
    every = fields.count("moe_layer_freq", 1)
    return tuple(layer for layer in range(dense, layers) if layer % every == 0)


def _read_rope(fields: ConfigFields, dim: int, dim_field: str, context: int) -> RopeSpec:
    """Reads `rope_scaling` (older files) or `rope_parameters`. `rope_theta` is in that section or at the top level."""
    rope = fields.section("rope_scaling" if fields.get("rope_scaling") else "rope_parameters")
    for section in (fields, rope):
        if section.number("partial_rotary_factor", 1.0) != 1.0:
            section.refuse("partial_rotary_factor", "1.0")
    if dim % 2:
        fields.refuse(dim_field, "an even number (rotary embedding rotates pairs of values)")
    for layer_type in (*FULL_ATTENTION, *INDEXED_ATTENTION, "sliding_attention"):
        if layer_type in rope:
            rope.refuse(layer_type, "one rope for all layers")
    kind = rope.choice("rope_type" if "rope_type" in rope else "type", "default", ROPE_KINDS)
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
