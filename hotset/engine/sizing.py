"""How many pages each pool gets, and how long a context may grow: measured once, at start-up."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError
from hotset.base.units import GIB, ceil_div, show_bytes
from hotset.kernels.swap_in import MOST_SLOTS
from hotset.memory.device_pool import KvShape
from hotset.memory.geometry import Geometry

CPU_SHARE = 0.25  # of the memory that is free, where nobody said how much
CPU_MOST_BYTES = 4 * GIB
CUDA_SHARE = 0.9  # of what the weights left free; the rest is for activations
HOST_SHARE = 0.5  # of free host memory, beside a GPU
SLOTS_PER_TOPK = 2


@dataclass(frozen=True, slots=True)
class KvBudget:
    """What the engine runs with: the configuration, made definite by what was measured."""

    geometry: Geometry
    device_pages: int
    host_pages: int  # 0: there is no host store
    max_model_len: int

    @property
    def tiers(self) -> bool:
        return self.host_pages > 0 and self.geometry.slots > 0

    @property
    def resident_len(self) -> int:
        """The longest context that can be resident."""
        return min(self.max_model_len, _longest(self.geometry.resident_pages, self.device_pages, self.max_model_len))

    def requests(self, tokens: int) -> int:
        """How many contexts of `tokens` rows can run at once."""
        geometry, pages = self.geometry, self.device_pages
        at_once = pages // geometry.resident_pages(tokens)
        if self.tiers:
            # The last to come in is prefilled through a workspace, which it then gives up.
            extra = geometry.streamed_pages(tokens) - geometry.tiered_pages(tokens)
            at_once = max(at_once, (pages - extra) // geometry.tiered_pages(tokens))
        return at_once if self.host_pages == 0 else min(at_once, self.host_pages // geometry.row_pages(tokens))


def kv_budget(config: EngineConfig, shape: KvShape, model_context: int, device: torch.device) -> KvBudget:
    """Pages that fit, and the longest context that fits them. ConfigError, with the numbers and the flag to change,
    if what was asked for cannot be met."""
    geometry = shape.geometry(config.page_rows, _slots(config, shape))
    wanted = config.max_model_len or model_context
    if wanted > model_context:
        raise ConfigError(f"--max-model-len {wanted} exceeds the {model_context} tokens that this model was made for")
    device_pages, flag = _device_pages(config, geometry, wanted, device)
    host_pages, host_flag = _host_pages(config, shape, geometry, wanted, device_pages, device)
    holds = _longest(geometry.resident_pages, device_pages, wanted)
    if geometry.slots:
        tiered = min(
            _longest(geometry.streamed_pages, device_pages, wanted),
            _longest(geometry.tiered_pages, device_pages, wanted),
        )
        holds = tiered if config.tiers == "always" else max(holds, tiered)
    _check_length(config, shape, holds, wanted, "device", flag)
    if host_pages:
        on_host = min(wanted, host_pages * config.page_rows)
        _check_length(config, shape, on_host, wanted, "host", host_flag)
        holds = min(holds, on_host)
    return KvBudget(geometry, device_pages, host_pages, min(wanted, holds))


def _slots(config: EngineConfig, shape: KvShape) -> int:
    """Of a hot buffer; 0 where no request will be tiered."""
    if not shape.groups:
        for name, value in (("--tiers always", config.tiers == "always"), ("--hot-slots", config.hot_slots)):
            if value:
                raise ConfigError(f"{name} needs a model that selects its rows; this one attends to all of them")
        return 0
    if config.tiers == "off":
        return 0
    slots = SLOTS_PER_TOPK * shape.topk if config.hot_slots is None else config.hot_slots
    if slots < shape.topk:
        raise ConfigError(f"--hot-slots {slots} cannot hold the {shape.topk} rows that one step selects; raise it")
    if slots > MOST_SLOTS:
        raise ConfigError(f"--hot-slots {slots} is more than the {MOST_SLOTS} that can be numbered; lower it")
    return slots


def _device_pages(config: EngineConfig, geometry: Geometry, wanted: int, device: torch.device) -> tuple[int, str]:
    """Pages of the device pool, and the flag that changes them."""
    most = config.max_num_seqs * geometry.resident_pages(wanted)
    if config.device_kv_tokens is not None:
        pages, flag = geometry.resident_pages(config.device_kv_tokens), "--device-kv-tokens"
    elif config.device_kv_gib is not None:
        pages, flag = int(config.device_kv_gib * GIB) // geometry.page_bytes, "--device-kv-gib"
    else:  # more than all seats could fill would be memory for nothing
        pages, flag = min(_default_bytes(device) // geometry.page_bytes, most), "--device-kv-gib"
    free = free_bytes(device)
    if pages * geometry.page_bytes > free:
        raise ConfigError(
            f"{flag} asks for {show_bytes(pages * geometry.page_bytes)} of KV, but only {show_bytes(free)} are free; "
            "lower it"
        )
    return pages, flag


def _host_pages(
    config: EngineConfig, shape: KvShape, geometry: Geometry, wanted: int, device_pages: int, device: torch.device
) -> tuple[int, str]:
    """Pages of the host store, and the flag that changes them: 0 without tiers, but otherwise never fewer than contexts
    on the device could fill, or it would lower what the device holds."""
    if config.tiers == "off":
        return 0, "--tiers"
    page_bytes = shape.token_bytes * config.page_rows
    beside = device_pages * geometry.page_bytes if device.type == "cpu" else 0  # comes out of the same memory
    free = free_bytes(torch.device("cpu")) - beside
    on_device = _most_row_pages(geometry, device_pages)
    if config.host_kv_tokens is not None:
        pages, flag = ceil_div(config.host_kv_tokens, config.page_rows), "--host-kv-tokens"
    elif config.host_kv_gib is not None:
        pages, flag = int(config.host_kv_gib * GIB) // page_bytes, "--host-kv-gib"
    else:
        flag = "--host-kv-gib"
        share = min(CPU_MOST_BYTES, int(free * CPU_SHARE)) if device.type == "cpu" else int(free * HOST_SHARE)
        pages = max(on_device, min(share // page_bytes, config.max_num_seqs * geometry.row_pages(wanted)))
    if pages < on_device:
        raise ConfigError(
            f"{flag} makes a host store of {pages * config.page_rows} tokens, fewer than the "
            f"{on_device * config.page_rows} that the device holds; raise it, or use --tiers off"
        )
    if pages * page_bytes > free:
        raise ConfigError(
            f"{flag} asks for {show_bytes(pages * page_bytes)} of host memory, but only {show_bytes(max(0, free))} are "
            "free; lower it, or use --tiers off"
        )
    return pages, flag


def _most_row_pages(geometry: Geometry, pages: int) -> int:
    """The most of so many device pages that can hold rows, however long the contexts are."""
    if not geometry.keys_per_page:
        return pages
    served = ceil_div(geometry.keys_per_page, geometry.page_rows)  # row pages for which one page of keys is enough
    return pages * served // (served + 1)


def _check_length(config: EngineConfig, shape: KvShape, holds: int, wanted: int, where: str, flag: str) -> None:
    if (config.max_model_len is not None and holds < wanted) or holds < 2:
        raise ConfigError(
            f"the KV memory of the {where} holds {holds} tokens, fewer than one request of {wanted} needs; "
            f"raise {flag} ({show_bytes(shape.token_bytes)} per token) or lower --max-model-len"
        )


def _longest(pages_of: Callable[[int], int], pages: int, most: int) -> int:
    """The longest context, up to `most` tokens, that takes at most so many pages."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if pages_of(middle) <= pages else (low, middle - 1)
    return low


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
