"""The host store with a real GPU: pinned memory can be copied in ranges of any length."""

import pytest
import torch

from hotset.kernels.rows import RowLayout, index_key_row
from hotset.memory.device_pool import KvShape
from hotset.memory.host_store import HostStore


@pytest.mark.gpu
def test_a_copy_may_span_any_range_of_a_layer() -> None:
    """The driver refuses a copy that spans two separately pinned pieces, so a layer must be pinned as one."""
    layout = RowLayout(512, torch.bfloat16)
    shape = KvShape(2, layout, (0, 1), index_key_row(128, torch.bfloat16, fp8=True), 8)
    pages = (1 << 30) // (64 * layout.stride_bytes) + 3  # a layer is a little more than 1 GiB
    seen: list[tuple[int, int]] = []
    store = HostStore(shape, pages, 64, torch.device("cuda"), lambda done, total: seen.append((done, total)))
    try:
        assert store.keys is not None
        for layers in (store.rows, store.keys):
            for layer in layers.view(torch.uint8):
                layer.view(-1)[:: 1 << 20] = torch.randint(256, (-(-layer.numel() // (1 << 20)),), dtype=torch.uint8)
                on_device = torch.empty_like(layer, device="cuda")
                on_device.copy_(layer, non_blocking=True)
                expected = layer.view(-1)[:: 1 << 20]
                assert torch.equal(on_device.view(-1)[:: 1 << 20].cpu(), expected)
        done = [done for done, _ in seen]
        assert done == sorted(done) and seen[-1] == (store.rows.nbytes + store.keys.nbytes,) * 2
    finally:
        store.close()
