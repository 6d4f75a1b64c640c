"""Workers on one machine divide its memory: all shares fit, and sizes that the user sets are not changed."""

from pathlib import Path

import pytest

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError
from hotset.base.memory_shares import DeviceMemory
from hotset.base.units import GIB
from hotset.cli.shares import FreeMemory, MemoryShare, bytes_besides_kv, divide_memory


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("free_gib", [4, 64])
def test_shares_on_a_cpu_fit_together(workers: int, free_gib: int) -> None:
    shares = divide_memory(EngineConfig(), FreeMemory(free_gib * GIB), workers, 0)
    total_gib = sum((share.device_kv_gib or 0) + (share.host_kv_gib or 0) for share in shares)
    assert 0 < total_gib <= min(free_gib / 2, 8) + 0.01
    assert all(share.host_kv_gib and share.device_kv_gib for share in shares)
    assert all(share.host_kv_gib > 1.2 * share.device_kv_gib for share in shares)  # type: ignore[operator]


def gpus(count: int, total_gib: int, free_gib: int | None = None) -> tuple[DeviceMemory, ...]:
    return (DeviceMemory(total_gib * GIB, (total_gib if free_gib is None else free_gib) * GIB),) * count


def test_each_worker_has_its_own_gpu_if_there_are_enough() -> None:
    shares = divide_memory(EngineConfig(), FreeMemory(512 * GIB, gpus(4, 80)), 3, 10 * GIB)
    assert [share.device for share in shares] == ["cuda:0", "cuda:1", "cuda:2"]
    assert shares[0].device_kv_gib == pytest.approx(0.92 * 80 - 10, abs=0.01)
    config = EngineConfig(gpu_memory_utilization=0.5)
    shares = divide_memory(config, FreeMemory(512 * GIB, gpus(4, 80, free_gib=60)), 3, 10 * GIB)
    assert shares[0].device_kv_gib == pytest.approx(0.5 * 80 - 10, abs=0.01)
    shares = divide_memory(config, FreeMemory(512 * GIB, gpus(4, 80, free_gib=30)), 3, 10 * GIB)
    assert shares[0].device_kv_gib == pytest.approx(30 - 10, abs=0.01)


def test_workers_that_share_a_gpu_fit_on_it_with_their_weights() -> None:
    shares = divide_memory(EngineConfig(), FreeMemory(1024 * GIB, gpus(1, 80)), 2, 20 * GIB)
    assert [share.device for share in shares] == ["cuda:0", "cuda:0"]
    assert sum((share.device_kv_gib or 0) + 20 for share in shares) == pytest.approx(0.92 * 80, abs=0.01)
    with pytest.raises(ConfigError, match=r"2 workers do not fit on cuda:0: each needs 20\.0 GiB .* use 36\.8 GiB"):
        divide_memory(EngineConfig(), FreeMemory(1024 * GIB, gpus(1, 40)), 2, 20 * GIB)


def test_a_device_pool_is_smaller_than_its_host_store() -> None:
    (share, _) = divide_memory(EngineConfig(), FreeMemory(40 * GIB, gpus(2, 80)), 2, 0)
    assert share.host_kv_gib == 10 and share.device_kv_gib is not None and share.device_kv_gib < 10


def test_sizes_that_the_user_sets_are_not_changed() -> None:
    for config in (EngineConfig(device_kv_tokens=1000), EngineConfig(host_kv_gib=1.0), EngineConfig(tiers="off")):
        assert divide_memory(config, FreeMemory(64 * GIB), 2, 0) == [MemoryShare(), MemoryShare()]
    assert divide_memory(EngineConfig(device="cuda:1", device_kv_gib=1.0), FreeMemory(GIB, gpus(2, 1)), 2, 0) == [
        MemoryShare(device="cuda:1"),
        MemoryShare(device="cuda:1"),
    ]


def test_a_worker_needs_memory_for_its_weights_and_its_steps() -> None:
    model = str(Path(__file__).resolve().parents[2] / "models" / "demo-dsa")
    matrices = 2 * 12_466_176  # in bfloat16
    few, many = (bytes_besides_kv(EngineConfig(model=model, max_num_seqs=seats)) for seats in (1, 256))
    assert matrices + GIB < few < many < matrices + 3 * GIB
