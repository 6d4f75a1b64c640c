"""The values that describe a model. Readers (config.json, GGUF) produce a `ModelSpec`; decoders consume it."""

from dataclasses import dataclass, replace
from typing import Literal

from hotset.models.attention.spec import AttentionSpec
from hotset.models.feed_forward import MoeSpec
from hotset.models.formats.weight_format import PLAIN_WEIGHTS, WeightFormats

RopeKind = Literal["default", "linear", "llama3", "yarn"]
DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding over `dim` values. A kind of scaling ignores the fields that it does not use."""

    dim: int
    theta: float = 10000.0
    kind: RopeKind = "default"
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
class MtpSpec:
    """How the layer for multi-token prediction (MTP), which follows the last layer, drafts several tokens."""

    carries_normed: bool  # the next iteration gets the hidden state after the last norm (GLM), not before it (DeepSeek)
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
    attention: AttentionSpec
    moe: MoeSpec | None
    dtype: str  # the checkpoint's dtype: 'bfloat16', 'float16', 'float32' or 'float64'
    eos_ids: tuple[int, ...]
    weight_formats: WeightFormats = PLAIN_WEIGHTS  # in which formats the checkpoint stores its matrices
    mtp: MtpSpec | None = None  # None: there is no MTP layer, or it is not loaded

    @property
    def with_mtp_layer(self) -> "ModelSpec":
        """This model with the MTP layer as its last layer, which has experts if any layer has them."""
        assert self.mtp is not None, "the model has no MTP layer"
        number, moe = self.layers, self.moe
        return replace(
            self,
            layers=number + 1,
            attention=self.attention.with_mtp_layer(number),
            moe=None if moe is None else replace(moe, layers=(*moe.layers, number)),
        )


@dataclass(frozen=True, slots=True)
class KvStorage:
    """Selects fp8 storage, instead of the model's dtype, for rows and for index keys."""

    fp8_rows: bool = False
    fp8_keys: bool = False


AS_COMPUTED = KvStorage()


def dtype_name(name: str | None, spec: ModelSpec, device_type: str) -> str:
    """Returns `name`, or by default float32 on a CPU, and on a GPU the checkpoint's dtype (bfloat16 for float16)."""
    if name is None:
        of_checkpoint = "bfloat16" if spec.dtype == "float16" else spec.dtype
        return "float32" if device_type == "cpu" else of_checkpoint
    return name
