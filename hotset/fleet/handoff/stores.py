"""Describes an engine's KV memory to its peers: the memory that handoffs read contexts from, or write them to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hotset.base.paged_span import PagedSpan
from hotset.base.processes import ProcessIdentity
from hotset.engine.ports import Route
from hotset.engine.workers.executor import HostShard, ServingWorker
from hotset.fleet.handoff.layout import head_shards, whole_rows
from hotset.fleet.handoff.messages import MemoryRange, Store, StoreName
from hotset.fleet.handoff.packing import CPU, StagingMemory
from hotset.fleet.handoff.routes import DEVICE_SHARE, EXPENSIVE_WRITE_SECONDS, find_route
from hotset.fleet.transfer.api import MemoryKind, Region
from hotset.fleet.transfer.workers import engine_address
from hotset.memory.device_pool import DevicePool
from hotset.memory.host_store import HostStore
from hotset.tiers.ledger import LandingPolicy

DEVICE = "device"  # the name of the device pool as a store
KEYS_ON_DEVICE = ", keys on device"  # end of the name of a host store whose index keys are in the device pool


@dataclass(frozen=True, slots=True)
class Spans:
    """Describes the rows and the index keys of a device pool or of a host store."""

    rows: PagedSpan
    keys: PagedSpan | None
    memory: MemoryKind = MemoryKind.HOST


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Describes the memory of a worker process that peers read or write. Addresses are those of the process."""

    pool: Spans | None
    host: Spans | None  # None if another worker describes it, or if the controller has mapped it
    probes: Mapping[MemoryKind, MemoryRange]  # memory for measuring routes, by kind
    staging: Mapping[MemoryKind, MemoryRange]  # memory for packed pieces, by kind
    process: ProcessIdentity | None


TransferWorker = ServingWorker[WorkerMemory]


class TransferMemory:
    """Memory of one process that is not in its stores: staging memory, or probe memory for measuring routes. This
    object must live as long as the memory is registered."""

    def __init__(self, nbytes: int, devices: Mapping[MemoryKind, torch.device], *, zeroed: bool = False) -> None:
        """Allocates `nbytes` bytes of each kind of memory, on these devices. Unless `zeroed`, the system provides host
        memory only when it is first written."""
        self._memories = {kind: StagingMemory(nbytes, device, kind) for kind, device in devices.items() if nbytes}
        for memory in self._memories.values() if zeroed else ():
            memory.zero()

    @property
    def ranges(self) -> dict[MemoryKind, MemoryRange]:
        return {kind: memory.memory_range for kind, memory in self._memories.items()}

    @property
    def regions(self) -> list[Region]:
        return [memory.region for memory in self._memories.values()]


@dataclass(frozen=True, slots=True)
class StoreShard:
    """A device pool, or a host store, of one worker or of several that share it. Peers use its engine addresses."""

    replica: int
    first_layer: int  # index of its first layer in the whole model
    kv_heads: int  # number of KV heads of the whole model if rows consist of heads, else 1
    row_bytes: int  # bytes of this shard's row that are used
    spans: Spans
    staging: MemoryRange | None = None  # staging memory in the same process and of the same kind, if any


def host_store_name(replica: int) -> StoreName:
    """Returns the name of a replica's host store."""
    return f"host {replica}" if replica else "host"


def host_stores(hosts: Sequence[StoreShard]) -> dict[StoreName, Store]:
    """Describes the host store of each replica. The keys are the names from `host_store_name`."""
    replicas = sorted({shard.replica for shard in hosts})
    return {
        host_store_name(replica): _store([shard for shard in hosts if shard.replica == replica]) for replica in replicas
    }


def device_store_name(replica: int) -> StoreName:
    """Returns the name of a replica's device pool as a store."""
    return f"{DEVICE} {replica}" if replica else DEVICE


def landing_store_name(replica: int, *, on_device: bool, keys_on_host: bool) -> StoreName:
    """Returns the name of the store in which a context lands."""
    if on_device:
        return device_store_name(replica)
    return host_store_name(replica) if keys_on_host else host_store_name(replica) + KEYS_ON_DEVICE


def landing_stores(hosts: Sequence[StoreShard], pools: Sequence[StoreShard]) -> dict[StoreName, Store]:
    """Describes the memory in which contexts can land: the host stores, the device pools, and the host stores with
    index keys in the device pools. The keys are the names from `landing_store_name`."""
    stores = host_stores(hosts)
    for replica in sorted({shard.replica for shard in pools}):
        on_device = _store([shard for shard in pools if shard.replica == replica])
        host = stores.get(host_store_name(replica))
        if host is not None:
            staging = host.staging if host.staging == on_device.staging else ()  # they can be in the same memory
            mixed = Store(host.shards, on_device.keys, on_device.key_copies, host.memory, staging)
            stores[landing_store_name(replica, on_device=False, keys_on_host=False)] = mixed
        stores[device_store_name(replica)] = on_device
    return stores


def regions(hosts: Sequence[HostStore], pool: DevicePool | None) -> list[Region]:
    """Returns the memory to register with a transfer engine: the host stores and, if given, the device pool."""
    tensors = [tensor for store in hosts for tensor in (store.rows, store.keys)]
    regions = [Region(tensor.data_ptr(), tensor.nbytes) for tensor in tensors if tensor is not None]
    if pool is not None:
        regions.append(Region(pool.bytes.data_ptr(), pool.bytes.nbytes, memory_kind(pool), pool.device.index or 0))
    return regions


def host_spans(store: HostStore) -> Spans:
    """Describes a host store, with addresses of this process."""
    keys = None if store.keys is None else _span(store.keys, store.page_rows)
    return Spans(_span(store.rows, store.page_rows), keys)


def pool_spans(pool: DevicePool) -> Spans:
    """Describes a device pool, with addresses of the process to which it belongs."""
    geometry, stride = pool.geometry, pool.shape.row.stride_bytes
    bases = tuple((layer.data_ptr(),) for layer in pool.bytes)
    rows = PagedSpan(bases, geometry.layer_page_bytes, geometry.page_rows, stride)
    if (key := pool.shape.key) is None:
        return Spans(rows, None, memory_kind(pool))
    key_bases = tuple(
        tuple(pool.bytes[layer].data_ptr() for layer in pool.shape.key_part_layers(group))
        for group in range(pool.shape.groups)
    )
    page_bytes, step = geometry.layer_page_bytes, pool.shape.key_step
    keys = PagedSpan(key_bases, page_bytes, geometry.keys_per_block, key.stride_bytes, step)
    return Spans(rows, keys.simplified(), memory_kind(pool))


def pool_shards(
    pool: DevicePool | None, workers: Sequence[TransferWorker], staging: TransferMemory | None = None
) -> list[StoreShard]:
    """Describes all device pools: the pool of this process if it is given, and the pools that workers have described.
    `staging` is the staging memory of this process."""
    own = [] if pool is None else [StoreShard(0, 0, 1, pool.shape.row.row_bytes, pool_spans(pool))]
    return [*_staged(own, staging), *_worker_shards(workers, [worker.described.pool for worker in workers])]


def host_shards(
    hosts: Sequence[HostShard], workers: Sequence[TransferWorker] = (), staging: TransferMemory | None = None
) -> list[StoreShard]:
    """Describes all host stores: the stores that this process has mapped, and the stores that workers have described.
    `staging` is the staging memory of this process."""
    mapped = [
        StoreShard(host.replica, host.first_layer, host.kv_heads, host.shape.row.row_bytes, host_spans(host.store))
        for host in hosts
    ]
    return [*_staged(mapped, staging), *_worker_shards(workers, [worker.described.host for worker in workers])]


def _worker_shards(workers: Sequence[TransferWorker], described: Sequence[Spans | None]) -> list[StoreShard]:
    """Returns the shards with engine addresses. This process has number 0, and the workers have the next numbers."""
    shards = []
    for process, (worker, spans) in enumerate(zip(workers, described, strict=True), 1):
        if spans is None:
            continue
        keys = None if spans.keys is None else in_process(spans.keys, process)
        moved = replace(spans, rows=in_process(spans.rows, process), keys=keys)
        staging = worker.described.staging.get(spans.memory)
        if staging is not None:
            staging = replace(staging, address=engine_address(process, staging.address))
        row_bytes = worker.shape.row.row_bytes
        shards.append(StoreShard(worker.replica, worker.first_layer, worker.kv_heads, row_bytes, moved, staging))
    return shards


def _staged(shards: Sequence[StoreShard], staging: TransferMemory | None) -> list[StoreShard]:
    ranges = {} if staging is None else staging.ranges
    return [replace(shard, staging=ranges.get(shard.spans.memory)) for shard in shards]


def in_process(span: PagedSpan, process: int) -> PagedSpan:
    """Returns the span with engine addresses, given the number of the process in which its own addresses are valid."""
    bases = tuple(tuple(engine_address(process, base) for base in parts) for parts in span.bases)
    return replace(span, bases=bases)


def memory_kind(pool: DevicePool) -> MemoryKind:
    """Returns the kind of the pool's memory. On a CPU, the device pool is in host memory, too."""
    return MemoryKind.DEVICE if pool.device.type == "cuda" else MemoryKind.HOST


def memory_devices(pool: DevicePool | None, *, host: bool) -> dict[MemoryKind, torch.device]:
    """Returns the device of each kind of memory: the device pool's, if there is one, and the host's if `host`."""
    devices = {MemoryKind.HOST: CPU} if host else {}
    return devices if pool is None else devices | {memory_kind(pool): pool.device}


def landing_policy(routes: Sequence[Route], default: LandingPolicy) -> LandingPolicy:
    """Chooses where contexts from a prefill worker land, by the measured routes. Returns `default` if no route to host
    memory was measured, or if peers cannot write into this engine's device pool."""

    def fastest(target: MemoryKind) -> Route | None:
        """Returns the route that the prefill worker will choose."""
        of_target = [route for route in routes if route.target == target.value]
        return max(of_target, key=lambda route: route.gb_per_s, default=None)

    host, device = fastest(MemoryKind.HOST), fastest(MemoryKind.DEVICE)
    if host is None or not default.on_device:
        return default
    if default.prefer_host and (device is None or device.gb_per_s < DEVICE_SHARE * host.gb_per_s):
        return LandingPolicy(keys_on_host=True, prefer_host=True)
    # Index keys of rows that land on the host come from the same memory as the rows. On a CPU, the device pool is in
    # host memory.
    with_rows = host if device is None else find_route(routes, host.source, MemoryKind.DEVICE.value)
    if with_rows is None or with_rows.gb_per_s < DEVICE_SHARE * host.gb_per_s:
        return LandingPolicy(keys_on_host=True)
    return LandingPolicy(keys_on_host=with_rows.seconds_per_write > EXPENSIVE_WRITE_SECONDS)


def _store(shards: Sequence[StoreShard]) -> Store:
    """Describes the host stores, or the device pools, of one replica: one for each rank and pipeline stage.

    The layers of all stages follow each other in one span per rank. The ranks hold different heads of each row or, if
    rows have no heads, all hold the whole row. All ranks hold the index keys.
    """
    stages = sorted({shard.first_layer for shard in shards})
    by_stage = [[shard for shard in shards if shard.first_layer == stage] for stage in stages]
    ranks = list(zip(*by_stage, strict=True))
    rows = [_joined([shard.spans.rows for shard in rank]) for rank in ranks]
    keys_of_ranks = [[shard.spans.keys for shard in rank if shard.spans.keys is not None] for rank in ranks]
    first_keys, *copies = [_joined(keys) if keys else None for keys in keys_of_ranks]
    key_copies = tuple(keys for keys in copies if keys is not None)
    # The stages of a rank must be in one memory to be packed together.
    ranges = [{shard.staging for shard in rank} for rank in ranks]
    staging = tuple(memory for (memory,) in ranges if memory is not None) if all(len(r) == 1 for r in ranges) else ()
    heads, memory = shards[0].kv_heads, shards[0].spans.memory.value
    if heads == 1 or len(rows) == 1:
        whole = tuple(shard for span in rows for shard in whole_rows(span))
        return Store(whole, first_keys, key_copies, memory, staging)
    head_bytes = shards[0].row_bytes // 2 // max(1, heads // len(rows))
    return Store(head_shards(rows, heads, head_bytes), first_keys, key_copies, memory, staging)


def _joined(spans: Sequence[PagedSpan]) -> PagedSpan:
    """Returns one span with the layers, or the index groups, of several."""
    return replace(spans[0], bases=tuple(base for span in spans for base in span.bases))


def _span(tensor: Tensor, page_rows: int) -> PagedSpan:
    """Describes pages of a tensor of shape [layers or index groups, rows, width]."""
    stride = tensor.stride(1) * tensor.element_size()
    return PagedSpan(tuple((layer.data_ptr(),) for layer in tensor), page_rows * stride, page_rows, stride)
