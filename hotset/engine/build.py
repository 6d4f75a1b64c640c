"""Builds an engine from its configuration: loads the model, sizes its memory, and connects scheduler and executor.

`build_engine` does all of this. Tests and benchmarks with a model of their own call `build_runner`, which allocates
memory for a loaded model, and `assemble`, which builds an engine around any executor.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from hotset.base.config import EngineConfig
from hotset.base.endings import wait_for_ending
from hotset.base.errors import EngineStopped, StartupError
from hotset.base.numa import gpu_link_bytes_per_second
from hotset.base.status_line import ShowProgress, TaskTimer, ignore_progress, show_counts
from hotset.base.units import show_bytes
from hotset.engine.connections import Connections, load_connections
from hotset.engine.core import Engine
from hotset.engine.drafts.costs import StepCosts
from hotset.engine.drafts.measuring import measure_draft_costs
from hotset.engine.drafts.settings import DraftSettings, with_default_drafts
from hotset.engine.drafts.speculation import Speculation
from hotset.engine.input_processor import ModelCard
from hotset.engine.loading import choose_dtype
from hotset.engine.model_checks import check_model, kv_storage, model_splits
from hotset.engine.model_workers import ModelWorkers, Started, WorkerInProcess, WorkerProcesses
from hotset.engine.ports import CachePublisher, HandoffEndpoint
from hotset.engine.sizing import KvBudget, plans_in_flight
from hotset.engine.warm_up import run_first_steps, run_largest_steps
from hotset.engine.workers.executor import Executor
from hotset.engine.workers.launcher import Launcher, LocalLauncher
from hotset.engine.workers.placement import WorkerDevice, place_workers
from hotset.engine.workers.processes import MultiprocessExecutor
from hotset.memory.device_pool import KvShape
from hotset.memory.pages import PageAllocator
from hotset.models.checkpoint.files import find_model
from hotset.models.checkpoint.model_names import model_name
from hotset.models.decoder import worker_kv_shape
from hotset.models.spec import ModelSpec
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.ledger import LandingPolicy, Ledger
from hotset.tiers.prefix_cache import PageHasher, PrefixCache

LOGGER = logging.getLogger("hotset.engine")


def build_engine(
    config: EngineConfig,
    *,
    show: ShowProgress = ignore_progress,
    wake: Callable[[], None] = lambda: None,
    advance: Callable[[], None] = lambda: None,
) -> Engine:
    """Loads the model and allocates its pools. Raises StartupError with a one-line message if that fails.

    `show` is called repeatedly with the progress of the current task.
    `wake` is called from another thread when the handoff agent has an event or has ended, or when a worker process has
    ended. The caller should then call `step`. `advance` is called during a step: after each layer or, with several
    workers, repeatedly while the step waits for workers that still advance.
    """
    timer = TaskTimer(show)
    show = timer.show
    devices = place_workers(config)
    device = torch.device(devices[0].name)
    chosen = with_default_drafts(config, on_gpu=devices[0].is_gpu)
    wait_for_ending(show)
    workers = _model_workers(chosen, devices, show, wake, advance)
    try:
        started, costs = _start_and_measure(workers, chosen, device, show)
        if costs is not None and not costs.pays(chosen.max_drafts):
            # Workers of a handoff keep the MTP layer: all of them must have the same layers.
            if config.speculate is not None or config.role != "both":
                LOGGER.warning("--speculate %d does not pay on this machine; use --speculate 0", chosen.max_drafts)
            else:
                LOGGER.info(
                    "drafts do not pay on this machine: starting again without the MTP layer (as with --speculate 0)"
                )
                del started  # frees the KV memory
                chosen = replace(config, speculate=0)
                workers.drop_mtp(chosen)
                started, costs = _start_and_measure(workers, chosen, device, show)
        engine = _assemble_started(chosen, started, costs, device, wake)
        LOGGER.info("ready after %s", timer.summary())
        return engine
    except EngineStopped as error:
        workers.close()
        raise StartupError(f"the engine did not start: {error}") from error
    except BaseException:
        workers.close()
        raise


def _model_workers(
    config: EngineConfig,
    devices: Sequence[WorkerDevice],
    show: ShowProgress,
    wake: Callable[[], None],
    advance: Callable[[], None],
) -> ModelWorkers:
    """Starts the workers. They load nothing yet. `wake` is called when a worker process has ended."""
    files, device = check_model(config), torch.device(devices[0].name)
    spec = files.spec
    if config.workers == 1:
        return WorkerInProcess(config, device, show, advance)
    launcher, splits = _launcher(config, devices), model_splits(config, spec)
    executor = MultiprocessExecutor(config, splits, launcher, spec.attention.divided_kv_heads, wake, advance)
    return WorkerProcesses(executor, files, device, show)


def _start_and_measure(
    workers: ModelWorkers, config: EngineConfig, device: torch.device, show: ShowProgress
) -> tuple[Started, StepCosts | None]:
    """Loads the weights unless they are loaded, allocates the KV memory and runs the warm-up steps, so that no request
    waits for one-time work or runs out of memory. Also returns the costs of drafts, or None if they are not measured.
    """
    started = workers.start(config)
    try:
        return started, _warm_up(started, config, device, show)
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"the largest step does not fit into the memory that {show_bytes(started.budget.device_bytes)} of KV cache "
            "leave; lower --device-kv-gib, --device-kv-tokens, --max-num-batched-tokens or --max-num-seqs"
        ) from error


def _warm_up(started: Started, config: EngineConfig, device: torch.device, show: ShowProgress) -> StepCosts | None:
    executor, budget, replicas = started.executor, started.budget, config.data_parallel_size
    if device.type != "cuda":
        run_first_steps(executor, budget, replicas)
        return None
    # Capturing a graph empties torch's memory cache. The largest steps run afterwards and fill it again for requests.
    executor.warm_up(show_counts(show, "Capturing decode steps"))
    run_largest_steps(executor, config, budget, replicas, show_counts(show, "Computing the largest steps"))
    if config.max_drafts == 0:
        return None
    return measure_draft_costs(executor, config, budget, replicas, show_counts(show, "Measuring steps with drafts"))


def _assemble_started(
    config: EngineConfig, started: Started, costs: StepCosts | None, device: torch.device, wake: Callable[[], None]
) -> Engine:
    files = find_model(config.model, config.weight_dtype, with_mtp=config.drafts_by_mtp)
    dtype = choose_dtype(config.dtype, files.spec, device)
    kv_shape = worker_kv_shape(files.spec, dtype, kv_storage(config, files.spec))
    card = model_card(config, files.spec, started.budget, device, dtype)
    weights = f"{config.load_format} {files.fingerprint()}"  # random weights never match a peer's real ones
    return assemble(config, card, kv_shape, started.budget, started.executor, weights=weights, wake=wake, costs=costs)


def assemble(
    config: EngineConfig,
    card: ModelCard,
    kv_shape: KvShape,
    budget: KvBudget,
    executor: Executor,
    *,
    weights: str = "",
    wake: Callable[[], None] = lambda: None,
    connections: Callable[[], Connections] = load_connections,
    costs: StepCosts | None = None,
) -> Engine:
    """Builds an engine around an executor whose workers are ready.

    `kv_shape` is that of the whole model. `weights` identifies the model's weights: handoffs are refused between peers
    with different values. `connections` is called if the configuration connects the engine with others. `costs` are
    the measured costs of drafts, or None.
    """
    card = replace(card, page_hasher=_page_hasher(config, card, budget))
    schedulers = [_scheduler(config, card, budget, costs) for _ in range(config.data_parallel_size)]
    in_flight = plans_in_flight(config, torch.device(card.device))
    endpoint: HandoffEndpoint | None = None
    publishers: Sequence[CachePublisher] = ()
    if config.role != "both":
        endpoint = connections().open_endpoint(config, card, kv_shape, weights, schedulers, executor, wake)
        card = replace(card, control=endpoint.address, control_listens_on=endpoint.listens_on)
    if config.events_endpoints:
        try:
            publishers = connections().open_publishers(config, [scheduler.ledger for scheduler in schedulers])
        except BaseException:
            if endpoint is not None:
                endpoint.close(0.0)
            raise
    card = replace(card, kv_events=tuple(publisher.endpoint for publisher in publishers))
    return Engine(card, schedulers, executor, in_flight, endpoint, publishers)


def model_card(
    config: EngineConfig, spec: ModelSpec, budget: KvBudget, device: torch.device, dtype: torch.dtype
) -> ModelCard:
    """Returns the description of the running model that front ends receive."""
    return ModelCard(
        name=model_name(config.model),
        architecture=spec.architecture,
        max_model_len=budget.max_model_len,
        vocab=spec.vocab,
        eos_ids=spec.eos_ids,
        tiers=budget.tiers,
        resident_len=budget.resident_len,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        role=config.role,
        host_store=budget.host_pages > 0,
        split=config.split_name,
        bus_bytes_per_second=_bus_bytes_per_second(config, device),
        landing=unmeasured_landing_policy(config, device),
    )


def unmeasured_landing_policy(config: EngineConfig, device: torch.device) -> LandingPolicy:
    """Returns the landing policy for prefill workers whose routes are not measured yet. It avoids GPU memory until the
    route to it is known to be fast. With pipeline stages, KV lands on the host, because the stages divide pages of
    index keys differently."""
    on_device, on_gpu = config.pipeline_parallel_size == 1, device.type == "cuda"
    return LandingPolicy(on_device, keys_on_host=on_gpu or not on_device, prefer_host=on_gpu)


def _bus_bytes_per_second(config: EngineConfig, device: torch.device) -> float | None:
    """Returns the bandwidth of the host links of all GPUs of this engine. Assumes that all are like the first one."""
    link = gpu_link_bytes_per_second(device.index or 0) if device.type == "cuda" else None
    return None if link is None else link * (config.workers // config.ranks_per_gpu)


def _launcher(config: EngineConfig, devices: Sequence[WorkerDevice]) -> Launcher:
    if config.executor == "processes":
        return LocalLauncher(devices)
    return load_connections().cluster_launcher(config, devices)


def _page_hasher(config: EngineConfig, card: ModelCard, budget: KvBudget) -> PageHasher | None:
    """Returns the hasher of the prefix cache, or None if there is no cache."""
    if not (config.prefix_cache and budget.host_pages):
        return None
    # Engines that split the model differently have the same hashes, so that a router can compare their KV events.
    dtypes = f"{card.dtype} {config.kv_dtype} {config.index_dtype}"
    return PageHasher(f"{card.name} {dtypes}", budget.geometry.page_rows)


def _scheduler(config: EngineConfig, card: ModelCard, budget: KvBudget, costs: StepCosts | None) -> Scheduler:
    host = PrefixCache(budget.host_pages) if budget.host_pages else None
    ledger = Ledger(budget.geometry, PageAllocator(budget.device_pages), host, card.landing)
    return Scheduler(
        ledger,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.tiers,
        stages=config.pipeline_parallel_size,
        hasher=card.page_hasher,
        extend_locally=config.extend_locally,
        speculation=Speculation(DraftSettings.of(config), ledger, costs) if config.max_drafts else None,
    )
