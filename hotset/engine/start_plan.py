"""Plans the memory of an engine before any weights are read. Logs the plan, and refuses what does not fit."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError, KvDoesNotFit
from hotset.base.host_checks import Finding, HostNeeds, check_host
from hotset.base.memory_shares import DeviceMemory, usable_gpu_bytes
from hotset.base.rdma import rdma_devices
from hotset.base.units import show_bytes
from hotset.engine.model_checks import context_length, sizes_that_fit, weights_do_not_fit
from hotset.engine.sizing import KvBudget, WorkerMemory, shared_budget
from hotset.engine.step_memory import step_bytes
from hotset.models.checkpoint.files import ModelFiles
from hotset.models.spec import ModelSpec
from hotset.models.split import Split
from hotset.models.weight_plan import WeightPlan

LOGGER = logging.getLogger("hotset.engine")


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The weights that one worker will load, and the memory of its device before it loads them."""

    weights: WeightPlan
    memory: DeviceMemory
    usable: int  # bytes of the free memory that weights and KV may take
    steps: int  # bytes that are kept for steps, as estimated
    gpu: int = 0  # number of its GPU; meaningless on a CPU
    ranks_on_gpu: int = 1  # number of workers that divide the memory of this GPU
    node: str = ""  # name of the worker's node
    host_free: int | None = None  # free bytes of the node's host memory; None: that of this machine


def estimated_steps(
    config: EngineConfig, spec: ModelSpec, split: Split, device: torch.device, dtype: torch.dtype
) -> int:
    """Returns the memory that steps on a GPU are estimated to need. On a CPU, nothing is kept for them."""
    context = context_length(config, spec.context)
    return step_bytes(spec, split, config, context, dtype.itemsize) if device.type == "cuda" else 0


def usable_bytes(
    config: EngineConfig, memory: DeviceMemory, device: torch.device, steps: int, ranks_on_gpu: int = 1
) -> int:
    """Returns how many of the device's free bytes weights and KV of one worker may take.

    On a GPU, this is the share --gpu-memory-utilization, divided by the workers on it, less the memory for `steps`.
    """
    if device.type != "cuda":
        return memory.free
    usable = usable_gpu_bytes(memory.total, memory.free, config.gpu_memory_utilization)
    return max(0, usable // ranks_on_gpu - steps)


def check_start(
    config: EngineConfig,
    files: ModelFiles,
    plans: Sequence[WorkerPlan],
    owns_store: Sequence[bool],
    device: torch.device,
) -> KvBudget:
    """Logs what the weights will take and which KV memory will remain, and returns the sizes of the KV memory.

    Raises ConfigError, with the numbers and with what would fit, if the weights or one request do not fit.
    """
    _check_weights(config, files, plans, device)
    memories = planned_memories(plans, owns_store, device)
    try:
        budget = shared_budget(config, memories, files.spec.context, device)
    except KvDoesNotFit as error:
        raise KvDoesNotFit(f"{error}{_other_ways(config, files.spec, plans, device)}") from None
    _log(config, plans, memories, budget, device)
    report_findings(check_host(_host_needs(config, plans, memories, budget, device)))
    return budget


def report_findings(findings: Sequence[Finding]) -> None:
    """Logs what is slow as warnings, and hints to what could be better. Raises ConfigError if something is broken."""
    for finding in findings:
        if finding.level == "broken":
            raise ConfigError(f"{finding.what}; {finding.mend}")
        if finding.mend:
            level = logging.WARNING if finding.level == "slow" else logging.INFO
            LOGGER.log(level, "%s; to mend it: %s", finding.what, finding.mend)


def _host_needs(
    config: EngineConfig,
    plans: Sequence[WorkerPlan],
    memories: Sequence[WorkerMemory],
    budget: KvBudget,
    device: torch.device,
) -> HostNeeds:
    """Returns what the workers on this machine need. Those of other nodes of a Ray cluster are not counted."""
    here = [number for number, plan in enumerate(plans) if not plan.node]
    own_bytes = {number: _store_bytes(config, budget, memories[number]) for number in here}
    on_gpu = device.type == "cuda"
    return HostNeeds(
        store_bytes=sum(nbytes for number, nbytes in own_bytes.items() if memories[number].owns_store),
        pinned_bytes=max(own_bytes.values(), default=0) if on_gpu else 0,
        workers=len(here),
        gpus=tuple(sorted({plans[number].gpu for number in here})) if on_gpu else (),
        registers_rdma=_registers_rdma(config),
    )


def _store_bytes(config: EngineConfig, budget: KvBudget, memory: WorkerMemory) -> int:
    """Returns the size of the host store that a worker uses."""
    return budget.host_pages * config.page_rows * memory.shape.token_bytes


def _registers_rdma(config: EngineConfig) -> bool:
    """Returns whether the transfer engine of this configuration registers memory with RDMA devices."""
    if config.role == "both":
        return False
    if config.transfer == "mooncake":
        return config.transfer_protocol == "rdma"
    names = {name.partition(":")[0] for name in config.listening_interface.split(",")}
    return not names.isdisjoint(rdma_devices())


def planned_memories(
    plans: Sequence[WorkerPlan], owns_store: Sequence[bool], device: torch.device
) -> list[WorkerMemory]:
    """Returns the memory that each worker will have for KV after it has loaded its weights."""
    return [
        WorkerMemory(
            plan.weights.kv_shape, plan.usable - _weight_bytes(plan, plans, device), owned, plan.node, plan.host_free
        )
        for plan, owned in zip(plans, owns_store, strict=True)
    ]


def _weight_bytes(plan: WorkerPlan, plans: Sequence[WorkerPlan], device: torch.device) -> int:
    """Returns the bytes of weights in the memory of a worker's device. On a CPU, these are the weights of all workers
    on its node."""
    on_device = [plan] if device.type == "cuda" else [other for other in plans if other.node == plan.node]
    return sum(each.weights.device_bytes for each in on_device)


def _check_weights(config: EngineConfig, files: ModelFiles, plans: Sequence[WorkerPlan], device: torch.device) -> None:
    if device.type == "cpu":
        for plan in plans:
            needed = _weight_bytes(plan, plans, device)
            if needed > plan.usable:
                on_node = [other for other in plans if other.node == plan.node]
                packed_bytes = sum(other.weights.packed_bytes for other in on_node)
                raise weights_do_not_fit(files, needed, plan.usable, len(on_node), packed_bytes=packed_bytes)
        return
    for plan in plans:
        if plan.weights.device_bytes > plan.usable:
            raise ConfigError(
                f"{files.path}: the weights take {show_bytes(plan.weights.device_bytes)} per "
                f"{'GPU' if plan.ranks_on_gpu == 1 else 'worker'}, but steps leave only {show_bytes(plan.usable)} of "
                f"the GPU's {show_bytes(plan.memory.total)} for them ({_share(config, plan)}); "
                f"{_ways_for_weights(config, files.spec, plan)}"
            )


def _share(config: EngineConfig, plan: WorkerPlan) -> str:
    """Returns what limits the memory of a worker on a GPU, for an error message."""
    limits = [f"--gpu-memory-utilization {config.gpu_memory_utilization:g}"]
    if plan.ranks_on_gpu > 1:
        limits.append(f"divided by the {plan.ranks_on_gpu} workers of each GPU")
    if _is_occupied(config, plan):
        limits.append(f"GPU {plan.gpu} has only {show_bytes(plan.memory.free)} free")
    return ", ".join(limits)


def _is_occupied(config: EngineConfig, plan: WorkerPlan) -> bool:
    """Returns whether other programs use a part of what --gpu-memory-utilization gives to the engine."""
    return plan.memory.free < int(plan.memory.total * config.gpu_memory_utilization)


def _more_room(config: EngineConfig, plan: WorkerPlan) -> list[str]:
    """Returns how a worker could get more memory if others use its GPU as well."""
    ways = []
    if _is_occupied(config, plan):
        ways.append(f"end the other programs on GPU {plan.gpu}, choose other GPUs with --gpus")
    if plan.ranks_on_gpu > 1:
        ways.append(f"lower --ranks-per-gpu {plan.ranks_on_gpu}, which takes more GPUs")
    return ways


def _ways_for_weights(config: EngineConfig, spec: ModelSpec, plan: WorkerPlan) -> str:
    sizes, ways = sizes_that_fit(config, spec, plan.usable), _more_room(config, plan)
    ways.append(f"use {' or '.join(sizes)}" if sizes else "use GPUs with more memory or a smaller model")
    return ", or ".join(
        [*ways, "lower --max-model-len, --max-num-seqs or --max-num-batched-tokens, on which steps depend"]
    )


def _other_ways(config: EngineConfig, spec: ModelSpec, plans: Sequence[WorkerPlan], device: torch.device) -> str:
    """Returns what else would make room for one request, for the end of an error message."""
    plan = min(plans, key=lambda plan: plan.usable - plan.weights.device_bytes)
    ways = []
    if config.tiers == "off" and plan.weights.kv_shape.groups:
        ways.append("drop --tiers off")
    if plan.weights.packed_bytes:
        ways.append(f"use --no-pack-weights, which saves {show_bytes(plan.weights.packed_bytes)} per worker")
    if device.type == "cuda":
        kv_bytes = plan.weights.kv_shape.token_bytes * context_length(config, spec.context)
        sizes = sizes_that_fit(config, spec, plan.usable - kv_bytes)
        ways += [f"use {size}" for size in sizes] + _more_room(config, plan)
    return "".join(f", or {way}" for way in ways)


def _log(
    config: EngineConfig,
    plans: Sequence[WorkerPlan],
    memories: Sequence[WorkerMemory],
    budget: KvBudget,
    device: torch.device,
) -> None:
    """Logs the numbers of the worker whose weights take most."""
    largest = max(range(len(plans)), key=lambda number: plans[number].weights.device_bytes)
    plan, memory = plans[largest], memories[largest]
    per_worker = f" in each of {len(plans)} workers" if len(plans) > 1 else ""
    LOGGER.info(
        "weights: %s%s%s, %s to read; %s of %s of memory remain for KV and other uses",
        show_bytes(plan.weights.device_bytes),
        f" ({show_bytes(plan.weights.packed_bytes)} in packed copies)" if plan.weights.packed_bytes else "",
        per_worker,
        show_bytes(sum(each.weights.read_bytes for each in plans)),
        show_bytes(memory.free),
        show_bytes(plan.memory.total // plan.ranks_on_gpu),
    )
    pool_bytes = memory.shape.layers * budget.geometry.layer_page_bytes * budget.device_pages
    host_bytes = sum(_store_bytes(config, budget, each) for each in memories if each.owns_store)
    context, replicas = budget.max_model_len, config.data_parallel_size
    at_once = f"{replicas * min(config.max_num_seqs, budget.resident_requests(context))} resident"
    if budget.tiers:
        at_once += f", {replicas * min(config.max_num_seqs, budget.tiered_requests(context))} tiered"
    LOGGER.info(
        "KV cache: %s%s, %s of host memory; requests of %d tokens that fit at once: %s",
        show_bytes(pool_bytes),
        per_worker,
        show_bytes(host_bytes),
        context,
        at_once,
    )
