"""The matrix products that a prompt takes on one worker."""

from dataclasses import dataclass
from typing import NamedTuple

from hotset.models.formats.weight_format import ProductType
from hotset.models.spec import GqaSpec, MlaSpec, ModelSpec, MoeSpec
from hotset.models.split import Split

ROUTED = "routed experts"


@dataclass(frozen=True, slots=True)
class Product:
    """The matrix products of one kind in a prefill, on one rank."""

    name: str
    kind: ProductType
    flops: float


@dataclass(frozen=True, slots=True)
class ProductRate:
    """How many operations the products of one kind take on one rank."""

    name: str
    kind: ProductType
    each: float = 0.0  # for each chunk of a prompt
    token: float = 0.0  # for each token
    pair: float = 0.0  # for each pair of a token and itself or an earlier one
    selected: float = 0.0  # for each pair of a token and a row that it selects

    def flops(self, work: "PromptWork") -> float:
        of_pairs = self.pair * work.pairs + self.selected * work.selected
        return self.each + self.token * work.tokens + of_pairs


class PromptWork(NamedTuple):
    """What the rates of products are multiplied with."""

    tokens: int
    pairs: int
    selected: int


def prompt_work(spec: ModelSpec, first: int, last: int) -> PromptWork:
    """Returns the work of computing tokens [first, last) of a prompt."""
    pairs = _pairs(first, last)
    if isinstance(spec.attention, GqaSpec):
        return PromptWork(last - first, pairs, pairs)
    topk = spec.attention.index.topk
    below = min(last, max(first, topk))  # tokens before this position select all rows
    return PromptWork(last - first, pairs, _pairs(first, below) + (last - below) * topk)


def prefill_products(spec: ModelSpec, split: Split, first: int, last: int) -> list[Product]:
    """Returns the products that compute tokens [first, last) of a prompt on one rank."""
    work = prompt_work(spec, first, last)
    return [Product(rate.name, rate.kind, rate.flops(work)) for rate in product_rates(spec, split)]


def product_rates(spec: ModelSpec, split: Split) -> list[ProductRate]:
    """Returns the rates of all products of a prompt on one rank.

    With data parallelism every rank computes a prompt of its own, and its experts receive the tokens of all ranks. The
    router is counted for the rank's own tokens, because each token must be routed once, wherever that happens.
    """
    layers = split.layer_range(spec.layers)
    dense = spec.weight_formats.of("model.layers.0.self_attn.o_proj.weight").product_type
    if isinstance(spec.attention, GqaSpec):
        rates = _gqa(spec, spec.attention, split, dense)
    else:
        rates = _mla(spec, spec.attention, split, dense)
    rates.append(ProductRate("LM head", "bf16", each=2.0 * spec.hidden * split.vocabulary_shard_size(spec.vocab)))
    moe_layers = len(set(layers) & set(spec.moe.layers)) if spec.moe else 0
    mlp = (len(layers) - moe_layers) * len(split.tp_shard(spec.mlp_width))
    rates.append(ProductRate("dense MLP", dense, token=6.0 * spec.hidden * mlp))
    return rates + (_moe(spec.hidden, split, spec.moe, moe_layers, dense) if spec.moe else [])


def _gqa(spec: ModelSpec, attention: GqaSpec, split: Split, dense: ProductType) -> list[ProductRate]:
    layers = len(split.layer_range(spec.layers))
    heads, kv_heads = len(split.tp_shard(attention.heads)), len(split.kv_heads(attention.kv_heads))
    projections = layers * spec.hidden * attention.head_dim * 2 * (heads + kv_heads)
    return [
        ProductRate("attention projections", dense, token=2.0 * projections),
        ProductRate("attention", "bf16", pair=4.0 * layers * heads * attention.head_dim),
    ]


def _mla(spec: ModelSpec, mla: MlaSpec, split: Split, dense: ProductType) -> list[ProductRate]:
    index, hidden = mla.index, spec.hidden
    stage = split.layer_range(spec.layers)
    layers, indexers = len(stage), len(set(stage) & set(index.full_layers))
    heads = len(split.tp_shard(mla.heads))
    down = hidden * (mla.q_lora_rank + mla.kv_lora_rank + mla.rope_dim)
    up = mla.q_lora_rank * heads * (mla.nope_dim + mla.rope_dim)
    projections = layers * (down + up + heads * mla.v_dim * hidden)
    indexer_weights = indexers * index.head_dim * (index.heads * mla.q_lora_rank + hidden)
    absorbed = layers * heads * mla.kv_lora_rank * (mla.nope_dim + mla.v_dim)
    return [
        ProductRate("attention projections", dense, token=2.0 * projections),
        ProductRate("indexer projections", dense, token=2.0 * indexer_weights),
        ProductRate("absorbed kv_b", "bf16", token=2.0 * absorbed),
        ProductRate("sparse attention", "bf16", selected=2.0 * layers * heads * (2 * mla.kv_lora_rank + mla.rope_dim)),
        ProductRate("index scores", "bf16", pair=2.0 * indexers * index.heads * index.head_dim),
        ProductRate("head weights", "fp32", token=2.0 * indexers * index.heads * hidden),
    ]


def _moe(hidden: int, split: Split, moe: MoeSpec, layers: int, dense: ProductType) -> list[ProductRate]:
    shared = len(split.tp_shard(moe.width * moe.shared))
    pairs = split.dp_size * moe.experts_per_token * len(split.experts(moe.experts)) / moe.experts
    return [
        ProductRate("shared experts", dense, token=6.0 * hidden * layers * shared),
        ProductRate(ROUTED, dense, token=6.0 * pairs * hidden * layers * moe.width),
        ProductRate("router", "fp32", token=2.0 * hidden * layers * moe.experts),
    ]


def _pairs(first: int, last: int) -> int:
    """Returns how many pairs of a token in [first, last) and itself or an earlier token there are."""
    return (last * (last + 1) - first * (first + 1)) // 2
