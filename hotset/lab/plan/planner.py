"""Makes the plan that `hotset plan` prints: every split of a model over a machine's GPUs, and what each delivers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import torch

from hotset.base.config import EngineConfig, TiersMode
from hotset.base.errors import ConfigError
from hotset.base.settings import flag_name
from hotset.base.units import ceil_div
from hotset.engine.sizing import plans_in_flight
from hotset.lab.plan.capacity import Capacity, plan_capacity, whole_token_bytes, with_host_store
from hotset.lab.plan.costs import RankCosts
from hotset.lab.plan.gpus import Machine
from hotset.lab.plan.pipeline import pipeline_seconds, seconds_between_tokens
from hotset.models.checkpoint.files import ModelFiles
from hotset.models.spec import DTYPE_BYTES, dtype_name

Goal = Literal["throughput", "latency", "requests"]
GOALS: tuple[Goal, ...] = ("throughput", "latency", "requests")
DEFAULT_CONTEXTS = (8192, 32768, 131072)


@dataclass(frozen=True, slots=True)
class Decode:
    """Predicted decode steps at one context length, with as many requests as fit."""

    context: int
    requests: int  # of all data parallel ranks
    tiered: int  # of these
    # None on a CPU, and if nothing fits:
    step_ms: float | None = None  # time between two tokens of a request
    tokens_per_s: float | None = None
    missed_rows: float | None = None  # in one step, on each GPU
    swap_bytes: float | None = None  # the same
    bus_share: float | None = None  # share of the bus's bandwidth that swap-ins use
    prompt_s: float | None = None  # time of one prompt of this length, while no other request runs
    prompt_tokens_per_s: float | None = None  # computed while many such prompts, and nothing else, run


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The prediction for one split of the model."""

    name: str
    config: EngineConfig
    reason: str | None  # why it does not fit; None if it does
    weight_bytes: int = 0  # per GPU
    kv_bytes: int = 0  # per GPU
    host_kv_bytes: int = 0  # of all GPUs
    tiers_off: tuple[Decode, ...] = ()  # one per context length
    tiers_on: tuple[Decode, ...] = ()

    def best(self, index: int) -> Decode:
        """Returns the faster of tiers off and tiers on, for the context length at `index`."""
        return max(self.tiers_off[index], self.tiers_on[index], key=lambda d: (d.tokens_per_s or 0.0, d.requests))


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one model on one machine."""

    model: str
    machine: Machine
    contexts: tuple[int, ...]
    goal: Goal
    token_bytes: int  # of one token's rows and index keys, over all layers
    sparse: bool  # whether an indexer selects rows
    splits: tuple[SplitPlan, ...]  # the best one first; those that do not fit last

    @property
    def best(self) -> SplitPlan | None:
        return self.splits[0] if self.splits[0].reason is None else None

    def flags(self) -> list[str]:
        """Returns the flags of `hotset serve` that differ from its defaults. Empty if nothing fits."""
        return serve_flags(self.best.config) if self.best else []

    def to_json(self) -> dict[str, Any]:
        plan = asdict(self)
        for split, values in zip(self.splits, plan["splits"], strict=True):
            values["config"] = {name: value for name, value in _changed(split.config).items() if name != "model"}
        return plan | {"flags": self.flags()}


def make_plan(
    model: str,
    files: ModelFiles,
    machine: Machine,
    config: EngineConfig,
    contexts: Sequence[int] = (),
    goal: Goal = "throughput",
) -> Plan:
    """Compares all splits over the machine's GPUs. If `config` has several workers, plans only its own split.

    Raises ConfigError if a context is longer than the model's.
    """
    spec = files.spec
    limit = config.max_model_len or spec.context
    contexts = tuple(sorted(contexts)) or tuple(c for c in DEFAULT_CONTEXTS if c <= limit) or (limit,)
    if contexts[-1] > limit or contexts[0] < 2:
        raise ConfigError(f"--contexts must lie between 2 and {limit}, the model's longest context")
    config = replace(config, max_model_len=config.max_model_len or contexts[-1])
    if machine.gpu is not None and spec.attention.has_fp8_rows:
        config = replace(config, kv_dtype="fp8", index_dtype="fp8")
    plans = [_split_plan(name, split, files, machine, contexts) for name, split in _splits(config, machine)]
    return Plan(
        model,
        machine,
        contexts,
        goal,
        token_bytes=whole_token_bytes(config, files, machine),
        sparse=spec.attention.topk is not None,
        splits=tuple(sorted(plans, key=lambda p: _sort_key(p, goal))),
    )


def _splits(config: EngineConfig, machine: Machine) -> list[tuple[str, EngineConfig]]:
    """Returns all splits with one worker per GPU, or only that of `config`."""
    count = machine.gpus
    if config.workers > 1 or count == 1 or machine.gpu is None:
        return [(config.split_name or "one GPU", config)]
    sizes = [size for size in range(count, 0, -1) if count % size == 0]
    ways = [replace(config, tensor_parallel_size=size, pipeline_parallel_size=count // size) for size in sizes]
    ways.append(replace(config, data_parallel_size=count))
    return [(way.split_name, way) for way in ways]


def _split_plan(
    name: str, config: EngineConfig, files: ModelFiles, machine: Machine, contexts: Sequence[int]
) -> SplitPlan:
    try:
        config = with_host_store(config, files, machine)
        on = plan_capacity(config, files, machine)
        off = plan_capacity(_without_tiers(config), files, machine)
    except ConfigError as error:
        return SplitPlan(name, config, str(error))
    return SplitPlan(
        name,
        config,
        None,
        on.weight_bytes,
        on.kv_bytes,
        on.host_kv_bytes,
        tuple(predict(off, files, machine, context) for context in contexts),
        tuple(predict(on, files, machine, context) for context in contexts),
    )


def _without_tiers(config: EngineConfig) -> EngineConfig:
    tiers: TiersMode = "off"
    return replace(config, tiers=tiers, host_kv_gib=None, host_kv_tokens=None, hot_slots=None)


def predict(capacity: Capacity, files: ModelFiles, machine: Machine, context: int) -> Decode:
    """Predicts decode steps with as many requests as fit."""
    config, count = capacity.config, capacity.requests(context)
    tiered, replicas = capacity.tiered(count, context), config.data_parallel_size
    if machine.gpu is None or count == 0:
        return Decode(context, count * replicas, tiered * replicas)
    costs, stages = rank_costs(capacity, files, machine), config.pipeline_parallel_size
    # Each stage computes one of at most `stages` batches at a time.
    batch, batch_tiered = ceil_div(count, stages), ceil_div(tiered, stages)
    steps = [rank.decode(batch, context, batch_tiered) for rank in costs]
    slowest = max(steps, key=lambda step: step.seconds)
    token_s = seconds_between_tokens([step.seconds for step in steps], ceil_div(count, batch))
    alone, together = (_prompt_steps(config, costs, context, share) for share in (1 / replicas, 1.0))
    return Decode(
        context,
        count * replicas,
        tiered * replicas,
        step_ms=token_s * 1e3,
        tokens_per_s=count * replicas / token_s,
        missed_rows=slowest.missed_rows,
        swap_bytes=slowest.swap_bytes,
        bus_share=slowest.bus_share,
        prompt_s=pipeline_seconds(alone, plans_in_flight(config, torch.device("cuda"))),
        prompt_tokens_per_s=replicas * context / max(map(sum, zip(*together, strict=True))),
    )


def _prompt_steps(
    config: EngineConfig, stages: Sequence[RankCosts], context: int, expert_share: float
) -> list[list[float]]:
    """Returns the time of each chunk of a prompt on each stage."""
    size = config.max_num_batched_tokens
    chunks = [(first, min(first + size, context)) for first in range(0, context, size)]
    return [[rank.prompt_step_seconds([chunk], expert_share) for rank in stages] for chunk in chunks]


def rank_costs(capacity: Capacity, files: ModelFiles, machine: Machine) -> list[RankCosts]:
    """Returns the costs of one worker of each pipeline stage."""
    assert machine.gpu is not None
    dtype_bytes = DTYPE_BYTES[dtype_name(capacity.config.dtype, files.spec, "cuda")]
    slots = capacity.budget.geometry.slots
    return [
        RankCosts(files.spec, split, plan.weights.kv_shape, machine.gpu, slots, dtype_bytes)
        for split, plan in zip(capacity.splits, capacity.plans, strict=True)
        if split.rank == 0
    ]


def _sort_key(plan: SplitPlan, goal: Goal) -> tuple[float, ...]:
    """Returns a key that sorts the best split for `goal` at the longest context first."""
    if plan.reason is not None:
        return (1.0,)
    best = plan.best(-1)
    if goal == "requests":
        return (0.0, -max(plan.tiers_on[-1].requests, plan.tiers_off[-1].requests), -(best.tokens_per_s or 0.0))
    if goal == "latency":
        return (0.0, best.step_ms or 0.0)
    return (0.0, -(best.tokens_per_s or 0.0), -best.requests)


def serve_flags(config: EngineConfig) -> list[str]:
    """Returns the flags of the settings that differ from their defaults."""
    flags = []
    for name, value in _changed(config).items():
        if name == "model":
            continue
        if isinstance(value, bool):
            flags.append(f"--{'' if value else 'no-'}{flag_name(name)}")
        else:
            flags += [f"--{flag_name(name)}", f"{value:g}" if isinstance(value, float) else str(value)]
    return flags


def _changed(config: EngineConfig) -> dict[str, Any]:
    values = {declared.name: (getattr(config, declared.name), declared.default) for declared in fields(EngineConfig)}
    return {name: value for name, (value, default) in values.items() if value != default}
