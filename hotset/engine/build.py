"""Builds an engine from its configuration: loads the model, sizes its memory, and connects scheduler and executor.

`build_engine` does all of this. Tests and benchmarks with a model of their own call `in_process_executor`, which
allocates memory for a loaded model, and `assemble`, which builds an engine around any executor.
"""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hotset.base.config import EngineConfig
from hotset.base.engine_settings import EMBEDDED
from hotset.base.errors import EngineStopped, StartupError
from hotset.base.numa import gpu_link_bytes_per_second
from hotset.base.status_line import ShowProgress, ignore_progress, show_counts
from hotset.base.units import show_bytes
from hotset.engine.connections import Connections, load_connections
from hotset.engine.core import Engine, Replica
from hotset.engine.decode_graphs import RunnerModel, captures_graphs, max_decoded
from hotset.engine.draft_costs import measure_draft_costs
from hotset.engine.frontend import structure_processes
from hotset.engine.input_processor import ModelCard
from hotset.engine.loading import ModelLoader, choose_dtype, use_device
from hotset.engine.model_checks import check_model, kv_storage, model_splits, with_default_drafts
from hotset.engine.ports import CachePublisher, HandoffEndpoint
from hotset.engine.runner import Runner
from hotset.engine.sizing import KvBudget, WorkerMemory, free_bytes, plans_in_flight, shared_budget
from hotset.engine.start_plan import check_start
from hotset.engine.warm_up import run_first_steps, run_largest_steps
from hotset.engine.workers.executor import Executor, InProcessExecutor
from hotset.engine.workers.launcher import Launcher, LocalLauncher
from hotset.engine.workers.placement import WorkerDevice, place_workers
from hotset.engine.workers.processes import MultiprocessExecutor
from hotset.memory.device_pool import DevicePool, KvShape
from hotset.memory.host_store import HostStore
from hotset.memory.pages import PageAllocator
from hotset.models.checkpoint.files import ModelFiles
from hotset.models.checkpoint.model_names import EMBEDDED_NAME
from hotset.models.decoder import worker_kv_shape
from hotset.models.spec import ModelSpec
from hotset.schedule.drafts import LookupDrafter, MtpDrafter
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.kv_memory import KvMemory
from hotset.tiers.ledger import LandingPolicy, Ledger
from hotset.tiers.prefix_cache import PageHasher, PrefixCache

LOGGER = logging.getLogger("hotset.engine")
WARM_UP_PAGES = 16  # pages of the KV memory on which steps are measured


def build_engine(
    config: EngineConfig,
    *,
    show: ShowProgress = ignore_progress,
    wake: Callable[[], None] = lambda: None,
    advance: Callable[[], None] = lambda: None,
) -> Engine:
    """Loads the model and allocates its pools. Raises StartupError with a one-line message if that fails.

    `show` is called again and again with the progress of the part that is under way.
    `wake` is called from another thread when the handoff agent has an event or has ended, or when a worker process has
    ended. The caller should then call `step`. `advance` is called during a step: after each layer or, with several
    workers, again and again while the step waits for workers that advance.
    """
    devices = place_workers(config)
    chosen = with_default_drafts(config, on_gpu=devices[0].is_gpu)
    engine, drafts_pay = _build(chosen, devices, show, wake, advance)
    if drafts_pay:
        return engine
    # Workers of a handoff keep the MTP layer: all of them must have the same layers.
    if config.speculate is not None or config.role != "both":
        LOGGER.warning("--speculate %d does not pay on this machine; use --speculate 0", chosen.max_drafts)
        return engine
    LOGGER.info("drafts do not pay on this machine: starting again without the MTP layer (as with --speculate 0)")
    engine.close()
    del engine  # and the memory that it holds
    gc.collect()
    if devices[0].is_gpu:
        torch.cuda.empty_cache()
    engine, _ = _build(replace(config, speculate=0), devices, show, wake, advance)
    return engine


def _build(
    config: EngineConfig,
    devices: Sequence[WorkerDevice],
    show: ShowProgress,
    wake: Callable[[], None],
    advance: Callable[[], None],
) -> tuple[Engine, bool]:
    """Builds an engine. Returns False with it if it was measured that its drafts do not pay."""
    device = torch.device(devices[0].name)
    files = check_model(config)
    dtype = choose_dtype(config.dtype, files.spec, device)
    kv_shape = worker_kv_shape(files.spec, dtype, kv_storage(config, files.spec))
    if config.workers == 1:
        budget, executor = _load_in_process(config, device, show, advance)
    else:
        budget, executor = _start_workers(config, files, devices, dtype, show, wake, advance)
    try:
        card = model_card(config, files.spec, budget, device, dtype)
        weights = f"{config.load_format} {files.fingerprint()}"  # random weights never match a peer's real ones
        engine = assemble(config, card, kv_shape, budget, executor, weights=weights, wake=wake)
    except BaseException:
        executor.close()
        raise
    try:
        drafts_pay = _warm_up(engine, config, budget, device, show)
    except EngineStopped as error:
        engine.close()
        raise StartupError(f"the engine did not start: {error}") from error
    except torch.OutOfMemoryError as error:
        engine.close()
        raise StartupError(
            f"the largest step does not fit into the memory that {show_bytes(_kv_bytes(budget))} of KV cache leave; "
            "lower --device-kv-gib, --device-kv-tokens, --max-num-batched-tokens or --max-num-seqs"
        ) from error
    except BaseException:
        engine.close()
        raise
    return engine, drafts_pay


def _warm_up(engine: Engine, config: EngineConfig, budget: KvBudget, device: torch.device, show: ShowProgress) -> bool:
    """Runs all that happens only once, so that no request pays for it, or runs out of memory. Returns whether drafts
    pay, if they are measured, else True."""
    replicas = config.data_parallel_size
    if device.type == "cuda":
        # Captures return all memory that torch has cached. If the largest steps run last, requests find theirs cached.
        engine.warm_up(show_counts(show, "Capturing decode steps"))
        run_largest_steps(engine.executor, config, budget, replicas, show_counts(show, "Computing the largest steps"))
        if config.max_drafts:
            timed = show_counts(show, "Measuring steps with drafts")
            costs = measure_draft_costs(engine.executor, config, budget, replicas, timed)
            for replica in engine.replicas:
                replica.scheduler.set_draft_costs(costs)
            return costs.pays(config.max_drafts)
    else:
        run_first_steps(engine.executor, budget, replicas)
    return True


def _kv_bytes(budget: KvBudget) -> int:
    return budget.device_pages * budget.geometry.page_bytes


def in_process_executor(
    config: EngineConfig,
    model: RunnerModel,
    budget: KvBudget,
    device: torch.device,
    vocab: int,
    progress: Callable[[int, int], None] | None = None,
) -> InProcessExecutor:
    """Allocates KV memory for a loaded model, and returns an executor that runs it in this process.

    `progress(done, total)` counts bytes of the host store. It is not called if there is none.
    """
    pool = DevicePool(model.kv_shape, budget.geometry, budget.device_pages, device)
    host = None
    if budget.host_pages:
        host = HostStore(model.kv_shape, budget.host_pages, config.page_rows, device, progress)
    memory = KvMemory(pool, host, config.max_num_seqs, budget.max_model_len)
    graphs = captures_graphs(config, model)
    runner = Runner(
        model,
        memory,
        config.max_num_seqs,
        budget.max_model_len,
        vocab,
        graphs=graphs,
        structures=structure_processes(config, vocab),
        mtp_drafts=config.max_drafts if config.drafts_by_mtp else 0,
        draws_drafts=config.accept == "distribution",
        max_verified=max_decoded(config),
    )
    return InProcessExecutor(runner, memory)


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
    scheduler_class: type[Scheduler] = Scheduler,
) -> Engine:
    """Builds an engine around an executor whose workers are ready.

    `kv_shape` is that of the whole model. `weights` identifies the model's weights: handoffs are refused between peers
    with different values. `connections` is called if the engine is connected with others. `scheduler_class` is that of
    each replica's scheduler.
    """
    card = replace(card, page_hasher=_page_hasher(config, card, budget))
    replicas = [_replica(config, card, budget, scheduler_class) for _ in range(config.data_parallel_size)]
    in_flight = plans_in_flight(config, torch.device(card.device))
    endpoint: HandoffEndpoint | None = None
    publishers: Sequence[CachePublisher] = ()
    if config.role != "both":
        schedulers = [replica.scheduler for replica in replicas]
        endpoint = connections().open_endpoint(config, card, kv_shape, weights, schedulers, executor, wake)
        card = replace(card, control=endpoint.address, control_listens_on=endpoint.listens_on)
    if config.events_endpoints:
        try:
            publishers = connections().open_publishers(config, [replica.ledger for replica in replicas])
        except BaseException:
            if endpoint is not None:
                endpoint.close(0.0)
            raise
    card = replace(card, kv_events=tuple(publisher.endpoint for publisher in publishers))
    return Engine(card, replicas, executor, in_flight, endpoint, publishers)


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
    """Returns where KV from prefill workers lands whose routes are not measured yet. GPU memory is avoided until its
    route is known to be fast. With pipeline stages, KV lands on the host: the stages divide pages of index keys
    differently."""
    on_device, on_gpu = config.pipeline_parallel_size == 1, device.type == "cuda"
    return LandingPolicy(on_device, keys_on_host=on_gpu or not on_device, prefer_host=on_gpu)


def _bus_bytes_per_second(config: EngineConfig, device: torch.device) -> float | None:
    """Returns what the links of all GPUs of this engine can carry, if they are like that of its first GPU."""
    link = gpu_link_bytes_per_second(device.index or 0) if device.type == "cuda" else None
    return None if link is None else link * (config.workers // config.ranks_per_gpu)


def _load_in_process(
    config: EngineConfig, device: torch.device, show: ShowProgress, advance: Callable[[], None]
) -> tuple[KvBudget, Executor]:
    use_device(device)
    loader = ModelLoader(config, device)
    spec = loader.files.spec
    planned = check_start(config, loader.files, [loader.plan], [True], device, loader.dtype)
    model = loader.load(show_counts(show, f"Loading {model_name(config.model)}", in_bytes=True))
    model.on_layer = advance
    steps = None
    if device.type == "cuda" and config.device_kv_tokens is None and config.device_kv_gib is None:
        steps = _measure_steps(config, model, planned, device, spec.vocab, show)
    budget = shared_budget(config, [WorkerMemory(model.kv_shape, loader.free_for_kv(steps))], spec.context, device)
    if steps is not None:
        LOGGER.info(
            "steps need %s (%s were estimated); KV cache: %s",
            show_bytes(steps),
            show_bytes(loader.plan.steps),
            show_bytes(_kv_bytes(budget)),
        )
    pinned = show_counts(show, "Preparing the KV cache", in_bytes=True)
    return budget, in_process_executor(config, model, budget, device, spec.vocab, pinned)


def _measure_steps(
    config: EngineConfig, model: RunnerModel, planned: KvBudget, device: torch.device, vocab: int, show: ShowProgress
) -> int:
    """Returns the memory that the largest steps, the tables of all seats and all graphs take on a GPU.

    They run on a KV memory of a few pages, which is freed again. Graphs contain addresses, so they are captured once
    more on the real one. What libraries and loaded kernels keep is not counted, because the memory that is free for KV
    is measured after this.
    """
    torch.cuda.empty_cache()
    free = free_bytes(device)
    small = replace(
        planned,
        device_pages=min(WARM_UP_PAGES, planned.device_pages),
        host_pages=min(WARM_UP_PAGES, planned.host_pages),
    )
    executor = in_process_executor(config, model, small, device, vocab)
    try:
        executor.warm_up(show_counts(show, "Compiling kernels of decode steps"))
        run_largest_steps(executor, config, small, 1, show_counts(show, "Compiling kernels of prompts"))
        torch.cuda.synchronize(device)
        # torch keeps what it has freed until the next capture, so this includes the peaks of all steps.
        taken = free - free_bytes(device) - executor.pool.bytes.nbytes
    finally:
        executor.close()
        del executor
        gc.collect()
        torch.cuda.empty_cache()
    kept = free - free_bytes(device)
    return max(0, taken - kept)


def _start_workers(
    config: EngineConfig,
    files: ModelFiles,
    devices: Sequence[WorkerDevice],
    dtype: torch.dtype,
    show: ShowProgress,
    wake: Callable[[], None],
    advance: Callable[[], None],
) -> tuple[KvBudget, Executor]:
    """Starts workers, each with a part of the model. `wake` is called when one of them has ended."""
    spec = files.spec
    device = torch.device(devices[0].name)
    launcher = _launcher(config, devices)
    workers = MultiprocessExecutor(
        config, model_splits(config, spec), launcher, spec.attention.divided_kv_heads, wake, advance
    )
    try:
        show_loading = show_counts(show, f"Loading {model_name(config.model)}", in_bytes=True)
        plans = workers.plan()
        check_start(config, files, plans, workers.owns_store, device, dtype)
        budget = shared_budget(config, workers.load(show_loading), spec.context, device)
        workers.init_cache(budget, show_counts(show, "Preparing the KV cache", in_bytes=True))
    except EngineStopped as error:
        workers.close()
        raise StartupError(f"the engine did not start: {error}") from error
    except BaseException:
        workers.close()
        raise
    return budget, workers


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


def _drafter(config: EngineConfig) -> LookupDrafter | MtpDrafter | None:
    if config.max_drafts == 0:
        return None
    return MtpDrafter() if config.drafts_by_mtp else LookupDrafter()


def _replica(config: EngineConfig, card: ModelCard, budget: KvBudget, scheduler_class: type[Scheduler]) -> Replica:
    host = PrefixCache(budget.host_pages) if budget.host_pages else None
    ledger = Ledger(budget.geometry, PageAllocator(budget.device_pages), host, card.landing)
    scheduler = scheduler_class(
        ledger,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.tiers,
        stages=config.pipeline_parallel_size,
        hasher=card.page_hasher,
        extend_locally=config.extend_locally,
        drafter=_drafter(config),
        max_drafts=config.max_drafts,
    )
    return Replica(scheduler, ledger)


def model_name(model: str) -> str:
    """Returns the default name of a model: the last component of its path, or the name of the embedded model.

    The path of a snapshot in a Hugging Face cache ends in a hash, so its name is that of the repository.
    """
    if model == EMBEDDED:
        return EMBEDDED_NAME
    path = Path(model).resolve()
    repository = path.parent.parent.name
    return repository.rpartition("--")[2] if repository.startswith("models--") else path.name
