"""The splits that a model allows: sizes of tensor and data parallelism, and pipeline stages."""

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf

from hotset.base.errors import ConfigError
from hotset.models.model_tensors import layer_tensors, matrix_values, mtp_tensors
from hotset.models.spec import ModelSpec


def check_tensor_parallel(spec: ModelSpec, size: int) -> None:
    """Raises `ConfigError` if `size` tensor parallel ranks cannot divide the model evenly.

    The message lists the counts that `size` does not divide, and the nearest sizes that work.
    """
    _check_size(spec, size, "--tensor-parallel-size", _indivisible_by_tensor_parallel)


def check_data_parallel(spec: ModelSpec, size: int) -> None:
    """Raises `ConfigError`, with the nearest sizes that work, if `size` ranks cannot divide the experts evenly."""
    _check_size(spec, size, "--data-parallel-size", _indivisible_experts)


def _check_size(spec: ModelSpec, size: int, flag: str, indivisible: Callable[[ModelSpec, int], list[str]]) -> None:
    counts = indivisible(spec, size)
    if counts:
        largest = max(spec.attention.heads, spec.moe.experts if spec.moe else 1)
        working = [candidate for candidate in range(1, largest + 1) if not indivisible(spec, candidate)]
        below = [candidate for candidate in working if candidate < size][-1:]
        above = [candidate for candidate in working if candidate > size][:1]
        nearest = " or ".join(str(candidate) for candidate in below + above)
        expanded = " (or --weight-dtype bfloat16)" if any(" blocks of " in count for count in counts) else ""
        raise ConfigError(
            f"{flag} {size} does not divide {' and '.join(counts)} evenly; nearest that works: {nearest}{expanded}"
        )


def _indivisible_experts(spec: ModelSpec, size: int) -> list[str]:
    """Returns the number of experts if `size` does not divide it."""
    experts = spec.moe.experts if spec.moe else 0
    return [f"{experts} experts"] if experts % size else []


def _indivisible_by_tensor_parallel(spec: ModelSpec, size: int) -> list[str]:
    """Returns the counts of experts, heads and columns that `size` does not divide.

    The number of KV heads is also accepted if it divides `size`. The columns are inputs of a weight, whose
    format may have blocks that must not be divided.
    """
    moe, attention = spec.moe, spec.attention
    dense_width = 0 if moe and len(moe.layers) == spec.layers else spec.mlp_width
    columns = [
        ("columns of a dense MLP", dense_width, "mlp.down_proj"),
        ("columns of the shared experts", moe.shared_width if moe else 0, "mlp.shared_experts.down_proj"),
    ]
    indivisible = [f"{attention.heads} attention heads"] if attention.heads % size else []
    indivisible += [f"{count} {what}" for what, count, _ in columns if count % size]
    if size > 1 and not indivisible:
        columns.append(("columns of the attention's output", attention.output_columns, "self_attn.o_proj"))
        for what, count, name in columns:
            format = spec.weight_formats.of(f"model.layers.0.{name}.weight")
            if count % (size * format.input_block):
                indivisible.append(f"{count} {what} in {format.blocks}")
    kv_heads = attention.divided_kv_heads
    if kv_heads % size and size % kv_heads:
        indivisible.append(f"{kv_heads} KV heads")
    return _indivisible_experts(spec, size) + indivisible


def stage_layers(spec: ModelSpec, stages: int, layer_counts: Sequence[int] | None = None) -> list[range]:
    """Divides the layers among pipeline stages and returns the layers of each stage.

    Stage i has `layer_counts[i]` layers. If `layer_counts` is None, the stages are balanced by their number of weights.
    Layers that share one indexer are in one stage. Raises `ConfigError`, with the numbers, if that is impossible.
    """
    starts = spec.attention.stage_starts(spec.layers)
    if not 1 <= stages <= len(starts):
        groups = "" if len(starts) == spec.layers else f" in {len(starts)} groups that share an indexer"
        raise ConfigError(
            f"--pipeline-parallel-size {stages}: the model has {spec.layers} layers{groups}; "
            f"from 1 to {len(starts)} stages work"
        )
    if layer_counts is None:
        return _ranges(_balanced(spec, starts, stages))
    return _ranges(_explicit(spec, starts, stages, layer_counts))


def _ranges(bounds: Sequence[int]) -> list[range]:
    return [range(first, last) for first, last in pairwise(bounds)]


def _balanced(spec: ModelSpec, starts: Sequence[int], stages: int) -> list[int]:
    """Returns the bounds with the fewest weights in the heaviest stage and, among these, the least sum of squares."""
    layer_weights = (matrix_values(layer_tensors(spec, layer)) for layer in range(spec.layers))
    weights_before = [0, *accumulate(layer_weights)]  # the weights of all layers before each layer
    vocabulary_weights = spec.vocab * spec.hidden  # of the embedding, and of the LM head
    mtp_layer = () if spec.mtp is None else (*layer_tensors(spec.with_mtp_layer, spec.layers), *mtp_tensors(spec))
    mtp_weights = matrix_values(mtp_layer)

    def weights_of(stage: int, first: int, last: int) -> int:
        vocabulary_matrices = (stage == 0) + (stage == stages - 1)
        of_mtp = mtp_weights if stage == stages - 1 else 0
        return weights_before[last] - weights_before[first] + vocabulary_matrices * vocabulary_weights + of_mtp

    bounds = (*starts, spec.layers)
    lightest = _cheapest(bounds, stages, weights_of, max)
    limit = max(weights_of(stage, *layers) for stage, layers in enumerate(pairwise(lightest)))

    def squared(stage: int, first: int, last: int) -> float:
        weights = weights_of(stage, first, last)
        return weights**2 if weights <= limit else inf

    return _cheapest(bounds, stages, squared, operator.add)


def _explicit(spec: ModelSpec, starts: Sequence[int], stages: int, layer_counts: Sequence[int]) -> list[int]:
    """Returns the bounds that `layer_counts` requests. Raises `ConfigError` if they are not possible."""
    flag = f"--pipeline-layers {','.join(str(count) for count in layer_counts)}"
    if len(layer_counts) != stages:
        raise ConfigError(f"{flag} has {len(layer_counts)} stages, but --pipeline-parallel-size is {stages}")
    if min(layer_counts) < 1 or sum(layer_counts) != spec.layers:
        raise ConfigError(
            f"{flag} has {sum(layer_counts)} layers and the model has {spec.layers}: "
            "these must be equal, and each stage needs at least one layer"
        )
    bounds = [0, *accumulate(layer_counts)]

    def distance(stage: int, first: int, last: int) -> float:
        return abs(last - bounds[stage + 1])

    nearest = _cheapest((*starts, spec.layers), stages, distance, operator.add)
    if nearest != bounds:
        counts = ",".join(str(last - first) for first, last in pairwise(nearest))
        raise ConfigError(f"{flag} would separate layers that share an indexer; nearest that works: {counts}")
    return bounds


def _cheapest(
    bounds: Sequence[int],  # the layers at which a stage can begin, then the number of layers
    stages: int,
    cost: Callable[[int, int, int], float],  # cost(stage, first, last) of layers [first, last) as that stage
    combine: Callable[[float, float], float],  # addition or maximum
) -> list[int]:
    """Returns the bounds of the cheapest division into stages, by dynamic programming over the ends of stages."""
    best: dict[int, tuple[float, list[int]]] = {0: (0, [0])}  # end of a partial division -> its cost and bounds
    for stage in range(stages):
        extended: dict[int, tuple[float, list[int]]] = {}
        for first, (cost_so_far, bounds_so_far) in best.items():
            for last in bounds:
                if last > first:
                    total = combine(cost_so_far, cost(stage, first, last))
                    if last not in extended or total < extended[last][0]:
                        extended[last] = (total, [*bounds_so_far, last])
        best = extended
    return best[bounds[-1]][1]
