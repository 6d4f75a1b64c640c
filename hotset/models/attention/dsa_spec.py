"""DeepSeek sparse attention (DSA) over latent rows (MLA), as `deepseek_v32` and `glm_moe_dsa` have it. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from hotset.base.units import MIB
from hotset.models.attention.spec import AttentionSpec
from hotset.models.config_fields import MAX_PARTS, ConfigFields
from hotset.models.split import Split
from hotset.models.tensors import WeightTensor, shard_slice, vector

MAX_TOPK = (1 << 15) - 1  # slots of hot buffers have 16-bit numbers
INDEX_WORKSPACE_VALUES = 128 * MIB  # the scores of an indexer; `index_topk` processes larger batches in parts


class IndexTensors(NamedTuple):
    key: WeightTensor
    query: WeightTensor
    key_norm: WeightTensor
    head_weights: WeightTensor


class MlaTensors(NamedTuple):
    q_down: WeightTensor
    q_norm: WeightTensor
    q_up: WeightTensor
    kv_down: WeightTensor
    kv_norm: WeightTensor
    kv_up: WeightTensor
    out: WeightTensor


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """The indexer of DSA, which selects the positions that attention reads."""

    heads: int
    head_dim: int
    topk: int
    interleaved_rope: bool  # rotated pairs are (0, 1), (2, 3), ... (GLM), else (i, i + dim / 2) (DeepSeek-V3.2)
    full_layers: tuple[int, ...]  # the layers that run an indexer; the layers after each one reuse its selection

    @staticmethod
    def read(fields: ConfigFields, full_layers: tuple[int, ...], *, heads: int, interleaved_rope: bool) -> "IndexSpec":
        """Reads config.json. `heads` is a default; the field of `interleaved_rope`, if present, must agree."""
        if fields.flag("indexer_rope_interleave", interleaved_rope) != interleaved_rope:
            fields.refuse("indexer_rope_interleave", str(interleaved_rope).lower())
        head_dim = fields.count("index_head_dim", 128)
        if head_dim < fields.count("qk_rope_head_dim", 64):
            fields.refuse("index_head_dim", f"at least qk_rope_head_dim ({fields.count('qk_rope_head_dim', 64)})")
        return IndexSpec(
            heads=fields.count("index_n_heads", heads, high=MAX_PARTS),
            head_dim=head_dim,
            topk=fields.count("index_topk", 2048, high=MAX_TOPK),
            interleaved_rope=interleaved_rope,
            full_layers=full_layers,
        )

    def tensors(self, hidden: int, q_lora_rank: int, layer: int) -> IndexTensors:
        """Returns the tensors of one indexer. Every tensor parallel rank holds the whole indexer."""
        prefix, product, heads = f"model.layers.{layer}.self_attn.indexer", "indexer projections", self.heads
        return IndexTensors(
            key=WeightTensor(f"{prefix}.wk.weight", (self.head_dim, hidden), product),
            query=WeightTensor(f"{prefix}.wq_b.weight", (heads * self.head_dim, q_lora_rank), product),
            key_norm=vector(f"{prefix}.k_norm.weight", self.head_dim, bias=True),
            head_weights=WeightTensor(f"{prefix}.weights_proj.weight", (heads, hidden), "head weights", storage="fp32"),
        )


@dataclass(frozen=True, slots=True)
class MlaSpec(AttentionSpec):
    """Multi-head latent attention, with the indexer that makes it sparse."""

    heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    bias: bool  # whether there is a bias on q_a_proj, kv_a_proj_with_mqa and o_proj
    index: IndexSpec

    @staticmethod
    def read(fields: ConfigFields, index: IndexSpec, *, q_lora_rank: int, nope_dim: int, v_dim: int) -> "MlaSpec":
        """Reads config.json. The numbers are the defaults of absent fields."""
        if fields.is_null("q_lora_rank"):
            fields.refuse("q_lora_rank", "a whole number (a low-rank query projection)")
        if not fields.flag("rope_interleave", True):
            fields.refuse("rope_interleave", "true")
        return MlaSpec(
            heads=fields.count("num_attention_heads", high=MAX_PARTS),
            q_lora_rank=fields.count("q_lora_rank", q_lora_rank),
            kv_lora_rank=fields.count("kv_lora_rank", 512),
            nope_dim=fields.count("qk_nope_head_dim", nope_dim),
            rope_dim=fields.even_count("qk_rope_head_dim", 64),
            v_dim=fields.count("v_head_dim", v_dim),
            bias=fields.flag("attention_bias", False),
            index=index,
        )

    @property
    def output_columns(self) -> int:
        return self.heads * self.v_dim

    @property
    def topk(self) -> int | None:
        return self.index.topk

    @property
    def index_layers(self) -> tuple[int, ...]:
        return self.index.full_layers

    @property
    def has_fp8_rows(self) -> bool:
        return True

    def stage_starts(self, layers: int) -> tuple[int, ...]:
        """Layers that share one indexer are in one stage."""
        return self.index.full_layers

    def with_mtp_layer(self, layer: int) -> Self:
        """The MTP layer runs an indexer."""
        return replace(self, index=replace(self.index, full_layers=(*self.index.full_layers, layer)))

    def tensors(self, hidden: int, layer: int, split: Split) -> Iterable[WeightTensor]:
        return (*self.projections(hidden, layer, split), *(self.index_tensors(hidden, layer) or ()))

    def index_tensors(self, hidden: int, layer: int) -> IndexTensors | None:
        """Returns the tensors of the layer's indexer; None if it reuses another layer's selection."""
        return self.index.tensors(hidden, self.q_lora_rank, layer) if layer in self.index.full_layers else None

    def projections(self, hidden: int, layer: int, split: Split) -> MlaTensors:
        """Returns the tensors of one layer's attention without its indexer."""
        prefix, product, heads = f"model.layers.{layer}.self_attn", "attention projections", split.tp_shard(self.heads)
        q_rank, rank, rope_dim = self.q_lora_rank, self.kv_lora_rank, self.rope_dim
        head_dim, up_dim = self.nope_dim + rope_dim, self.nope_dim + self.v_dim
        q_rows, kv_rows = shard_slice(0, heads, head_dim), shard_slice(0, heads, up_dim)
        out_shape, columns = (hidden, self.output_columns), shard_slice(1, heads, self.v_dim)
        kv_name, kv_shape = f"{prefix}.kv_a_proj_with_mqa.weight", (rank + rope_dim, hidden)
        kv_up_name, kv_up_shape = f"{prefix}.kv_b_proj.weight", (self.heads * up_dim, rank)
        return MlaTensors(
            q_down=WeightTensor(f"{prefix}.q_a_proj.weight", (q_rank, hidden), product, bias=self.bias),
            q_norm=vector(f"{prefix}.q_a_layernorm.weight", q_rank),
            q_up=WeightTensor(f"{prefix}.q_b_proj.weight", (self.heads * head_dim, q_rank), product, q_rows),
            kv_down=WeightTensor(kv_name, kv_shape, product, bias=self.bias),
            kv_norm=vector(f"{prefix}.kv_a_layernorm.weight", rank),
            # Never in fp8: the part of each head is multiplied separately, with queries and with attended rows.
            kv_up=WeightTensor(kv_up_name, kv_up_shape, "absorbed kv_b", kv_rows, storage="plain"),
            out=WeightTensor(f"{prefix}.o_proj.weight", out_shape, product, columns, bias=self.bias),
        )

    def is_unused(self, name: str, layer: int) -> bool:
        """Checkpoints may have the indexer of a layer that reuses another layer's selection."""
        return ".self_attn.indexer." in name and layer not in self.index.full_layers

    def row_flops(self, split: Split) -> int:
        return 2 * len(split.tp_shard(self.heads)) * (2 * self.kv_lora_rank + self.rope_dim)

    @property
    def score_flops(self) -> int:
        return 2 * self.index.heads * self.index.head_dim

    def step_values(self, split: Split, tokens: int, context: int) -> int:
        latent = self.kv_lora_rank + self.rope_dim
        per_head = self.nope_dim + self.rope_dim + 2 * latent + self.v_dim
        selected = 4 * 2 * self.index.topk  # positions and rows, as int64
        indexer = 2 * self.index.heads * self.index.head_dim
        return tokens * (len(split.tp_shard(self.heads)) * per_head + selected + indexer) + INDEX_WORKSPACE_VALUES


def read_full_layers(fields: ConfigFields, layers: int) -> tuple[int, ...]:
    """Returns the layers that run their own indexer: from a list, a pattern, or a frequency and an offset."""
    name = "indexer_types" if "indexer_types" in fields else "index_topk_pattern"
    pattern = fields.get(name)
    if isinstance(pattern, str) and name == "index_topk_pattern":
        if len(pattern) < layers or not set(pattern) <= {"F", "S"}:
            fields.refuse(name, f"a letter F (full) or S (shared) for each of {layers} layers")
        types = ["full" if letter == "F" else "shared" for letter in pattern[:layers]]
    elif pattern is not None:
        types = fields.layer_choices(name, layers, ("full", "shared")) or []
    else:
        name = "index_skip_topk_offset"
        every = max(fields.count("index_topk_freq", 1, low=0), 1)
        offset = fields.count(name, 2, low=-(1 << 31))
        types = ["full" if max(layer - offset + 1, 0) % every == 0 else "shared" for layer in range(layers)]
    if types[0] != "full":
        fields.refuse(name, "a first layer that runs its own indexer (full)")
    return tuple(layer for layer, kind in enumerate(types) if kind == "full")
