"""Full attention with grouped heads (GQA), as `llama` and `qwen3` have it. This module does not import torch."""

from dataclasses import dataclass
from typing import NamedTuple

from hotset.models.attention.spec import AttentionSpec
from hotset.models.config_fields import MAX_PARTS, ConfigFields
from hotset.models.split import Split
from hotset.models.tensors import WeightTensor, shard_slice, vector


class GqaTensors(NamedTuple):
    q: WeightTensor
    k: WeightTensor
    v: WeightTensor
    out: WeightTensor
    q_norm: WeightTensor | None
    k_norm: WeightTensor | None


@dataclass(frozen=True, slots=True)
class GqaSpec(AttentionSpec):
    """Full attention with grouped heads."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head of Q and K, before rope

    @staticmethod
    def read(fields: ConfigFields, *, head_dim: int | None, kv_heads: int | None, qk_norm: bool) -> "GqaSpec":
        """Reads config.json. `head_dim` and `kv_heads` are the defaults of absent fields. If they are None, the
        defaults are hidden_size / num_attention_heads and num_attention_heads."""
        heads = fields.count("num_attention_heads", high=MAX_PARTS)
        read_kv_heads = fields.count("num_key_value_heads", kv_heads or heads)
        if fields.is_null("num_key_value_heads"):
            read_kv_heads = heads
        if heads % read_kv_heads:
            fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
        hidden = fields.count("hidden_size")
        read_head_dim = fields.even_count("head_dim", head_dim or hidden // heads)
        if "head_dim" not in fields and head_dim is None and hidden % heads:
            fields.refuse("hidden_size", f"a multiple of num_attention_heads ({heads}), unless head_dim is set")
        bias = fields.flag("attention_bias", False)
        return GqaSpec(heads, read_kv_heads, read_head_dim, qkv_bias=bias, out_bias=bias, qk_norm=qk_norm)

    @property
    def divided_kv_heads(self) -> int:
        return self.kv_heads

    @property
    def output_columns(self) -> int:
        return self.heads * self.head_dim

    def tensors(self, hidden: int, layer: int, split: Split) -> GqaTensors:
        prefix, product = f"model.layers.{layer}.self_attn", "attention projections"
        heads, kv_heads = split.tp_shard(self.heads), split.kv_heads(self.kv_heads)

        def projection(name: str, count: int, local: range) -> WeightTensor:
            shape, rows = (count * self.head_dim, hidden), shard_slice(0, local, self.head_dim)
            return WeightTensor(f"{prefix}.{name}.weight", shape, product, rows, bias=self.qkv_bias)

        def norm(name: str) -> WeightTensor | None:
            return vector(f"{prefix}.{name}.weight", self.head_dim) if self.qk_norm else None

        out_shape, columns = (hidden, self.output_columns), shard_slice(1, heads, self.head_dim)
        return GqaTensors(
            q=projection("q_proj", self.heads, heads),
            k=projection("k_proj", self.kv_heads, kv_heads),
            v=projection("v_proj", self.kv_heads, kv_heads),
            out=WeightTensor(f"{prefix}.o_proj.weight", out_shape, product, columns, bias=self.out_bias),
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
        )

    def row_flops(self, split: Split) -> int:
        return 4 * len(split.tp_shard(self.heads)) * self.head_dim

    def step_values(self, split: Split, tokens: int, context: int) -> int:
        """A prompt's attention gathers the whole context and repeats it for the heads that share a KV head."""
        return (4 * tokens + 3 * context) * len(split.tp_shard(self.heads)) * self.head_dim
