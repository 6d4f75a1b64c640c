"""The matrix products that a prompt takes on one worker."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from hotset.models.attention.spec import AttentionSpec
from hotset.models.formats.weight_format import ProductType
from hotset.models.model_tensors import CACHED_WORKERS, layer_tensors
from hotset.models.spec import ModelSpec
from hotset.models.split import Split
from hotset.models.tensors import WeightTensor


@dataclass(frozen=True, slots=True)
class ProductRate:
    """How many operations the products of one kind take on one rank."""

    name: str
    kind: ProductType
    each: float = 0.0  # for each chunk of a prompt
    token: float = 0.0  # for each token
    pair: float = 0.0  # for each pair of tokens, the second of which is the first or an earlier one
    selected: float = 0.0  # for each pair of a token and a row that it selects

    def flops(self, work: "PromptWork") -> float:
        of_pairs = self.pair * work.pairs + self.selected * work.selected
        return self.each + self.token * work.tokens + of_pairs


class PromptWork(NamedTuple):
    """The counts by which the rates of products are multiplied."""

    tokens: int
    pairs: int
    selected: int


def prompt_work(spec: ModelSpec, first: int, last: int) -> PromptWork:
    """Returns the work of computing tokens [first, last) of a prompt."""
    pairs = _pairs(first, last)
    topk = spec.attention.topk
    if topk is None:
        return PromptWork(last - first, pairs, pairs)
    below = min(last, max(first, topk))  # tokens before this position select all rows
    return PromptWork(last - first, pairs, _pairs(first, below) + (last - below) * topk)


@lru_cache(CACHED_WORKERS)
def product_rates(spec: ModelSpec, split: Split) -> tuple[ProductRate, ...]:
    """Returns the rates of all products of a prompt on one rank.

    With data parallelism, every rank computes a prompt of its own, and its experts receive the tokens of all ranks.
    The router is counted for the rank's own tokens, because each token is routed only once.
    """
    layers = split.layer_range(spec.layers)
    per_token: dict[tuple[str, ProductType], float] = {}
    for layer in layers:
        for tensor in layer_tensors(spec, layer, split):
            if tensor.product is not None:
                key = tensor.product, _product_type(spec, tensor)
                per_token[key] = per_token.get(key, 0.0) + 2.0 * tensor.values * tensor.tokens
    rates = [ProductRate(name, kind, token=flops) for (name, kind), flops in per_token.items()]
    return (*rates, *_attention_rates(spec.attention, split, layers), _lm_head(spec, split))


def _product_type(spec: ModelSpec, tensor: WeightTensor) -> ProductType:
    if tensor.storage == "matrix":
        return spec.weight_formats.of(tensor.name).product_type
    return "fp32" if tensor.storage == "fp32" else "bf16"


def _attention_rates(attention: AttentionSpec, split: Split, layers: range) -> list[ProductRate]:
    """Returns the rates of attention and of index scores."""
    name = "attention" if attention.topk is None else "sparse attention"
    rates = [ProductRate(name, "bf16", selected=1.0 * len(layers) * attention.row_flops(split))]
    if indexers := len(attention.local_index_layers(layers)):
        rates.append(ProductRate("index scores", "bf16", pair=1.0 * indexers * attention.score_flops))
    return rates


def _lm_head(spec: ModelSpec, split: Split) -> ProductRate:
    return ProductRate("LM head", "bf16", each=2.0 * spec.hidden * split.vocabulary_shard_size(spec.vocab))


def _pairs(first: int, last: int) -> int:
    """Returns the number of pairs of a token in [first, last) and the same or an earlier token."""
    return (last * (last + 1) - first * (first + 1)) // 2
