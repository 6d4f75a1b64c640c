"""From a configuration to an engine: find the model, load it, measure memory, put the parts together."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hotset.base.address import control_port
from hotset.base.config import EMBEDDED, EngineConfig
from hotset.base.errors import CheckpointError, ConfigError, RequestError
from hotset.base.sampling import SamplingParams
from hotset.engine.core import Engine
from hotset.engine.decode_graphs import Model
from hotset.engine.device import choose_device
from hotset.engine.handoffs import make_port
from hotset.engine.intake import ModelCard
from hotset.engine.progress import LoadingBar
from hotset.engine.runner import Runner
from hotset.engine.sizing import KvBudget, kv_budget
from hotset.handoff.messages import Model as Identity
from hotset.memory.device_pool import DevicePool
from hotset.memory.host_store import HostStore
from hotset.memory.pages import PageAllocator
from hotset.models.checkpoint import find_model, open_weights
from hotset.models.decoder import Decoder
from hotset.models.spec import GqaSpec, ModelSpec, Storage
from hotset.models.tokenizer import Tokenizer
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.coordinator import Coordinator
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


def choose_dtype(name: str | None, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """The dtype asked for; else the checkpoint's on a GPU (float16 is read as bfloat16), float32 on a CPU."""
    if name is None:
        of_checkpoint = "bfloat16" if spec.dtype == "float16" else spec.dtype
        name = "float32" if device.type == "cpu" else of_checkpoint
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def storage(config: EngineConfig, spec: ModelSpec) -> Storage:
    """How KV is stored. ConfigError where fp8 was asked for and the model's rows have no such layout."""
    if isinstance(spec.attention, GqaSpec):
        for flag, value in (("--kv-dtype", config.kv_dtype), ("--index-dtype", config.index_dtype)):
            if value != "auto":
                raise ConfigError(f"{flag} {value} is for models with a latent KV (MLA); leave it out for this one")
    return Storage(fp8_rows=config.kv_dtype == "fp8", fp8_keys=config.index_dtype == "fp8")


def build_engine(
    config: EngineConfig, *, show_progress: bool = True, wake: Callable[[], None] = lambda: None
) -> Engine:
    """Loads the model and allocates its pool. Raises StartupError, in one line, if that cannot be done. `wake` is
    called, from another thread, when a peer has answered and `step` should be."""
    device = choose_device(config.device)
    files = find_model(config.model)
    dtype = choose_dtype(config.dtype, files.spec, device)
    with LoadingBar(f"Loading {model_name(config.model)}", show_progress) as bar:
        weights = open_weights(files, dtype, device, load_format=config.load_format, progress=bar.update)
        model = Decoder(files.spec, weights, storage(config, files.spec))
        weights.finish()
    budget = kv_budget(config, model.kv_shape, files.spec.context, device)
    card = model_card(config, files.spec, budget, device, dtype)
    with LoadingBar("Preparing the host store", show_progress) as bar:
        digest = f"{config.load_format} {files.fingerprint()}"  # random weights are no others' equals
        engine = assemble(config, card, model, budget, device, bar.update, weights=digest, wake=wake)
    if device.type == "cuda":
        with LoadingBar("Capturing decode steps", show_progress, counting=True) as bar:
            engine.warm_up(bar.update)
    return engine


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
    pool = DevicePool(model.kv_shape, budget.geometry, budget.device_pages, device)
    host = None
    if budget.host_pages:
        host = HostStore(model.kv_shape, budget.host_pages, config.page_rows, device, progress)
    memory = Coordinator(pool, host, config.max_num_seqs, budget.max_model_len)
    ledger = Ledger(
        budget.geometry, PageAllocator(budget.device_pages), PageAllocator(budget.host_pages) if host else None
    )
    scheduler = Scheduler(ledger, config.max_num_seqs, config.max_num_batched_tokens, config.tiers)
    graphs = device.type == "cuda" and config.cuda_graphs == "auto" and card.dtype == "bfloat16"
    runner = Runner(model, memory, config.max_num_seqs, budget.max_model_len, card.vocab, graphs=graphs)
    depth = config.plans_in_flight or (2 if device.type == "cuda" else 1)
    port = None
    if config.role != "both":
        shape = model.kv_shape
        key = None if shape.key is None else shape.key.described
        mine = Identity(card.name, shape.layers, shape.row.described, key, shape.groups, weights)
        here = control_port(config.control, config.advertise, config.handoff_secret).peers.host
        moved_by = transfer or open_transfer(config.transfer, host=here, protocol=config.transfer_protocol or "tcp")
        port, control = make_port(config, mine, scheduler, memory, card, moved_by, wake)
        card = replace(card, control=control)
    return Engine(card, scheduler, runner, ledger, memory, depth, port)


def model_name(model: str) -> str:
    """How a model is called where nobody named it: the last part of its path."""
    return "SmolLM2-135M-Instruct" if model == EMBEDDED else Path(model).resolve().name
