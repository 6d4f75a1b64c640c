"""Decides, once at start-up, the sizes of the KV pools and the maximum context length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError, KvDoesNotFit
from hotset.base.host_memory import host_memory
from hotset.base.memory_shares import MAX_HOST_STORE_SHARE, DeviceMemory, cpu_pool_bytes, host_store_bytes
from hotset.base.units import GIB, ceil_div, show_bytes
from hotset.engine.drafts.settings import DraftSettings
from hotset.engine.model_checks import context_length, hot_slots
from hotset.kernels import MAX_POSITIONS
from hotset.kernels.swap_in import MAX_SLOTS
from hotset.memory.device_pool import KvShape
from hotset.memory.geometry import Geometry
from hotset.models.split import Split

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class KvBudget:
    """The sizes of the KV memory, as configured or derived from the free memory."""

    geometry: Geometry
    device_pages: int
    host_pages: int  # 0 if there is no host store
    max_model_len: int

    @property
    def device_bytes(self) -> int:
        """The size of one worker's device pool."""
        return self.device_pages * self.geometry.page_bytes

    @property
    def tiers(self) -> bool:
        return self.host_pages > 0 and self.geometry.slots > 0

    @property
    def resident_len(self) -> int:
        """The longest context that can be resident."""
        return min(
            self.max_model_len, _largest_count(self.geometry.resident_pages, self.device_pages, self.max_model_len)
        )

    def requests(self, tokens: int) -> int:
        """Returns how many requests with `tokens` tokens each fit in the KV memory at the same time."""
        return max(self.resident_requests(tokens), self.tiered_requests(tokens))

    def resident_requests(self, tokens: int) -> int:
        """Returns how many requests with `tokens` tokens each can be resident at the same time."""
        return self._at_most_on_host(self.device_pages // self.geometry.resident_pages(tokens), tokens)

    def tiered_requests(self, tokens: int) -> int:
        """Returns how many requests with `tokens` tokens each can be tiered at the same time. 0 without tiers."""
        if not self.tiers:
            return 0
        # During its prefill, the last request needs extra pages for a workspace, which it releases afterwards.
        extra = self.geometry.streamed_pages(tokens) - self.geometry.tiered_pages(tokens)
        at_once = max(0, (self.device_pages - extra) // self.geometry.tiered_pages(tokens))
        return self._at_most_on_host(at_once, tokens)

    def _at_most_on_host(self, requests: int, tokens: int) -> int:
        """Returns `requests`, or fewer if the host store has no room for so many."""
        return requests if self.host_pages == 0 else min(requests, self.host_pages // self.geometry.row_pages(tokens))


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """One worker's part of the KV, and the memory of its device that weights and steps leave free for KV."""

    shape: KvShape
    free: int
    owns_store: bool = True  # False if the worker shares the host store of another worker
    node: str = ""  # name of the worker's node; workers of one node divide its host memory
    host_free: int | None = None  # free bytes of the node's host memory; None: measured on this machine


def store_writer(split: Split, shape: KvShape) -> tuple[int, int]:
    """Returns a worker's index among the writers of its host store, and the number of these writers.

    Tensor parallel ranks of a DSA model have the same rows and share one host store. Ranks of a GQA model have rows of
    different heads, and each has its own host store.
    """
    has_same_rows = shape.key is not None
    return (split.tp_rank, split.tp_size) if has_same_rows else (0, 1)


def kv_budget(config: EngineConfig, shape: KvShape, model_context: int, device: torch.device) -> KvBudget:
    """Sizes the pools of one worker for tests and benchmarks that have loaded a model of their own.

    On a GPU, the memory above --gpu-memory-utilization is left to steps.
    """
    memory, share = device_memory(device), config.gpu_memory_utilization if device.type == "cuda" else 1.0
    free = max(0, memory.free - int(memory.total * (1 - share)))
    return shared_budget(config, [WorkerMemory(shape, free)], model_context, device)


def shared_budget(
    config: EngineConfig,
    workers: Sequence[WorkerMemory],
    model_context: int,
    device: torch.device,
    host_free: int | None = None,
) -> KvBudget:
    """Chooses pool sizes that fit every worker on every node, and the longest context that fits these pools.

    `host_free`, used only with GPUs, is the free host memory. By default, it is what the workers have measured on their
    nodes. Raises ConfigError, with the numbers and the flag to change, if configured sizes do not fit, or if the pools
    cannot hold a context of two tokens.
    """
    geometry = _common_geometry(config, [worker.shape for worker in workers], device)
    _check_drafts(config, geometry, device)
    context = context_length(config, model_context)
    by_node: dict[str, list[WorkerMemory]] = {}
    for worker in workers:
        by_node.setdefault(worker.node, []).append(worker)
    nodes = [_Node(config, geometry, context, device, on_node, host_free) for on_node in by_node.values()]
    device_pages, flag = min(node.device_pages() for node in nodes)
    host_pages, host_flag = min(node.host_pages(device_pages) for node in nodes)
    longest = _largest_count(geometry.resident_pages, device_pages, context)
    if geometry.slots:
        tiered = min(
            _largest_count(geometry.streamed_pages, device_pages, context),
            _largest_count(geometry.tiered_pages, device_pages, context),
        )
        longest = tiered if config.tiers == "always" else max(longest, tiered)
    token_bytes = max(node.token_bytes for node in nodes)
    _check_context(config, token_bytes, longest, context, "device", flag)
    if host_pages:
        longest_on_host = min(context, host_pages * config.page_rows)
        _check_context(config, token_bytes, longest_on_host, context, "host", host_flag)
        longest = min(longest, longest_on_host)
    return KvBudget(geometry, device_pages, host_pages, min(context, longest))


class _Node:
    """Sizes the pools of the workers on one node, which divide its host memory."""

    def __init__(
        self,
        config: EngineConfig,
        geometry: Geometry,
        context: int,
        device: torch.device,
        workers: Sequence[WorkerMemory],
        host_free: int | None,
    ) -> None:
        """`host_free` replaces the free host memory that the workers have measured, if it is given."""
        self._config, self._geometry, self._context, self._workers = config, geometry, context, workers
        self._on_gpu = device.type == "cuda"
        measured = [worker.host_free for worker in workers if worker.host_free is not None]
        self._host_free = host_free if host_free is not None else min(measured, default=free_bytes(CPU))
        # the bytes of one token in all host stores of the node
        self.token_bytes = sum(worker.shape.token_bytes for worker in workers if worker.owns_store)

    def device_pages(self) -> tuple[int, str]:
        """Returns the number of pages of the device pool of each worker, and the flag that changes it."""
        config, geometry, workers = self._config, self._geometry, self._workers
        page_bytes = [worker.shape.layers * geometry.layer_page_bytes for worker in workers]
        if config.device_kv_tokens is not None:
            pages, flag = geometry.resident_pages(config.device_kv_tokens), "--device-kv-tokens"
        elif config.device_kv_gib is not None:
            pages, flag = int(config.device_kv_gib * GIB) // max(page_bytes), "--device-kv-gib"
        else:
            flag = "--gpu-memory-utilization" if self._on_gpu else "--device-kv-gib"
            usable = config.max_num_seqs * geometry.resident_pages(self._context)
            shares = [
                worker.free if self._on_gpu else cpu_pool_bytes(worker.free) // len(workers) for worker in workers
            ]
            pages = min(usable, *(share // nbytes for share, nbytes in zip(shares, page_bytes, strict=True)))
            if self._on_gpu and config.tiers != "off":
                # Every row on the device also has a host page.
                pages = _largest_count(geometry.max_row_pages, self._max_host_pages(), pages)
        for worker, nbytes in zip(workers, page_bytes, strict=True):
            if pages * nbytes > worker.free:
                raise ConfigError(
                    f"{flag} needs {show_bytes(pages * nbytes)} of memory, but only {show_bytes(worker.free)} are "
                    f"free; lower it{', or raise --gpu-memory-utilization' if self._on_gpu else ''}"
                )
        return pages, flag

    def _max_host_pages(self) -> int:
        """Returns the maximum number of host pages. It limits the default size of a GPU's device pool, because every
        row on the device also has a host page."""
        config = self._config
        if config.host_kv_tokens is not None:
            return ceil_div(config.host_kv_tokens, config.page_rows)
        nbytes = MAX_HOST_STORE_SHARE * self._host_free if config.host_kv_gib is None else config.host_kv_gib * GIB
        return int(nbytes) // (self.token_bytes * config.page_rows)

    def host_pages(self, device_pages: int) -> tuple[int, str]:
        """Returns the number of pages of the host stores, and the flag that changes it.

        With `--tiers off` it is 0. Otherwise it is at least the number of device pages that can hold rows, because
        every row on the device also has a host page.
        """
        config, geometry, workers = self._config, self._geometry, self._workers
        if config.tiers == "off":
            return 0, "--tiers"
        page_bytes = self.token_bytes * config.page_rows
        free = self._host_free
        if not self._on_gpu:  # the device pools are in host memory too
            device_bytes = sum(worker.shape.layers for worker in workers) * geometry.layer_page_bytes * device_pages
            free = min(worker.free for worker in workers) - device_bytes
        min_pages = geometry.max_row_pages(device_pages)
        if config.host_kv_tokens is not None:
            pages, flag = ceil_div(config.host_kv_tokens, config.page_rows), "--host-kv-tokens"
        elif config.host_kv_gib is not None:
            pages, flag = int(config.host_kv_gib * GIB) // page_bytes, "--host-kv-gib"
        else:
            flag = "--host-kv-gib"
            share = host_store_bytes(free) if self._on_gpu else cpu_pool_bytes(free)
            wanted = config.max_num_seqs * geometry.row_pages(self._context)
            pages = max(min_pages, min(share // page_bytes, wanted))
        if pages < min_pages:
            raise ConfigError(
                f"{flag} gives a host store of {pages * config.page_rows} tokens, fewer than the "
                f"{min_pages * config.page_rows} that the device can hold; raise it, lower --device-kv-gib, or use "
                "--tiers off"
            )
        if pages * page_bytes > free:
            note = "" if workers[0].node else host_memory().limit_note
            is_set = config.host_kv_tokens is not None or config.host_kv_gib is not None
            needs = f"{flag} needs" if is_set else "the host store must hold what the device can hold, which takes"
            raise ConfigError(
                f"{needs} {show_bytes(pages * page_bytes)} of host memory, but only {show_bytes(max(0, free))} are "
                f"free{note}; lower {flag if is_set else '--device-kv-gib'}, or use --tiers off"
            )
        return pages, flag


def plans_in_flight(config: EngineConfig, device: torch.device) -> int:
    """Returns how many plans an engine keeps submitted."""
    return config.plans_in_flight or max(config.pipeline_parallel_size, 1 if device.type == "cpu" else 2)


def _common_geometry(config: EngineConfig, shapes: Sequence[KvShape], device: torch.device) -> Geometry:
    """Returns one geometry for all workers. They share page numbers, so a context has the same number of key pages and
    the same number of workspace pages on every worker: the maximum over the workers. A worker with fewer index groups
    per layer leaves the ends of its key pages unused."""
    # Earlier plans in flight can have unverified drafts only if the worker keeps its drafts.
    ahead = plans_in_flight(config, device) - 1 if DraftSettings.of(config).kept_in_worker else 0
    own = [shape.geometry(config.page_rows, _slots(config, shape)) for shape in shapes]
    geometries = [
        replace(geometry, max_drafts=config.max_drafts, max_unverified=ahead * config.max_drafts) for geometry in own
    ]
    layers = min(geometry.layers for geometry in geometries)
    most_keys = max(geometries, key=lambda geometry: Fraction(geometry.key_groups, geometry.blocks_per_page))
    most_blocks = max(geometry.max_blocks_of_group for geometry in geometries)
    return replace(most_keys, layers=layers, max_blocks_of_group=most_blocks)


def _slots(config: EngineConfig, shape: KvShape) -> int:
    """Returns the number of slots in a hot buffer, or 0 if no request can be tiered."""
    slots = hot_slots(config, shape.topk if shape.groups else None)
    if slots > MAX_SLOTS:
        if config.hot_slots is None:
            raise ConfigError(
                f"--speculate {config.max_drafts} needs hot buffers of {slots} slots, but {MAX_SLOTS} are the maximum; "
                "lower it"
            )
        raise ConfigError(f"--hot-slots {slots} exceeds the maximum of {MAX_SLOTS}; lower it")
    return slots


def _check_drafts(config: EngineConfig, geometry: Geometry, device: torch.device) -> None:
    """Raises ConfigError if a GPU cannot swap in all rows that a step with drafts selects."""
    limit = MAX_POSITIONS // geometry.topk - 1 if geometry.slots else config.max_drafts
    if device.type == "cuda" and config.max_drafts > limit:
        raise ConfigError(
            f"--speculate {config.max_drafts} swaps in up to {(1 + config.max_drafts) * geometry.topk} rows of a "
            f"request at once, more than the {MAX_POSITIONS} that a GPU supports; lower it to {limit}, or use --tiers "
            "off"
        )


def _check_context(config: EngineConfig, token_bytes: int, longest: int, context: int, where: str, flag: str) -> None:
    """Raises ConfigError if the configured context, or a context of two tokens, does not fit."""
    if (config.max_model_len is not None and longest < context) or longest < 2:
        shorter = f" to {longest}" if longest >= 2 else ""
        raise KvDoesNotFit(
            f"the KV memory of the {where} holds {longest} tokens, fewer than one request of {context} tokens needs; "
            f"raise {flag} ({show_bytes(token_bytes)} per token) or lower --max-model-len{shorter}"
        )


def _largest_count(pages_of: Callable[[int], int], pages: int, limit: int) -> int:
    """Returns the largest count, up to `limit`, for which `pages_of(count)` is at most `pages`."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if pages_of(middle) <= pages else (low, middle - 1)
    return low


def free_bytes(device: torch.device) -> int:
    """Returns the free bytes of the device. On a CPU, limits of control groups count too (`host_memory`)."""
    return device_memory(device).free


def device_memory(device: torch.device) -> DeviceMemory:
    """Measures the memory of the device. On a CPU, limits of control groups count too (`host_memory`)."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(int(total), int(free))
    memory = host_memory()
    return DeviceMemory(memory.total, memory.free)
