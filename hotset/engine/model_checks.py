"""Checks a configuration against this machine and the model's configuration files. Needs neither torch nor the weights.

The command line makes these checks before it starts a process or imports torch, so that a mistake is answered at once.
The engine makes them again, and also checks what depends on a GPU and on the contents of the weights.
"""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import suppress

from hotset.base.config import EngineConfig
from hotset.base.devices import has_gpu_driver
from hotset.base.errors import ConfigError, MissingDependency
from hotset.base.host_memory import host_memory
from hotset.base.listeners import check_free
from hotset.base.units import show_bytes
from hotset.engine.drafts.settings import check_drafts
from hotset.models.allowed_splits import check_data_parallel, check_tensor_parallel, stage_layers
from hotset.models.chat_formats import read_template
from hotset.models.checkpoint.files import (
    ModelFiles,
    find_model,
    find_tokenizer,
    read_weight_index,
    shard_paths,
)
from hotset.models.model_tensors import worker_weight_bytes
from hotset.models.spec import DTYPE_BYTES, KvStorage, ModelSpec, dtype_name
from hotset.models.split import Split

MAX_SUGGESTED_SIZE = 64  # the largest degree of parallelism that an error message suggests
SLOTS_PER_TOPK = 2  # default number of slots in a hot buffer without drafts, as a multiple of the model's top-k


def check_model(config: EngineConfig) -> ModelFiles:
    """Returns the model's files. Raises StartupError if the model or a setting cannot be used."""
    on_gpu = check_gpu_flags(config)
    for endpoint in config.events_endpoints:
        check_free(endpoint.live, "--kv-events")
        if endpoint.replay is not None:
            check_free(endpoint.replay, "--kv-events-replay")
    if config.executor == "ray" and any(importlib.util.find_spec(name) is None for name in ("ray", "zmq")):
        raise MissingDependency("--executor ray needs Ray: pip install 'hotset[cluster]'")
    files = find_model(config.model, config.weight_dtype, with_mtp=config.drafts_by_mtp)
    if config.load_format == "auto" and files.gguf is None:
        shard_paths(files.path, read_weight_index(files.path))
    find_tokenizer(files, config.tokenizer)
    if config.chat_template is not None:
        read_template(config.chat_template)
    spec = files.spec
    context_length(config, spec.context)
    kv_storage(config, spec)
    check_drafts(config, files)
    hot_slots(config, spec.attention.topk)
    splits = model_splits(config, spec)
    if not on_gpu and config.executor == "processes":  # workers on other nodes check what they load themselves
        dtype = dtype_name(config.dtype, spec, "cpu")
        check_weights_fit(files, splits, DTYPE_BYTES[dtype], host_memory().free)
    return files


def check_gpu_flags(config: EngineConfig) -> bool:
    """Returns whether the engine may use a GPU. Raises ConfigError if a flag needs one and this machine has none."""
    on_gpu = config.device != "cpu" and has_gpu_driver()
    if config.device not in (None, "cpu") and not on_gpu:
        raise ConfigError(f"--device {config.device!r}: no GPU was found; use --device cpu")
    if (config.gpus is not None or config.ranks_per_gpu > 1) and not on_gpu:
        raise ConfigError("--gpus and --ranks-per-gpu choose GPUs, but no GPU was found; leave them out")
    if config.collectives == "nccl" and not on_gpu:
        raise ConfigError("--collectives nccl is for GPUs, but no GPU was found; leave it out")
    return on_gpu


def check_weights_fit(files: ModelFiles, splits: Sequence[Split], dtype_bytes: int, free: int) -> None:
    """Raises ConfigError if the weights of all workers, which share the host's memory, exceed `free` bytes.

    On a CPU, `start_plan.py` checks the exact numbers when the files are open.
    """
    needed = sum(worker_weight_bytes(files.spec, split, dtype_bytes) for split in splits)
    if needed > free:
        raise weights_do_not_fit(files, needed, free, len(splits))


def weights_do_not_fit(
    files: ModelFiles, needed: int, free: int, workers: int, *, packed_bytes: int = 0
) -> ConfigError:
    """Returns the error for weights of `needed` bytes in host memory, of which `free` bytes are free.

    `packed_bytes` of the needed bytes are packed copies.
    """
    of_workers = f" for {workers} workers" if workers > 1 else ""
    other_ways = "use a smaller model, another --dtype, or a machine with more memory"
    if needed - packed_bytes <= free:
        other_ways = f"use --no-pack-weights, which saves {show_bytes(packed_bytes)}"
    return ConfigError(
        f"{files.path}: the weights take {show_bytes(needed)} of memory{of_workers}, but only {show_bytes(free)} are "
        f"free; {other_ways}"
    )


def sizes_that_fit(config: EngineConfig, spec: ModelSpec, free: int) -> list[str]:
    """Returns the flags that divide the weights over more GPUs: for each kind of parallelism, the smallest number of
    GPUs above the configured one at which the weights take at most `free` bytes of each GPU."""
    dtype_bytes = DTYPE_BYTES[dtype_name(config.dtype, spec, "cuda")]
    ways: list[tuple[str, Callable[[ModelSpec, int], None], Callable[[int], Split]]] = [
        ("--tensor-parallel-size", check_tensor_parallel, lambda size: Split(tp_size=size)),
        ("--data-parallel-size", check_data_parallel, lambda size: Split(dp_size=size)),
    ]
    found = []
    for flag, check, split in ways if spec.moe is not None else ways[:1]:
        for size in range(config.workers + 1, MAX_SUGGESTED_SIZE + 1):
            with suppress(ConfigError):
                check(spec, size)
                if worker_weight_bytes(spec, split(size), dtype_bytes) <= free:
                    found.append(f"{flag} {size}")
                    break
    return found


def context_length(config: EngineConfig, model_context: int) -> int:
    """Returns the requested context length, by default the model's. Raises ConfigError if it exceeds the model's."""
    context = config.max_model_len or model_context
    if context > model_context:
        raise ConfigError(
            f"--max-model-len {context} exceeds the {model_context} tokens of this model's context; lower it"
        )
    return context


def kv_storage(config: EngineConfig, spec: ModelSpec) -> KvStorage:
    """Returns how KV is stored. Raises ConfigError if fp8 is configured for a model whose rows have no fp8 layout."""
    if not spec.attention.has_fp8_rows:
        for flag, value in (("--kv-dtype", config.kv_dtype), ("--index-dtype", config.index_dtype)):
            if value != "auto":
                raise ConfigError(f"{flag} {value} needs a model with latent KV (MLA); leave it out for this model")
    return KvStorage(fp8_rows=config.kv_dtype == "fp8", fp8_keys=config.index_dtype == "fp8")


def hot_slots(config: EngineConfig, topk: int | None) -> int:
    """Returns the number of slots in a hot buffer, or 0 if no request can be tiered.

    `topk` is None if the model attends to all rows. Raises ConfigError if the setting does not suit the model.
    """
    if topk is None:
        for flag, is_set in (("--tiers always", config.tiers == "always"), ("--hot-slots", config.hot_slots)):
            if is_set:
                raise ConfigError(
                    f"{flag} needs a model with sparse attention, but this model attends to all rows; leave it out"
                )
        return 0
    if config.tiers == "off":
        return 0
    slots = (SLOTS_PER_TOPK + config.max_drafts) * topk if config.hot_slots is None else config.hot_slots
    selected = (1 + config.max_drafts) * topk
    if slots < topk:
        raise ConfigError(f"--hot-slots {slots} cannot hold the {topk} rows that one step selects; raise it")
    if slots < selected:
        raise ConfigError(
            f"--hot-slots {slots} cannot hold the {selected} rows that one step with --speculate {config.max_drafts} "
            f"selects ({topk} for each of {1 + config.max_drafts} tokens); raise it, or lower --speculate"
        )
    return slots


def model_splits(config: EngineConfig, spec: ModelSpec) -> list[Split]:
    """Returns each worker's part of the model, in the order of worker numbers: all ranks of a stage, then the next.

    Raises ConfigError if the model cannot be divided in this way.
    """
    replicas, tp_size = config.data_parallel_size, config.tensor_parallel_size
    if replicas > 1:
        check_data_parallel(spec, replicas)
        return [Split(dp_rank=rank, dp_size=replicas) for rank in range(replicas)]
    check_tensor_parallel(spec, tp_size)
    stages = stage_layers(spec, config.pipeline_parallel_size, config.stage_layers)
    return [Split(tp_rank=rank, tp_size=tp_size, layers=layers) for layers in stages for rank in range(tp_size)]
