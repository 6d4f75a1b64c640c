"""The matrix products that a prompt takes on one worker."""

from dataclasses import dataclass
from typing import Literal

from hotset.models.spec import GqaSpec, MlaSpec, ModelSpec, MoeSpec
from hotset.models.split import Split

ProductType = Literal["fp8", "bf16", "fp32"]
ROUTED = "routed experts"


@dataclass(frozen=True, slots=True)
class Product:
    """The matrix products of one kind in a prefill, on one rank."""

    name: str
    kind: ProductType
    flops: float


def prefill_products(spec: ModelSpec, split: Split, first: int, last: int) -> list[Product]:
    """Returns the products that compute tokens [first, last) of a prompt on one rank.

    With data parallelism every rank computes a prompt of its own, and its experts receive the tokens of all ranks. The
    router is counted for the rank's own tokens, because each token must be routed once, wherever that happens.
    """
    tokens, layers = last - first, split.layer_range(spec.layers)
    dense: ProductType = "fp8" if spec.fp8_weights else "bf16"
    if isinstance(spec.attention, GqaSpec):
        products = _gqa(spec, spec.attention, split, first, last, dense)
    else:
        products = _mla(spec, spec.attention, split, first, last, dense)
    products.append(Product("LM head", "bf16", 2.0 * spec.hidden * split.vocabulary_shard_size(spec.vocab)))
    moe_layers = len(set(layers) & set(spec.moe.layers)) if spec.moe else 0
    mlp = (len(layers) - moe_layers) * len(split.tp_shard(spec.mlp_width))
    products.append(Product("dense MLP", dense, 6.0 * tokens * spec.hidden * mlp))
    return products + (_moe(spec.hidden, split, spec.moe, tokens, moe_layers, dense) if spec.moe else [])


def _gqa(spec: ModelSpec, attention: GqaSpec, split: Split, first: int, last: int, dense: ProductType) -> list[Product]:
    layers = len(split.layer_range(spec.layers))
    heads, kv_heads = len(split.tp_shard(attention.heads)), len(split.kv_heads(attention.kv_heads))
    projections = layers * spec.hidden * attention.head_dim * 2 * (heads + kv_heads)
    return [
        Product("attention projections", dense, 2.0 * (last - first) * projections),
        Product("attention", "bf16", 4.0 * layers * _pairs(first, last) * heads * attention.head_dim),
    ]


def _mla(spec: ModelSpec, mla: MlaSpec, split: Split, first: int, last: int, dense: ProductType) -> list[Product]:
    index, hidden, tokens = mla.index, spec.hidden, last - first
    stage = split.layer_range(spec.layers)
    layers, indexers = len(stage), len(set(stage) & set(index.full_layers))
    heads = len(split.tp_shard(mla.heads))
    down = hidden * (mla.q_lora_rank + mla.kv_lora_rank + mla.rope_dim)
    up = mla.q_lora_rank * heads * (mla.nope_dim + mla.rope_dim)
    projections = layers * (down + up + heads * mla.v_dim * hidden)
    indexer_weights = indexers * index.head_dim * (index.heads * mla.q_lora_rank + hidden)
    absorbed = layers * heads * mla.kv_lora_rank * (mla.nope_dim + mla.v_dim)
    below = min(last, max(first, index.topk))  # tokens before this position select all rows
    rows = _pairs(first, below) + (last - below) * index.topk
    attention = layers * rows * heads * (2 * mla.kv_lora_rank + mla.rope_dim)
    scores = indexers * _pairs(first, last) * index.heads * index.head_dim
    return [
        Product("attention projections", dense, 2.0 * tokens * projections),
        Product("indexer projections", dense, 2.0 * tokens * indexer_weights),
        Product("absorbed kv_b", "bf16", 2.0 * tokens * absorbed),
        Product("sparse attention", "bf16", 2.0 * attention),
        Product("index scores", "bf16", 2.0 * scores),
        Product("head weights", "fp32", 2.0 * tokens * indexers * index.heads * hidden),
    ]


def _moe(hidden: int, split: Split, moe: MoeSpec, tokens: int, layers: int, dense: ProductType) -> list[Product]:
    shared = len(split.tp_shard(moe.width * moe.shared))
    pairs = tokens * split.dp_size * moe.experts_per_token * len(split.experts(moe.experts)) / moe.experts
    return [
        Product("shared experts", dense, 6.0 * tokens * hidden * layers * shared),
        Product(ROUTED, dense, 6.0 * pairs * hidden * layers * moe.width),
        Product("router", "fp32", 2.0 * tokens * hidden * layers * moe.experts),
    ]


def _pairs(first: int, last: int) -> int:
    """Returns how many pairs of a token in [first, last) and itself or an earlier token there are."""
    return (last * (last + 1) - first * (first + 1)) // 2
