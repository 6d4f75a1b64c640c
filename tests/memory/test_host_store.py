"""The host store with a GPU: any range of a layer in pinned memory can be copied."""

import pytest
import torch

from hotset.base.units import ceil_div
from hotset.kernels.rows import RowLayout, index_key_row
from hotset.memory.device_pool import KvShape
from hotset.memory.host_store import HostStore

MIB = 1 << 20


@pytest.mark.gpu
def test_a_copy_can_span_a_whole_layer_or_a_range_of_it() -> None:
    """The driver refuses a copy that spans two separately pinned ranges, so each layer must be pinned as one range."""
    layout = RowLayout(512, torch.bfloat16)
    shape = KvShape(2, layout, (0, 1), index_key_row(128, torch.bfloat16, fp8=True), 8)
    pages = (1 << 30) // (64 * layout.stride_bytes) + 3  # a layer is a little more than 1 GiB
    reported: list[tuple[int, int]] = []
    store = HostStore(shape, pages, 64, torch.device("cuda"), lambda done, total: reported.append((done, total)))
    try:
        assert store.keys is not None
        for layer in (*store.rows.view(torch.uint8).flatten(1), *store.keys.view(torch.uint8).flatten(1)):
            size = layer.numel()
            layer[::MIB] = torch.randint(256, (ceil_div(size, MIB),), dtype=torch.uint8)  # one random byte per MiB
            for first, last in ((0, size), (3 * MIB, size - 5), (size // 2 // MIB * MIB, size)):
                on_device = torch.empty(last - first, dtype=torch.uint8, device="cuda")
                on_device.copy_(layer[first:last], non_blocking=True)
                assert torch.equal(on_device[::MIB].cpu(), layer[first:last:MIB]), f"bytes [{first}, {last}) differ"
        done = [done for done, _ in reported]
        assert done == sorted(done) and reported[-1] == (store.rows.nbytes + store.keys.nbytes,) * 2
    finally:
        store.close()
