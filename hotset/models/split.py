"""Which part of a model a worker holds, and which ways of splitting a model work."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from hotset.base.errors import ConfigError
from hotset.base.units import ceil_div
from hotset.models.spec import GqaSpec, MlaSpec, ModelSpec

By = Literal["heads", "requests"]

FLAGS: dict[By, str] = {"heads": "--tensor-parallel-size", "requests": "--data-parallel-size"}


@dataclass(frozen=True, slots=True)
class Split:
    """One worker's part: of every layer what falls to `rank` of `ranks`, and only some layers.

    By heads (tensor parallel): attention heads, the width of MLPs, experts and vocabulary are divided, and every rank
    computes every row. By requests (data parallel): experts alone are divided; each rank computes rows of its own.
    """

    rank: int = 0
    ranks: int = 1
    by: By = "heads"
    layers: range | None = None  # of a pipeline stage, numbered as in the whole model; None: all

    def share(self, count: int) -> range:
        """Which of `count` heads or columns are here."""
        return self.experts(count) if self.by == "heads" else range(count)

    def kv_heads(self, count: int) -> range:
        """Which of `count` KV heads are here. With more ranks than heads, neighbouring ranks hold the same one."""
        if self.by == "requests" or self.ranks <= count:
            return self.share(count)
        head = self.rank // (self.ranks // count)
        return range(head, head + 1)

    def experts(self, count: int) -> range:
        """Which of `count` experts are here, however the rest is divided."""
        each = count // self.ranks
        return range(self.rank * each, (self.rank + 1) * each)

    def vocabulary_rows(self, vocab: int) -> int:
        """Rows of embedding and head that every rank has, the last ones padded."""
        return ceil_div(vocab, self.ranks) if self.by == "heads" else vocab

    def vocabulary(self, vocab: int) -> range:
        """Which tokens are here: up to `vocabulary_rows` of them."""
        each = self.vocabulary_rows(vocab)
        first = self.rank * each if self.by == "heads" else 0
        return range(min(first, vocab), min(first + each, vocab))

    def stage(self, layers: int) -> range:
        """Which of the whole model's layers are here."""
        return range(layers) if self.layers is None else self.layers


WHOLE = Split()


def check_split(spec: ModelSpec, ranks: int, by: By) -> None:
    """Raises `ConfigError` with the numbers, and the nearest degrees that work, if so many cannot share the model."""
    undivided = _undivided(spec, ranks, by)
    if undivided:
        most = max(spec.attention.heads, spec.moe.experts if spec.moe else 1)
        working = [degree for degree in range(1, most + 1) if not _undivided(spec, degree, by)]
        below = [degree for degree in working if degree < ranks][-1:]
        above = [degree for degree in working if degree > ranks][:1]
        nearest = " or ".join(str(degree) for degree in below + above)
        listed = " and ".join(undivided)
        raise ConfigError(f"{FLAGS[by]} {ranks} does not divide {listed} evenly; nearest that works: {nearest}")


def _undivided(spec: ModelSpec, ranks: int, by: By) -> list[str]:
    """What cannot be divided among `ranks`, in words."""
    moe = spec.moe
    counts = {"experts": moe.experts if moe else 0}
    if by == "heads":
        counts["attention heads"] = spec.attention.heads
        counts["columns of a dense MLP"] = 0 if moe and len(moe.layers) == spec.layers else spec.mlp_width
        counts["columns of the shared experts"] = moe.width * moe.shared if moe else 0
    found = [f"{count} {what}" for what, count in counts.items() if count % ranks]
    if by == "heads" and isinstance(spec.attention, GqaSpec):
        kv_heads = spec.attention.kv_heads
        if kv_heads % ranks and ranks % kv_heads:
            found.append(f"{kv_heads} KV heads")
    return found


def stage_layers(spec: ModelSpec, stages: int, wanted: Sequence[int] | None = None) -> list[range]:
    """The layers of each pipeline stage: of about equal weight, or `wanted` many of them.

    Layers that share one indexer stay in one stage. Raises `ConfigError` with the numbers if that cannot be.
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
    return _ranges(_as_wanted(spec, starts, stages, wanted))


def _group_starts(spec: ModelSpec) -> tuple[int, ...]:
    """Layers at which a stage may begin."""
    return spec.attention.index.full_layers if isinstance(spec.attention, MlaSpec) else tuple(range(spec.layers))


def _ranges(bounds: Sequence[int]) -> list[range]:
    return [range(first, last) for first, last in pairwise(bounds)]


def _balanced(spec: ModelSpec, starts: Sequence[int], stages: int) -> list[int]:
    """Bounds of stages whose heaviest is as light as can be; of such, the most even."""
    before = [0, *accumulate(layer_weights(spec))]
    vocabulary = spec.vocab * spec.hidden

    def cost(stage: int, first: int, last: int) -> tuple[int, int]:
        ends = (stage == 0) + (stage == stages - 1)
        weights = before[last] - before[first] + ends * vocabulary
        return weights, weights**2

    return _cheapest((*starts, spec.layers), stages, cost, lambda a, b: (max(a[0], b[0]), a[1] + b[1]))


def _as_wanted(spec: ModelSpec, starts: Sequence[int], stages: int, wanted: Sequence[int]) -> list[int]:
    asked = f"--pipeline-layers {','.join(str(count) for count in wanted)}"
    if len(wanted) != stages:
        raise ConfigError(f"{asked} names {len(wanted)} stages, --pipeline-parallel-size {stages}")
    if min(wanted) < 1 or sum(wanted) != spec.layers:
        raise ConfigError(f"{asked} has {sum(wanted)} layers, the model {spec.layers}; each stage needs at least one")
    bounds = [0, *accumulate(wanted)]

    def cost(stage: int, first: int, last: int) -> tuple[int, int]:
        return abs(last - bounds[stage + 1]), 0

    nearest = _cheapest((*starts, spec.layers), stages, cost, lambda a, b: (a[0] + b[0], 0))
    if nearest != bounds:
        counts = ",".join(str(last - first) for first, last in pairwise(nearest))
        raise ConfigError(f"{asked} would part layers that share an indexer; nearest that works: {counts}")
    return bounds


Cost = tuple[int, int]


def _cheapest(
    bounds: Sequence[int],  # layers at which a stage may begin, and the end
    stages: int,
    cost: Callable[[int, int, int], Cost],  # of layers [first, last) as stage number `stage`
    together: Callable[[Cost, Cost], Cost],
) -> list[int]:
    """The bounds of the cheapest cut into so many stages, by the cheapest cuts of what comes before a stage."""
    best: dict[int, tuple[Cost, list[int]]] = {0: ((0, 0), [0])}  # by the layer at which the stages so far end
    for stage in range(stages):
        longer: dict[int, tuple[Cost, list[int]]] = {}
        for first, (so_far, cut) in best.items():
            for last in bounds:
                if last > first:
                    found = together(so_far, cost(stage, first, last))
                    if last not in longer or found < longer[last][0]:
                        longer[last] = (found, [*cut, last])
        best = longer
    return best[bounds[-1]][1]


def layer_weights(spec: ModelSpec) -> list[int]:
    """How many weights each layer has in its products: what makes its bytes."""
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
