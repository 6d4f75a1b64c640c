"""Which part of a model one worker holds, and which degrees of parallelism a model allows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hotset.base.errors import ConfigError
from hotset.base.units import ceil_div
from hotset.models.spec import GqaSpec, MlaSpec, ModelSpec

Cost = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Split:
    """The part of a model that one worker holds.

    Tensor parallel ranks divide attention heads, the width of MLPs, experts and the vocabulary; each of them computes
    every token. Data parallel ranks divide the experts alone; each of them computes its own tokens. A pipeline stage
    holds `layers` only, numbered as in the whole model (None: all of them).
    """

    tp_rank: int = 0
    tp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    layers: range | None = None

    def __post_init__(self) -> None:
        assert self.tp_size == 1 or self.dp_size == 1, f"{self}: tensor and data parallelism are not combined"

    @property
    def rank(self) -> int:
        """This worker's rank among those that share its layers."""
        return self.dp_rank * self.tp_size + self.tp_rank

    @property
    def size(self) -> int:
        """The number of ranks that share these layers."""
        return self.dp_size * self.tp_size

    @property
    def first_layer(self) -> int:
        return 0 if self.layers is None else self.layers.start

    def tp_shard(self, count: int) -> range:
        """Returns which of `count` heads or columns this rank holds."""
        return _shard(count, self.tp_rank, self.tp_size)

    def kv_heads(self, count: int) -> range:
        """Returns which of `count` KV heads this rank holds. With more ranks than heads, neighbours hold the same."""
        if self.tp_size <= count:
            return self.tp_shard(count)
        head = self.tp_rank // (self.tp_size // count)
        return range(head, head + 1)

    def experts(self, count: int) -> range:
        """Returns which of `count` experts this rank holds."""
        return _shard(count, self.rank, self.size)

    def vocabulary_shard_size(self, vocab: int) -> int:
        """Returns how many entries of embedding and head every rank holds; those past the last token are padding."""
        return ceil_div(vocab, self.tp_size)

    def vocabulary(self, vocab: int) -> range:
        """Returns which tokens this rank holds: up to `vocabulary_shard_size` of them."""
        size = self.vocabulary_shard_size(vocab)
        first = self.tp_rank * size
        return range(min(first, vocab), min(first + size, vocab))

    def stage(self, layers: int) -> range:
        """Returns which of the model's `layers` layers this worker holds."""
        return range(layers) if self.layers is None else self.layers


WHOLE_MODEL = Split()


def _shard(count: int, rank: int, size: int) -> range:
    shard = count // size
    return range(rank * shard, (rank + 1) * shard)


def check_tensor_parallel(spec: ModelSpec, size: int) -> None:
    """Raises `ConfigError`, with the numbers and the nearest sizes that work, if `size` ranks cannot share it."""
    _check_size(spec, size, "--tensor-parallel-size", _not_divided_by_heads)


def check_data_parallel(spec: ModelSpec, size: int) -> None:
    """Raises `ConfigError`, with the numbers and the nearest sizes that work, if `size` ranks cannot share experts."""
    _check_size(spec, size, "--data-parallel-size", _not_divided_by_experts)


def _check_size(spec: ModelSpec, size: int, flag: str, not_divided: Callable[[ModelSpec, int], list[str]]) -> None:
    obstacles = not_divided(spec, size)
    if obstacles:
        largest = max(spec.attention.heads, spec.moe.experts if spec.moe else 1)
        working = [candidate for candidate in range(1, largest + 1) if not not_divided(spec, candidate)]
        below = [candidate for candidate in working if candidate < size][-1:]
        above = [candidate for candidate in working if candidate > size][:1]
        nearest = " or ".join(str(candidate) for candidate in below + above)
        raise ConfigError(
            f"{flag} {size} does not divide {' and '.join(obstacles)} evenly; nearest that works: {nearest}"
        )


def _not_divided_by_experts(spec: ModelSpec, size: int) -> list[str]:
    experts = spec.moe.experts if spec.moe else 0
    return [f"{experts} experts"] if experts % size else []


def _not_divided_by_heads(spec: ModelSpec, size: int) -> list[str]:
    moe = spec.moe
    counts = {
        "attention heads": spec.attention.heads,
        "columns of a dense MLP": 0 if moe and len(moe.layers) == spec.layers else spec.mlp_width,
        "columns of the shared experts": moe.width * moe.shared if moe else 0,
    }
    obstacles = [f"{count} {what}" for what, count in counts.items() if count % size]
    if isinstance(spec.attention, GqaSpec):
        kv_heads = spec.attention.kv_heads
        if kv_heads % size and size % kv_heads:
            obstacles.append(f"{kv_heads} KV heads")
    return _not_divided_by_experts(spec, size) + obstacles


def stage_layers(spec: ModelSpec, stages: int, wanted: Sequence[int] | None = None) -> list[range]:
    """Returns the layers of each pipeline stage: balanced by weights, or with the numbers of layers in `wanted`.

    Layers that share one indexer stay in one stage. Raises `ConfigError`, with the numbers, if that is impossible.
    """
    starts = _group_starts(spec)
    if not 1 <= stages <= len(starts):
        groups = "" if len(starts) == spec.layers else f" in {len(starts)} groups, each of which shares an indexer"
        raise ConfigError(
            f"--pipeline-parallel-size {stages}: the model has {spec.layers} layers{groups}; "
            f"from 1 to {len(starts)} stages work"
        )
    if wanted is None:
        return _ranges(_balanced(spec, starts, stages))
    return _ranges(_explicit(spec, starts, stages, wanted))


def _group_starts(spec: ModelSpec) -> tuple[int, ...]:
    """Returns the layers at which a stage may begin."""
    return spec.attention.index.full_layers if isinstance(spec.attention, MlaSpec) else tuple(range(spec.layers))


def _ranges(bounds: Sequence[int]) -> list[range]:
    return [range(first, last) for first, last in pairwise(bounds)]


def _balanced(spec: ModelSpec, starts: Sequence[int], stages: int) -> list[int]:
    """Returns the bounds that minimise the weights of the heaviest stage, then the sum of squares over stages."""
    before = [0, *accumulate(layer_weights(spec))]
    vocabulary = spec.vocab * spec.hidden

    def cost(stage: int, first: int, last: int) -> Cost:
        ends = (stage == 0) + (stage == stages - 1)
        weights = before[last] - before[first] + ends * vocabulary
        return weights, weights**2

    return _cheapest((*starts, spec.layers), stages, cost, lambda a, b: (max(a[0], b[0]), a[1] + b[1]))


def _explicit(spec: ModelSpec, starts: Sequence[int], stages: int, wanted: Sequence[int]) -> list[int]:
    flag = f"--pipeline-layers {','.join(str(count) for count in wanted)}"
    if len(wanted) != stages:
        raise ConfigError(f"{flag} names {len(wanted)} stages, --pipeline-parallel-size {stages}")
    if min(wanted) < 1 or sum(wanted) != spec.layers:
        raise ConfigError(f"{flag} has {sum(wanted)} layers, the model {spec.layers}; each stage needs at least one")
    bounds = [0, *accumulate(wanted)]

    def cost(stage: int, first: int, last: int) -> Cost:
        return abs(last - bounds[stage + 1]), 0

    nearest = _cheapest((*starts, spec.layers), stages, cost, lambda a, b: (a[0] + b[0], 0))
    if nearest != bounds:
        counts = ",".join(str(last - first) for first, last in pairwise(nearest))
        raise ConfigError(f"{flag} would part layers that share an indexer; nearest that works: {counts}")
    return bounds


def _cheapest(
    bounds: Sequence[int],  # layers at which a stage may begin, and the end
    stages: int,
    cost: Callable[[int, int, int], Cost],  # of layers [first, last) as stage number `stage`
    combine: Callable[[Cost, Cost], Cost],
) -> list[int]:
    """Returns the bounds of the cheapest division into `stages` stages, by dynamic programming over their ends."""
    best: dict[int, tuple[Cost, list[int]]] = {0: ((0, 0), [0])}  # by the layer at which the stages so far end
    for stage in range(stages):
        extended: dict[int, tuple[Cost, list[int]]] = {}
        for first, (cost_so_far, cut) in best.items():
            for last in bounds:
                if last > first:
                    total = combine(cost_so_far, cost(stage, first, last))
                    if last not in extended or total < extended[last][0]:
                        extended[last] = (total, [*cut, last])
        best = extended
    return best[bounds[-1]][1]


def layer_weights(spec: ModelSpec) -> list[int]:
    """Returns how many weights the matrices of each layer have; its bytes are proportional to that."""
    return [_attention_weights(spec, layer) + _mlp_weights(spec, layer) for layer in range(spec.layers)]


def _attention_weights(spec: ModelSpec, layer: int) -> int:
    attention, hidden = spec.attention, spec.hidden
    if isinstance(attention, GqaSpec):
        return hidden * attention.head_dim * 2 * (attention.heads + attention.kv_heads)
    index, nope = attention.index, attention.nope_dim
    down = hidden * (attention.q_lora_rank + attention.kv_lora_rank + attention.rope_dim)
    queries = attention.q_lora_rank * attention.heads * (nope + attention.rope_dim)
    keys_values = attention.kv_lora_rank * attention.heads * (nope + attention.v_dim)
    out = attention.heads * attention.v_dim * hidden
    indexer = index.head_dim * (index.heads * attention.q_lora_rank + hidden) + index.heads * hidden
    return down + queries + keys_values + out + (indexer if layer in index.full_layers else 0)


def _mlp_weights(spec: ModelSpec, layer: int) -> int:
    moe = spec.moe
    if moe is None or layer not in moe.layers:
        return 3 * spec.hidden * spec.mlp_width
    return spec.hidden * (3 * moe.width * (moe.experts + moe.shared) + moe.experts)
