"""How many pages the device gets, and how long a context may grow: measured once, at start-up."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError
from hotset.base.units import GIB, ceil_div, show_bytes

CPU_SHARE = 0.25  # of the memory that is free, where nobody said how much
CPU_MOST_BYTES = 4 * GIB
CUDA_SHARE = 0.9  # of what the weights left free; the rest is for activations


@dataclass(frozen=True, slots=True)
class KvBudget:
    """What the engine runs with: the configuration, made definite by what was measured."""

    pages: int
    max_model_len: int


def kv_budget(config: EngineConfig, token_bytes: int, model_context: int, device: torch.device) -> KvBudget:
    """Pages that fit, and the longest context that fits them. ConfigError, with the numbers and the flag to change,
    if what was asked for cannot be met."""
    page_bytes = token_bytes * config.page_rows
    if config.device_kv_tokens is not None:
        pages, flag = ceil_div(config.device_kv_tokens, config.page_rows), "--device-kv-tokens"
    elif config.device_kv_gib is not None:
        pages, flag = int(config.device_kv_gib * GIB) // page_bytes, "--device-kv-gib"
    else:
        pages, flag = _default_bytes(device) // page_bytes, "--device-kv-gib"
    wanted = config.max_model_len or model_context
    if wanted > model_context:
        raise ConfigError(f"--max-model-len {wanted} exceeds the {model_context} tokens that this model was made for")
    # Without a length asked for, more pages than all seats could fill would be memory for nothing.
    if config.device_kv_tokens is None and config.device_kv_gib is None:
        pages = min(pages, config.max_num_seqs * ceil_div(wanted, config.page_rows))
    free = free_bytes(device)
    if pages * page_bytes > free:
        raise ConfigError(
            f"{flag} asks for {show_bytes(pages * page_bytes)} of KV, but only {show_bytes(free)} are free; lower it"
        )
    holds = pages * config.page_rows
    if (config.max_model_len is not None and holds < wanted) or holds < 2:
        raise ConfigError(
            f"the KV memory holds {holds} tokens, fewer than one request of {wanted} needs; raise {flag} "
            f"({show_bytes(token_bytes)} per token) or lower --max-model-len"
        )
    return KvBudget(pages, min(wanted, holds))


def _default_bytes(device: torch.device) -> int:
    free = free_bytes(device)
    return int(free * CUDA_SHARE) if device.type == "cuda" else min(int(free * CPU_SHARE), CPU_MOST_BYTES)


def free_bytes(device: torch.device) -> int:
    """Memory that could be allocated on the device now."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free)
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
