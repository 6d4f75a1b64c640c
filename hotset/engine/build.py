"""From a configuration to an engine: find the model, load it, measure memory, put the parts together."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hotset.base.address import control_port
from hotset.base.config import EMBEDDED, EngineConfig
from hotset.base.errors import CheckpointError, ConfigError, EngineStopped, RequestError, StartupError
from hotset.base.sampling import SamplingParams
from hotset.engine.core import Engine, Replica
from hotset.engine.decode_graphs import Model
from hotset.engine.device import choose_device
from hotset.engine.handoffs import landing_policy, open_endpoint
from hotset.engine.intake import ModelCard
from hotset.engine.model import choose_dtype, load_decoder, storage, whole_kv_shape
from hotset.engine.progress import LoadingBar
from hotset.engine.runner import Runner
from hotset.engine.sizing import KvBudget, kv_budget, shared_budget
from hotset.engine.workers.executor import Executor, InProcess
from hotset.engine.workers.processes import WorkerProcesses
from hotset.handoff.messages import Model as Identity
from hotset.memory.device_pool import DevicePool, KvShape
from hotset.memory.host_store import HostStore
from hotset.memory.pages import PageAllocator
from hotset.models.checkpoint import find_model
from hotset.models.spec import GqaSpec, ModelSpec
from hotset.models.split import Split, check_data_parallel, check_tensor_parallel, stage_layers
from hotset.models.tokenizer import Tokenizer
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.kv_memory import KvMemory
from hotset.tiers.ledger import Ledger
from hotset.transfer.api import Transfer
from hotset.transfer.engines import open_transfer

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
EMBEDDED_DEFAULTS = {"temperature": 0.2, "top_p": 0.9}  # as SmolLM2's authors recommend


@dataclass(frozen=True, slots=True)
class FrontModel:
    """What a front end needs of a model, read without loading weights."""

    tokenizer: Tokenizer | None
    defaults: dict[str, Any]  # sampling parameters that the model's authors recommend

    def card(self, engine_card: ModelCard) -> ModelCard:
        """The engine's card, with the ends of turn that only the tokenizer knows."""
        chat_stops = () if self.tokenizer is None else self.tokenizer.chat_stop_ids
        return replace(engine_card, eos_ids=tuple(dict.fromkeys((*engine_card.eos_ids, *chat_stops))))


def open_front(config: EngineConfig) -> FrontModel:
    files = find_model(config.model)
    generation = EMBEDDED_DEFAULTS if config.model == EMBEDDED else files.generation
    defaults: dict[str, Any] = {
        name: generation[name] for name in SAMPLING_DEFAULTS if generation.get(name) is not None
    }
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise CheckpointError(f"{files.path}: generation_config.json: {error}") from error
    return FrontModel(Tokenizer.load(files, config.tokenizer), defaults)


def build_engine(
    config: EngineConfig, *, show_progress: bool = True, wake: Callable[[], None] = lambda: None
) -> Engine:
    """Loads the model and allocates its pool. Raises StartupError, in one line, if that cannot be done. `wake` is
    called, from another thread, when a peer has answered and `step` should be."""
    device = choose_device(config.device)
    files = find_model(config.model)
    dtype = choose_dtype(config.dtype, files.spec, device)
    stored = storage(config, files.spec)
    ready = one_worker if config.workers == 1 else many_workers
    budget, executor = ready(config, files.spec, device, show_progress, wake)
    try:
        card = model_card(config, files.spec, budget, device, dtype)
        digest = f"{config.load_format} {files.fingerprint()}"  # random weights are no others' equals
        shape = whole_kv_shape(files.spec, dtype, stored)
        engine = join(config, card, shape, budget, executor, weights=digest, wake=wake)
        if device.type == "cuda":
            with LoadingBar("Capturing decode steps", show_progress, counting=True) as bar:
                engine.warm_up(bar.update)
    except BaseException:
        executor.close()
        raise
    return engine


def one_worker(
    config: EngineConfig, spec: ModelSpec, device: torch.device, show_progress: bool, wake: Callable[[], None]
) -> tuple[KvBudget, Executor]:
    """All of the model, in this process, which nobody needs to wake."""
    with LoadingBar(f"Loading {model_name(config.model)}", show_progress) as bar:
        model = load_decoder(config, device, bar.update)
    budget = kv_budget(config, model.kv_shape, spec.context, device)
    with LoadingBar("Preparing the host store", show_progress) as bar:
        return budget, in_process(config, model, budget, device, spec.vocab, bar.update)


def many_workers(
    config: EngineConfig, spec: ModelSpec, device: torch.device, show_progress: bool, wake: Callable[[], None]
) -> tuple[KvBudget, Executor]:
    """Processes that hold a part each. `wake` is called when one of them died."""
    kv_heads = spec.attention.kv_heads if isinstance(spec.attention, GqaSpec) else 1
    parts = splits(config, spec, device)
    workers = WorkerProcesses(config, parts, config.pipeline_parallel_size, kv_heads, device, wake)
    try:
        with LoadingBar(f"Loading {model_name(config.model)}", show_progress) as bar:
            loaded = workers.load(bar.update)
        budget = shared_budget(config, loaded, spec.context, device)
        with LoadingBar("Preparing the workers", show_progress, counting=True) as bar:
            workers.settle(budget, bar.update)
    except EngineStopped as error:
        workers.close()
        raise StartupError(f"the engine did not start: {error}") from error
    except BaseException:
        workers.close()
        raise
    return budget, workers


def splits(config: EngineConfig, spec: ModelSpec, device: torch.device) -> list[Split]:
    """Which part each worker holds, stage by stage. ConfigError where the model cannot be divided so."""
    if device.type == "cuda" and config.workers > torch.cuda.device_count():
        raise ConfigError(
            f"{config.workers} workers want a GPU each, and there are {torch.cuda.device_count()}; lower "
            "--tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size"
        )
    replicas, ranks = config.data_parallel_size, config.tensor_parallel_size
    if replicas > 1:
        check_data_parallel(spec, replicas)
        return [Split(dp_rank=rank, dp_size=replicas) for rank in range(replicas)]
    check_tensor_parallel(spec, ranks)
    stages = stage_layers(spec, config.pipeline_parallel_size, config.stage_layers)
    return [Split(tp_rank=rank, tp_size=ranks, layers=layers) for layers in stages for rank in range(ranks)]


def model_card(
    config: EngineConfig, spec: ModelSpec, budget: KvBudget, device: torch.device, dtype: torch.dtype
) -> ModelCard:
    """What front ends are told of a model that runs within `budget`."""
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
        landing=landing_policy(config),
    )


def assemble(
    config: EngineConfig,
    card: ModelCard,
    model: Model,
    budget: KvBudget,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
    *,
    weights: str = "",
    wake: Callable[[], None] = lambda: None,
    transfer: Transfer | None = None,
) -> Engine:
    """Puts an engine together around a model that is loaded. `progress(done, total)`: bytes of the host store.
    `weights`: what a peer's must be the same as. `transfer`: instead of the one that is configured."""
    executor = in_process(config, model, budget, device, card.vocab, progress)
    return join(config, card, model.kv_shape, budget, executor, weights=weights, wake=wake, transfer=transfer)


def in_process(
    config: EngineConfig,
    model: Model,
    budget: KvBudget,
    device: torch.device,
    vocab: int,
    progress: Callable[[int, int], None] | None,
) -> InProcess:
    """A worker that holds all of a model that is loaded."""
    pool = DevicePool(model.kv_shape, budget.geometry, budget.device_pages, device)
    host = None
    if budget.host_pages:
        host = HostStore(model.kv_shape, budget.host_pages, config.page_rows, device, progress)
    memory = KvMemory(pool, host, config.max_num_seqs, budget.max_model_len)
    graphs = device.type == "cuda" and config.cuda_graphs == "auto" and model.dtype == torch.bfloat16
    runner = Runner(model, memory, config.max_num_seqs, budget.max_model_len, vocab, graphs=graphs)
    return InProcess(runner, memory)


def join(
    config: EngineConfig,
    card: ModelCard,
    shape: KvShape,
    budget: KvBudget,
    executor: Executor,
    *,
    weights: str = "",
    wake: Callable[[], None] = lambda: None,
    transfer: Transfer | None = None,
) -> Engine:
    """Puts an engine together around workers that are ready. `shape`: of the whole model."""
    replicas = [_replica(config, card, budget) for _ in range(config.data_parallel_size)]
    stages = config.pipeline_parallel_size
    depth = config.plans_in_flight or max(stages, 2 if card.device != "cpu" else 1)
    port = None
    if config.role != "both":
        key = None if shape.key is None else shape.key.described
        mine = Identity(card.name, shape.layers, shape.row.described, key, shape.groups, weights)
        here = control_port(config.control, config.advertise, config.handoff_secret).peers.host
        moved_by = transfer or open_transfer(config.transfer, host=here, protocol=config.transfer_protocol or "tcp")
        schedulers = [replica.scheduler for replica in replicas]
        port, control = open_endpoint(config, mine, schedulers, executor, card, moved_by, wake)
        card = replace(card, control=control)
    return Engine(card, replicas, executor, depth, port)


def _replica(config: EngineConfig, card: ModelCard, budget: KvBudget) -> Replica:
    host = PageAllocator(budget.host_pages) if budget.host_pages else None
    ledger = Ledger(
        budget.geometry,
        PageAllocator(budget.device_pages),
        host,
        card.landing,
    )
    sizes = (config.max_num_seqs, config.max_num_batched_tokens)
    return Replica(Scheduler(ledger, *sizes, config.tiers, stages=config.pipeline_parallel_size), ledger)


def model_name(model: str) -> str:
    """How a model is called where nobody named it: the last part of its path."""
    return "SmolLM2-135M-Instruct" if model == EMBEDDED else Path(model).resolve().name
