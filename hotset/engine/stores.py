"""Describes an engine's KV memory to its peers: the memory that handoffs read contexts from, or write them to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hotset.engine.workers.executor import HostShard
from hotset.handoff.layout import head_shards, whole_rows
from hotset.handoff.messages import MemoryRange, PagedSpan, Route, Store, StoreName
from hotset.handoff.routes import DEVICE_SHARE, EXPENSIVE_WRITE_SECONDS, PROBE_BYTES, find_route
from hotset.memory.device_pool import DevicePool
from hotset.tiers.ledger import LandingPolicy
from hotset.transfer.api import MemoryKind, Region
from hotset.transfer.workers import engine_address

DEVICE = "device"  # the name of the device pool as a store
KEYS_ON_DEVICE = ", keys on device"  # end of the name of a host store whose index keys are in the device pool


@dataclass(frozen=True, slots=True)
class PoolShard:
    """The device pool of one worker, as peers can write to it."""

    replica: int
    kv_heads: int  # number of KV heads of the whole model if rows consist of heads, else 1
    row_bytes: int  # bytes of this worker's row that are used
    rows: PagedSpan
    keys: PagedSpan | None


def host_store_name(replica: int) -> StoreName:
    """Returns the name of a replica's host store."""
    return f"host {replica}" if replica else "host"


def host_stores(hosts: Sequence[HostShard]) -> dict[StoreName, Store]:
    """Describes the host store of each replica. The keys are the names from `host_store_name`."""
    replicas = sorted({shard.replica for shard in hosts})
    return {
        host_store_name(replica): _host_store([shard for shard in hosts if shard.replica == replica])
        for replica in replicas
    }


def device_store_name(replica: int) -> StoreName:
    """Returns the name of a replica's device pool as a store."""
    return f"{DEVICE} {replica}" if replica else DEVICE


def landing_store_name(replica: int, *, on_device: bool, keys_on_host: bool) -> StoreName:
    """Returns the name of the store in which a context lands."""
    if on_device:
        return device_store_name(replica)
    return host_store_name(replica) if keys_on_host else host_store_name(replica) + KEYS_ON_DEVICE


def landing_stores(hosts: Sequence[HostShard], pools: Sequence[PoolShard]) -> dict[StoreName, Store]:
    """Describes the memory in which contexts can land: the host stores, the device pools, and the host stores with
    index keys in the device pools. The keys are the names from `landing_store_name`."""
    stores = host_stores(hosts)
    for replica in sorted({shard.replica for shard in pools}):
        on_device = _device_store([shard for shard in pools if shard.replica == replica])
        host = stores.get(host_store_name(replica))
        if host is not None:
            mixed = Store(host.shards, on_device.keys, on_device.key_copies)
            stores[landing_store_name(replica, on_device=False, keys_on_host=False)] = mixed
        stores[device_store_name(replica)] = on_device
    return stores


def unpackable_stores(stores: Mapping[StoreName, Store], pool: DevicePool | None) -> dict[StoreName, Store]:
    """Returns the stores that this process can unpack staged contexts into. `pool` is its own device pool, if it has
    one. No part of these stores is in GPU memory, or in the memory of a worker process."""
    if pool is not None and memory_kind(pool) is MemoryKind.HOST:
        return dict(stores)
    return {
        name: store
        for name, store in stores.items()
        if not name.startswith(DEVICE) and not name.endswith(KEYS_ON_DEVICE)
    }


def regions(hosts: Sequence[HostShard], pool: DevicePool | None) -> list[Region]:
    """Returns the memory to register with a transfer engine: the host stores and, if given, the device pool."""
    tensors = [tensor for shard in hosts for tensor in (shard.store.rows, shard.store.keys)]
    regions = [Region(tensor.data_ptr(), tensor.nbytes) for tensor in tensors if tensor is not None]
    if pool is not None:
        regions.append(Region(pool.bytes.data_ptr(), pool.bytes.nbytes, memory_kind(pool), pool.device.index or 0))
    return regions


def pool_spans(pool: DevicePool) -> tuple[PagedSpan, PagedSpan | None]:
    """Describes the rows and the index keys of a device pool, with addresses of the process to which it belongs."""
    geometry, stride = pool.geometry, pool.shape.row.stride_bytes
    bases = tuple((layer.data_ptr(),) for layer in pool.bytes)
    rows = PagedSpan(bases, geometry.layer_page_bytes, geometry.page_rows, stride)
    if (key := pool.shape.key) is None:
        return rows, None
    key_bases = tuple(
        tuple(pool.bytes[layer].data_ptr() for layer in pool.shape.key_part_layers(group))
        for group in range(pool.shape.groups)
    )
    page_bytes, step = geometry.layer_page_bytes, pool.shape.key_step
    return rows, PagedSpan(key_bases, page_bytes, geometry.keys_per_block, key.stride_bytes, step)


def pool_shard(pool: DevicePool) -> PoolShard:
    """Describes the device pool of an engine whose only worker is its own process."""
    return PoolShard(0, 1, pool.shape.row.row_bytes, *pool_spans(pool))


def in_process(span: PagedSpan, process: int) -> PagedSpan:
    """Returns the span with engine addresses, given the number of the process in which its own addresses are valid."""
    bases = tuple(tuple(engine_address(process, base) for base in parts) for parts in span.bases)
    return replace(span, bases=bases)


def memory_kind(pool: DevicePool) -> MemoryKind:
    """Returns the kind of the pool's memory. On a CPU, the device pool is in host memory, too."""
    return MemoryKind.DEVICE if pool.device.type == "cuda" else MemoryKind.HOST


class ProbeMemory:
    """Memory for measuring routes, of each kind that this process has. It must live as long as it is registered."""

    def __init__(self, pool: DevicePool | None, *, host: bool = True) -> None:
        """`host` is False in a worker process: its engine's process has the probe in host memory."""
        devices = {MemoryKind.HOST: torch.device("cpu")} if host else {}
        if pool is not None and memory_kind(pool) is MemoryKind.DEVICE:
            devices[MemoryKind.DEVICE] = pool.device
        self._tensors = {
            kind: torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=device) for kind, device in devices.items()
        }

    @property
    def ranges(self) -> dict[str, MemoryRange]:
        """The probes of `Hello`."""
        return {kind.value: MemoryRange(tensor.data_ptr(), tensor.nbytes) for kind, tensor in self._tensors.items()}

    @property
    def regions(self) -> list[Region]:
        return [
            Region(tensor.data_ptr(), tensor.nbytes, kind, tensor.device.index or 0)
            for kind, tensor in self._tensors.items()
        ]


def landing_policy(routes: Sequence[Route], default: LandingPolicy) -> LandingPolicy:
    """Chooses where contexts from a prefill worker land, by the measured routes. `default` applies to what the routes
    do not tell, and to engines into whose device pool peers cannot write."""
    # Contexts are read from the prefill worker's host store.
    host, device = (find_route(routes, MemoryKind.HOST, target) for target in (MemoryKind.HOST, MemoryKind.DEVICE))
    if host is None or not default.on_device:
        return default
    if default.prefer_host and (device is None or device.gb_per_s < DEVICE_SHARE * host.gb_per_s):
        return LandingPolicy(keys_on_host=True, prefer_host=True)
    into_pool = device or host  # on a CPU, the device pool is in host memory
    return LandingPolicy(keys_on_host=into_pool.seconds_per_write > EXPENSIVE_WRITE_SECONDS)


def _host_store(shards: Sequence[HostShard]) -> Store:
    """Describes the host store of one replica, which can consist of one shard per pipeline stage and rank.

    The layers of all stages follow each other in one span per rank. The ranks hold different heads of each row.
    """
    stages = sorted({shard.first_layer for shard in shards})
    by_stage = [[shard for shard in shards if shard.first_layer == stage] for stage in stages]
    spans = []
    for shards_of_rank in zip(*by_stage, strict=True):
        layers = [layer for shard in shards_of_rank for layer in shard.store.rows]
        first = shards_of_rank[0]
        spans.append(_span(layers, first.shape.row.stride_bytes, first.store.page_rows))
    keys = None
    if (key := shards[0].shape.key) is not None:
        keys_by_stage = [stage[0].store.keys for stage in by_stage]
        groups = [group for keys_of_stage in keys_by_stage if keys_of_stage is not None for group in keys_of_stage]
        keys = _span(groups, key.stride_bytes, shards[0].store.page_rows)
    if len(spans) == 1:
        return Store(whole_rows(spans[0]), keys)
    heads = shards[0].kv_heads
    head_bytes = shards[0].shape.row.row_bytes // 2 // max(1, heads // len(spans))
    return Store(head_shards(spans, heads, head_bytes), keys)


def _device_store(shards: Sequence[PoolShard]) -> Store:
    """Describes the device pools of one replica: one for each tensor parallel rank. The ranks hold different heads of
    each row or, if rows have no heads, all hold the whole row. Index keys are in all pools."""
    first, *further = shards
    copies = tuple(shard.keys for shard in further if shard.keys is not None)
    if first.kv_heads == 1 or not further:
        return Store(tuple(shard for each in shards for shard in whole_rows(each.rows)), first.keys, copies)
    head_bytes = first.row_bytes // 2 // max(1, first.kv_heads // len(shards))
    return Store(head_shards([shard.rows for shard in shards], first.kv_heads, head_bytes), first.keys, copies)


def _span(tensors: Sequence[Tensor], stride: int, page_rows: int) -> PagedSpan:
    """Describes the pages of several layers, or of several index groups, each in a tensor of its own."""
    bases = tuple((tensor.data_ptr(),) for tensor in tensors)
    return PagedSpan(bases, page_rows * stride, page_rows, stride)
