"""Describes an engine's KV memory to its peers: the memory that handoffs read contexts from, or write them to."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from hotset.engine.workers.executor import HostShard
from hotset.handoff.layout import head_shards, whole_rows
from hotset.handoff.messages import PagedSpan, Store, StoreName
from hotset.memory.device_pool import DevicePool
from hotset.tiers.ledger import LandingPolicy
from hotset.transfer.api import MemoryKind, Region


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


def landing_stores(
    hosts: Sequence[HostShard], pool: DevicePool | None, policy: LandingPolicy
) -> dict[StoreName, Store]:
    """Describes the memory in which contexts can land: the host stores and, if `pool` is given, the device pool.

    The index keys of rows that land on the host land on the host too if `policy.keys_on_host` is set or `pool` is
    None, and in the device pool otherwise.
    """
    stores = host_stores(hosts)
    if pool is None:
        return stores
    on_device = _device_store(pool)
    if policy.keys_on_host:
        return {"device": on_device, **stores}
    landings = {name: Store(store.shards, on_device.keys) for name, store in stores.items()}
    return {"device": on_device, **landings}


def stores_in_host_memory(stores: Mapping[StoreName, Store], pool: DevicePool | None) -> dict[StoreName, Store]:
    """Returns stores that this process can write to directly, because no part of them is in GPU memory.

    If the pool is on a GPU, stores with index keys are left out, wherever these keys are.
    """
    if pool is None or pool.device.type == "cpu":
        return dict(stores)
    return {name: store for name, store in stores.items() if name != "device" and store.keys is None}


def regions(hosts: Sequence[HostShard], pool: DevicePool | None) -> list[Region]:
    """Returns the memory to register with a transfer engine: the host stores and, if given, the device pool."""
    tensors = [tensor for shard in hosts for tensor in (shard.store.rows, shard.store.keys)]
    regions = [Region(tensor.data_ptr(), tensor.nbytes) for tensor in tensors if tensor is not None]
    if pool is not None:
        kind = MemoryKind.DEVICE if pool.device.type == "cuda" else MemoryKind.HOST
        regions.append(Region(pool.bytes.data_ptr(), pool.bytes.nbytes, kind, pool.device.index or 0))
    return regions


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


def _device_store(pool: DevicePool) -> Store:
    geometry, stride = pool.geometry, pool.shape.row.stride_bytes
    bases = tuple((layer.data_ptr(),) for layer in pool.bytes)
    rows = PagedSpan(bases, geometry.layer_page_bytes, geometry.page_rows, stride)
    keys = None
    if (key := pool.shape.key) is not None:
        key_bases = tuple(
            tuple(pool.bytes[layer].data_ptr() for layer in pool.shape.key_part_layers(group))
            for group in range(pool.shape.groups)
        )
        page_bytes, step = geometry.layer_page_bytes, pool.shape.key_step
        keys = PagedSpan(key_bases, page_bytes, geometry.keys_per_block, key.stride_bytes, step)
    return Store(whole_rows(rows), keys)


def _span(tensors: Sequence[Tensor], stride: int, page_rows: int) -> PagedSpan:
    """Describes the pages of several layers, or of several index groups, each in a tensor of its own."""
    bases = tuple((tensor.data_ptr(),) for tensor in tensors)
    return PagedSpan(bases, page_rows * stride, page_rows, stride)
