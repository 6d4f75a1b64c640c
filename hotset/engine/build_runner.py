"""Allocates the KV memory of one worker and builds its runner, in a worker process or in the engine's process."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.base.config import EngineConfig
from hotset.engine.decode_graphs import RunnerModel, captures_graphs
from hotset.engine.drafts.settings import DraftSettings
from hotset.engine.frontend import structure_processes
from hotset.engine.runner import NO_NEIGHBOURS, Neighbours, Runner
from hotset.engine.sizing import KvBudget
from hotset.memory.device_pool import DevicePool
from hotset.memory.host_store import HostStore
from hotset.tiers.kv_memory import KvMemory


@dataclass(frozen=True, slots=True)
class SharedStore:
    """The memory of a host store to which several workers write, and one worker's index among them."""

    memory: Tensor
    writer: int
    writers: int


def build_runner(
    config: EngineConfig,
    model: RunnerModel,
    budget: KvBudget,
    device: torch.device,
    vocab: int,
    progress: Callable[[int, int], None] | None = None,
    *,
    store: SharedStore | None = None,
    host: HostStore | None = None,
    neighbours: Neighbours = NO_NEIGHBOURS,
    samples: bool = True,
) -> Runner:
    """Allocates KV memory for a loaded model, or for a part of it, and returns the runner that owns it.

    The runner owns `host` if it is given. Otherwise a new host store uses the memory of `store`, or new memory if that
    is None, and `progress(done, total)` counts its bytes; without a host store, it is not called. `samples` is False if
    the worker never samples tokens: it then follows no structures.
    """
    pool = DevicePool(model.kv_shape, budget.geometry, budget.device_pages, device)
    if budget.host_pages and host is None:
        host = HostStore(
            model.kv_shape,
            budget.host_pages,
            config.page_rows,
            device,
            progress,
            memory=None if store is None else store.memory,
            writer=0 if store is None else store.writer,
            writers=1 if store is None else store.writers,
        )
    return Runner(
        model,
        KvMemory(pool, host, config.max_num_seqs, budget.max_model_len),
        config.max_num_seqs,
        budget.max_model_len,
        vocab,
        graphs=captures_graphs(config, model),
        neighbours=neighbours,
        structures=structure_processes(config, vocab) if samples else None,
        drafts=DraftSettings.of(config),
    )
