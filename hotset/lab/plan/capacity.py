"""Sizes the KV memory of a model on any machine, with the arithmetic that an engine uses when it starts."""

from dataclasses import dataclass, replace

import torch

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError
from hotset.base.memory_shares import MAX_HOST_STORE_SHARE, DeviceMemory
from hotset.base.units import GIB, show_bytes
from hotset.engine.loading import choose_dtype
from hotset.engine.model_checks import context_length, kv_storage, model_splits
from hotset.engine.sizing import KvBudget, shared_budget, store_writer
from hotset.engine.start_plan import WorkerPlan, estimated_steps, planned_memories, usable_bytes
from hotset.lab.plan.gpus import Machine
from hotset.models.checkpoint.files import ModelFiles
from hotset.models.checkpoint.weights import dummy_weights
from hotset.models.decoder import worker_kv_shape
from hotset.models.model_tensors import worker_weight_bytes
from hotset.models.split import Split
from hotset.models.weight_plan import WeightPlan, plan_weights


@dataclass(frozen=True, slots=True)
class Capacity:
    """The memory of one configuration on one machine."""

    config: EngineConfig
    splits: tuple[Split, ...]
    plans: tuple[WorkerPlan, ...]  # one per worker
    budget: KvBudget

    @property
    def weight_bytes(self) -> int:
        """Bytes of the largest worker's weights."""
        return max(plan.weights.device_bytes for plan in self.plans)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the largest worker's device pool."""
        layers = max(plan.weights.kv_shape.layers for plan in self.plans)
        return layers * self.budget.geometry.layer_page_bytes * self.budget.device_pages

    @property
    def host_kv_bytes(self) -> int:
        """Bytes of all host stores."""
        pages = self.budget.host_pages * self.config.page_rows
        return pages * sum(
            plan.weights.kv_shape.token_bytes
            for plan, split in zip(self.plans, self.splits, strict=True)
            if store_writer(split, plan.weights.kv_shape)[0] == 0
        )

    def requests(self, context: int) -> int:
        """Returns how many requests of `context` tokens run at the same time on one data parallel rank."""
        return min(self.config.max_num_seqs, self.budget.requests(context)) if context <= self.longest else 0

    @property
    def longest(self) -> int:
        return self.budget.max_model_len

    def tiered(self, requests: int, context: int) -> int:
        """Returns how many of `requests` requests must be tiered, so that all of them fit at once."""
        geometry, pages = self.budget.geometry, self.budget.device_pages
        resident_pages, tiered_pages = geometry.resident_pages(context), geometry.tiered_pages(context)
        missing = requests * resident_pages - pages
        if missing <= 0 or not self.budget.tiers or resident_pages <= tiered_pages:
            return 0
        return min(requests, -(-missing // (resident_pages - tiered_pages)))


def plan_capacity(config: EngineConfig, files: ModelFiles, machine: Machine) -> Capacity:
    """Returns the memory of this configuration on `machine`. Reads no weights.

    Raises ConfigError if the weights or one request do not fit, or if the model cannot be split in this way.
    """
    splits = tuple(model_splits(config, files.spec))
    if machine.gpu is not None and len(splits) != machine.gpus:
        raise ConfigError(f"{len(splits)} workers do not use {machine.gpus} GPUs; there is one worker per GPU")
    device = torch.device("cpu" if machine.gpu is None else "cuda")
    plans = tuple(_worker_plan(config, files, split, machine, device) for split in splits)
    needed = [plan.weights.device_bytes for plan in plans]
    short = (
        sum(needed) > plans[0].usable
        if machine.gpu is None
        else any(size > plan.usable for size, plan in zip(needed, plans, strict=True))
    )
    if short:
        size, memory = (sum(needed), plans[0].memory.total) if machine.gpu is None else (max(needed), plans[0].usable)
        raise ConfigError(f"the weights take {show_bytes(size)} per GPU, and only {show_bytes(memory)} are usable")
    owns_store = [store_writer(split, plan.weights.kv_shape)[0] == 0 for split, plan in zip(splits, plans, strict=True)]
    memories = planned_memories(plans, owns_store, device)
    budget = shared_budget(config, memories, files.spec.context, device, machine.host_bytes)
    return Capacity(config, splits, plans, budget)


def _worker_plan(
    config: EngineConfig, files: ModelFiles, split: Split, machine: Machine, device: torch.device
) -> WorkerPlan:
    spec = files.spec
    dtype, storage = choose_dtype(config.dtype, spec, device), kv_storage(config, spec)
    if machine.gpu is None:
        memory = DeviceMemory(machine.host_bytes, machine.host_bytes)
        source = dummy_weights(dtype, device, formats=spec.weight_formats)
        weights = plan_weights(spec, source, storage, split, pack_weights=config.pack_weights)
    else:
        memory = DeviceMemory(machine.gpu.memory_bytes, machine.gpu.memory_bytes)
        size = worker_weight_bytes(spec, split, dtype.itemsize)
        weights = WeightPlan(size, size, worker_kv_shape(spec, dtype, storage, split))
    steps = estimated_steps(config, spec, split, device, dtype)
    return WorkerPlan(weights, memory, usable_bytes(config, memory, device, steps), steps)


def with_host_store(config: EngineConfig, files: ModelFiles, machine: Machine) -> EngineConfig:
    """Returns the configuration with a host store for all requests, but of at most 80 % of the free host memory.

    A size that is already set stays. Without GPUs, the engine's default stays.
    """
    is_set = config.host_kv_gib is not None or config.host_kv_tokens is not None
    if config.tiers == "off" or machine.gpu is None or is_set:
        return config
    tokens = config.max_num_seqs * context_length(config, files.spec.context) * config.data_parallel_size
    needed = tokens * whole_token_bytes(config, files, machine)
    usable = int(MAX_HOST_STORE_SHARE * machine.host_bytes)
    return replace(config, host_kv_gib=max(1, min(needed, usable) // GIB))


def whole_token_bytes(config: EngineConfig, files: ModelFiles, machine: Machine) -> int:
    """Returns the bytes of one token's rows and index keys, over all layers and KV heads."""
    dtype = choose_dtype(config.dtype, files.spec, torch.device("cpu" if machine.gpu is None else "cuda"))
    return worker_kv_shape(files.spec, dtype, kv_storage(config, files.spec)).token_bytes
