"""The values that describe a model. Readers (config.json, GGUF) produce a `ModelSpec`; decoders consume it."""

from dataclasses import dataclass, replace
from typing import Literal

from hotset.models.formats.weight_format import PLAIN_WEIGHTS, WeightFormats


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding over `dim` values. A kind of scaling ignores the fields that it does not use."""

    dim: int
    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_context: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn; in MLA models, every kind but default
    attention_factor: float | None = None  # yarn; None: derived from the other fields
    truncate: bool = True  # yarn


@dataclass(frozen=True, slots=True)
class GqaSpec:
    """Full attention with grouped heads: `llama`, `qwen3`."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head of Q and K, before rope


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """The indexer of DSA, which selects the positions that attention reads."""

    heads: int
    head_dim: int
    topk: int
    interleaved_rope: bool  # rotated pairs are (0, 1), (2, 3), ... (GLM), else (i, i + dim / 2) (DeepSeek-V3.2)
    full_layers: tuple[int, ...]  # the layers that run an indexer; the layers after each one reuse its selection


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention, with the indexer that makes it sparse: `deepseek_v32`, `glm_moe_dsa`."""

    heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    bias: bool  # whether there is a bias on q_a_proj, kv_a_proj_with_mqa and o_proj
    index: IndexSpec


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Routed experts with group-limited, bias-corrected sigmoid routing, plus shared experts."""

    experts: int
    experts_per_token: int
    width: int
    shared: int  # shared experts, run as one MLP of width * shared
    groups: int
    topk_group: int
    scale: float
    normalise: bool
    layers: tuple[int, ...]  # the MoE layers; the others have a dense MLP


@dataclass(frozen=True, slots=True)
class MtpSpec:
    """How the layer for multi-token prediction (MTP), which follows the last layer, drafts several tokens."""

    carries_normed: bool  # the next iteration gets the hidden state after the last norm (GLM), else before (DeepSeek)
    shares_selection: bool  # later iterations attend to the positions that the first one selected


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One causal language model, as its configuration describes it."""

    architecture: str  # model_type: 'llama', 'qwen3', 'deepseek_v32', 'glm_moe_dsa'
    vocab: int
    hidden: int
    layers: int
    mlp_width: int  # the width of dense MLPs
    mlp_bias: bool
    norm_eps: float
    tied_embeddings: bool
    context: int  # max_position_embeddings
    rope: RopeSpec
    attention: GqaSpec | MlaSpec
    moe: MoeSpec | None
    dtype: str  # the checkpoint's dtype: 'bfloat16', 'float16', 'float32' or 'float64'
    eos_ids: tuple[int, ...]
    weight_formats: WeightFormats = PLAIN_WEIGHTS
    mtp: MtpSpec | None = None  # None: there is no MTP layer, or it is not loaded

    @property
    def with_mtp_layer(self) -> "ModelSpec":
        """This model with the MTP layer as its last layer, which has an indexer, and experts if any layer has them."""
        number, attention, moe = self.layers, self.attention, self.moe
        assert isinstance(attention, MlaSpec) and self.mtp is not None, "the model has no MTP layer"
        index = replace(attention.index, full_layers=(*attention.index.full_layers, number))
        return replace(
            self,
            layers=number + 1,
            attention=replace(attention, index=index),
            moe=None if moe is None else replace(moe, layers=(*moe.layers, number)),
        )


@dataclass(frozen=True, slots=True)
class KvStorage:
    """Selects fp8 storage, instead of the model's dtype, for rows and for index keys."""

    fp8_rows: bool = False
    fp8_keys: bool = False


AS_COMPUTED = KvStorage()
