"""Sizes the KV pools and the longest context, once, at start-up."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError
from hotset.base.memory_shares import cpu_pool_bytes, gpu_pool_bytes, host_store_bytes
from hotset.base.units import GIB, ceil_div, show_bytes
from hotset.kernels.swap_in import MAX_SLOTS
from hotset.memory.device_pool import KvShape
from hotset.memory.geometry import Geometry

SLOTS_PER_TOPK = 2  # the default number of hot slots
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class KvBudget:
    """The sizes that the engine runs with: those of the configuration, or measured ones."""

    geometry: Geometry
    device_pages: int
    host_pages: int  # 0 without a host store
    max_model_len: int

    @property
    def tiers(self) -> bool:
        return self.host_pages > 0 and self.geometry.slots > 0

    @property
    def resident_len(self) -> int:
        """The longest context that can be resident."""
        return min(self.max_model_len, _longest(self.geometry.resident_pages, self.device_pages, self.max_model_len))

    def requests(self, tokens: int) -> int:
        """Returns how many contexts of `tokens` rows can run at the same time."""
        geometry, pages = self.geometry, self.device_pages
        at_once = pages // geometry.resident_pages(tokens)
        if self.tiers:
            # The last request is prefilled through a workspace, which it releases afterwards.
            extra = geometry.streamed_pages(tokens) - geometry.tiered_pages(tokens)
            at_once = max(at_once, (pages - extra) // geometry.tiered_pages(tokens))
        return at_once if self.host_pages == 0 else min(at_once, self.host_pages // geometry.row_pages(tokens))


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """One worker's part of the KV, and the free memory of its device, in bytes."""

    shape: KvShape
    free: int
    owns_store: bool = True  # False if its rows are in the host store of another worker


def kv_budget(config: EngineConfig, shape: KvShape, model_context: int, device: torch.device) -> KvBudget:
    """Sizes the pools of an engine with one worker."""
    return shared_budget(config, [WorkerMemory(shape, free_bytes(device))], model_context, device)


def shared_budget(
    config: EngineConfig, parts: Sequence[WorkerMemory], model_context: int, device: torch.device
) -> KvBudget:
    """Sizes the pools so that they fit every worker, and finds the longest context that fits them.

    Raises ConfigError, with the numbers and the flag to change, if the configured sizes do not fit.
    """
    geometry = _common(config, [part.shape for part in parts])
    wanted = config.max_model_len or model_context
    if wanted > model_context:
        raise ConfigError(
            f"--max-model-len {wanted} exceeds the {model_context} tokens of this model's context; lower it"
        )
    device_pages, flag = _device_pages(config, geometry, wanted, device, parts)
    host_pages, host_flag = _host_pages(config, geometry, wanted, device_pages, device, parts)
    holds = _longest(geometry.resident_pages, device_pages, wanted)
    if geometry.slots:
        tiered = min(
            _longest(geometry.streamed_pages, device_pages, wanted),
            _longest(geometry.tiered_pages, device_pages, wanted),
        )
        holds = tiered if config.tiers == "always" else max(holds, tiered)
    token_bytes = sum(part.shape.token_bytes for part in parts if part.owns_store)
    _check_length(config, token_bytes, holds, wanted, "device", flag)
    if host_pages:
        on_host = min(wanted, host_pages * config.page_rows)
        _check_length(config, token_bytes, on_host, wanted, "host", host_flag)
        holds = min(holds, on_host)
    return KvBudget(geometry, device_pages, host_pages, min(wanted, holds))


def _common(config: EngineConfig, shapes: Sequence[KvShape]) -> Geometry:
    """Returns one geometry for all workers. They share page numbers, so a page holds what the smallest part allows."""
    geometries = [shape.geometry(config.page_rows, _slots(config, shape)) for shape in shapes]
    layers = min(geometry.layers for geometry in geometries)
    keys_per_page = min(geometry.keys_per_page for geometry in geometries)
    return replace(geometries[0], layers=layers, keys_per_page=keys_per_page)


def _slots(config: EngineConfig, shape: KvShape) -> int:
    """Returns the slots of a hot buffer, or 0 if no request can be tiered."""
    if not shape.groups:
        for name, value in (("--tiers always", config.tiers == "always"), ("--hot-slots", config.hot_slots)):
            if value:
                raise ConfigError(f"{name} needs a model with sparse attention; this one attends to all rows")
        return 0
    if config.tiers == "off":
        return 0
    slots = SLOTS_PER_TOPK * shape.topk if config.hot_slots is None else config.hot_slots
    if slots < shape.topk:
        raise ConfigError(f"--hot-slots {slots} cannot hold the {shape.topk} rows that one step selects; raise it")
    if slots > MAX_SLOTS:
        raise ConfigError(f"--hot-slots {slots} exceeds the maximum of {MAX_SLOTS}; lower it")
    return slots


def _device_pages(
    config: EngineConfig, geometry: Geometry, wanted: int, device: torch.device, parts: Sequence[WorkerMemory]
) -> tuple[int, str]:
    """Returns the pages of every worker's device pool, and the flag that changes them."""
    page_bytes = [part.shape.layers * geometry.layer_page_bytes for part in parts]
    if config.device_kv_tokens is not None:
        pages, flag = geometry.resident_pages(config.device_kv_tokens), "--device-kv-tokens"
    elif config.device_kv_gib is not None:
        pages, flag = int(config.device_kv_gib * GIB) // max(page_bytes), "--device-kv-gib"
    else:  # no more than all seats could fill
        flag, most = "--device-kv-gib", config.max_num_seqs * geometry.resident_pages(wanted)
        shares = (_default_share(part.free, device, len(parts)) for part in parts)
        pages = min(most, *(share // nbytes for share, nbytes in zip(shares, page_bytes, strict=True)))
    for part, nbytes in zip(parts, page_bytes, strict=True):
        if pages * nbytes > part.free:
            raise ConfigError(
                f"{flag} needs {show_bytes(pages * nbytes)} of memory, but only {show_bytes(part.free)} are free; "
                "lower it"
            )
    return pages, flag


def _host_pages(
    config: EngineConfig,
    geometry: Geometry,
    wanted: int,
    device_pages: int,
    device: torch.device,
    parts: Sequence[WorkerMemory],
) -> tuple[int, str]:
    """Returns the pages of the host stores, and the flag that changes them.

    There are none without tiers. Otherwise there are never fewer than the contexts on the device can fill, because
    every row on the device also has its place on the host.
    """
    if config.tiers == "off":
        return 0, "--tiers"
    page_bytes = sum(part.shape.token_bytes for part in parts if part.owns_store) * config.page_rows
    on_devices = sum(part.shape.layers for part in parts) * geometry.layer_page_bytes * device_pages
    free = free_bytes(CPU) - (on_devices if device.type == "cpu" else 0)  # the same memory holds both pools
    on_device = _most_row_pages(geometry, device_pages)
    if config.host_kv_tokens is not None:
        pages, flag = ceil_div(config.host_kv_tokens, config.page_rows), "--host-kv-tokens"
    elif config.host_kv_gib is not None:
        pages, flag = int(config.host_kv_gib * GIB) // page_bytes, "--host-kv-gib"
    else:
        flag = "--host-kv-gib"
        share = cpu_pool_bytes(free) if device.type == "cpu" else host_store_bytes(free)
        pages = max(on_device, min(share // page_bytes, config.max_num_seqs * geometry.row_pages(wanted)))
    if pages < on_device:
        raise ConfigError(
            f"{flag} gives a host store of {pages * config.page_rows} tokens, fewer than the "
            f"{on_device * config.page_rows} that the device holds; raise it, or use --tiers off"
        )
    if pages * page_bytes > free:
        raise ConfigError(
            f"{flag} needs {show_bytes(pages * page_bytes)} of host memory, but only {show_bytes(max(0, free))} are "
            "free; lower it, or use --tiers off"
        )
    return pages, flag


def _most_row_pages(geometry: Geometry, pages: int) -> int:
    """Returns how many of `pages` device pages can hold rows at most, however long the contexts are."""
    if not geometry.keys_per_page:
        return pages
    served = ceil_div(geometry.keys_per_page, geometry.page_rows)  # row pages per page of index keys
    return pages * served // (served + 1)


def _check_length(config: EngineConfig, token_bytes: int, holds: int, wanted: int, where: str, flag: str) -> None:
    if (config.max_model_len is not None and holds < wanted) or holds < 2:
        raise ConfigError(
            f"the KV memory of the {where} holds {holds} tokens, fewer than one request of {wanted} needs; "
            f"raise {flag} ({show_bytes(token_bytes)} per token) or lower --max-model-len"
        )


def _longest(pages_of: Callable[[int], int], pages: int, most: int) -> int:
    """Returns the longest context, up to `most` tokens, that takes at most `pages` pages."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if pages_of(middle) <= pages else (low, middle - 1)
    return low


def _default_share(free: int, device: torch.device, workers: int) -> int:
    """Returns the default size of one worker's device pool, in bytes. Workers on a CPU share its memory."""
    return gpu_pool_bytes(free) if device.type == "cuda" else cpu_pool_bytes(free) // workers


def free_bytes(device: torch.device) -> int:
    """Returns the bytes that could be allocated on the device now."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free)
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
