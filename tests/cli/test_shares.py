"""Engines on one machine divide its GPUs and its memory: all shares fit, and what the user sets is not changed."""

from pathlib import Path
from typing import Any

import pytest

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError
from hotset.base.memory_shares import DeviceMemory
from hotset.base.units import GIB
from hotset.fleet.local import shares
from hotset.fleet.local.shares import FreeMemory, RoleEngine, bytes_besides_kv, divide_gpus, divide_memory

TP2, TP4, DP4 = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}, {"data_parallel_size": 4}


def engines(*settings: dict[str, Any]) -> list[RoleEngine]:
    return [RoleEngine(f"engine {number}", EngineConfig(**each)) for number, each in enumerate(settings, 1)]


def gpus_of(placed: list[RoleEngine]) -> list[str | None]:
    return [engine.config.gpus for engine in placed]


def gpus(count: int, total_gib: int, free_gib: int | None = None) -> tuple[DeviceMemory, ...]:
    return (DeviceMemory(total_gib * GIB, (total_gib if free_gib is None else free_gib) * GIB),) * count


@pytest.mark.parametrize(
    ("settings", "machine", "expected"),
    [
        ([{}, {}], 2, ["0", "1"]),
        ([{}, {}, {}], 2, ["0", "1", "0"]),
        ([TP4, DP4], 8, ["0,1,2,3", "4,5,6,7"]),
        ([TP2, {}, TP4], 8, ["0,1", "2", "3,4,5,6"]),
        ([{**TP4, "ranks_per_gpu": 2}, DP4], 6, ["0,1", "2,3,4,5"]),
        ([{**TP4, "ranks_per_gpu": 4}, {**DP4, "ranks_per_gpu": 4}], 1, ["0", "0"]),
        ([TP2, {**TP2, "gpus": "1,0"}], 4, ["2,3", "1,0"]),
        ([{}, {"gpus": "0"}, {}], 2, ["1", "0", "1"]),
        ([{"device": "cuda:1"}, {"device": "cpu"}], 2, [None, None]),
        ([TP2, {}], 0, [None, None]),
    ],
)
def test_engines_get_gpus_for_all_ranks(
    settings: list[dict[str, Any]], machine: int, expected: list[str | None]
) -> None:
    assert gpus_of(divide_gpus(engines(*settings), machine)) == expected


@pytest.mark.parametrize(
    ("settings", "machine", "message"),
    [
        (
            [TP4, DP4],
            6,
            r"too few GPUs: engine 1 needs 4, engine 2 needs 4, but this machine has 6; use smaller .*-per-gpu 4\)",
        ),
        ([{**TP2, "gpus": "0,1"}, TP2], 3, "engine 2 needs 2, but only 1 are left beside the 2 that --gpus names"),
        ([{"gpus": "0"}, {}], 1, "engine 2 needs 1, but only 0 are left"),
        ([{**TP2, "gpus": "0,1"}, {"gpus": "1"}], 4, "GPU 1 is named by engine 1 and by engine 2; give each engine"),
        ([{"gpus": "4"}, {}], 4, "engine 1: GPU 4 of --gpus 4 does not exist: this machine has 4"),
        ([{**TP2, "gpus": "0,1,2"}, {}], 4, "engine 1 has 2 ranks, 1 on each GPU, but --gpus 0,1,2 has 3; name 2"),
        ([{**TP2, "gpus": "0"}, {}], 4, "but --gpus 0 has 1; name 2"),
    ],
)
def test_too_few_or_doubly_claimed_gpus_are_refused(settings: list[dict[str, Any]], machine: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        divide_gpus(engines(*settings), machine)


@pytest.mark.parametrize("splits", [[{}, {}], [{}, TP2, DP4], [{}] * 8])
@pytest.mark.parametrize("free_gib", [4, 64])
def test_shares_on_a_cpu_fit_together(splits: list[dict[str, Any]], free_gib: int) -> None:
    total_gib = 0.0
    for engine in divide_memory(engines(*splits), FreeMemory(free_gib * GIB)):
        config = engine.config
        assert config.host_kv_gib and config.device_kv_gib
        assert config.host_kv_gib > 1.2 * config.workers * config.device_kv_gib
        total_gib += config.host_kv_gib + config.workers * config.device_kv_gib
    assert 0 < total_gib <= min(free_gib / 2, 8) + 0.01


def test_an_engine_with_gpus_of_its_own_measures_its_device_pool_itself() -> None:
    placed = divide_gpus(engines(TP2, TP2), 4)
    for engine in divide_memory(placed, FreeMemory(512 * GIB, gpus(4, 80))):
        assert (engine.config.device_kv_gib, engine.config.host_kv_gib) == (None, 128)


def sized(
    *settings: dict[str, Any], free: FreeMemory, needed: int, monkeypatch: pytest.MonkeyPatch
) -> list[EngineConfig]:
    """Divides GPUs and memory. Each rank needs `needed` GiB besides its KV."""
    monkeypatch.setattr(shares, "bytes_besides_kv", lambda config: needed * GIB)
    return [engine.config for engine in divide_memory(divide_gpus(engines(*settings), len(free.gpus)), free)]


@pytest.mark.parametrize(("utilization", "free_gib"), [(0.92, None), (0.5, 60), (0.92, 30)])
def test_ranks_on_one_gpu_fit_on_it(utilization: float, free_gib: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    on_one = {**TP2, "ranks_per_gpu": 2, "gpu_memory_utilization": utilization}
    free = FreeMemory(1024 * GIB, gpus(1, 80, free_gib))
    configs = sized(on_one, {"gpu_memory_utilization": utilization}, free=free, needed=5, monkeypatch=monkeypatch)
    used = sum(config.workers * ((config.device_kv_gib or 0) + 5) for config in configs)
    assert used == pytest.approx(min(utilization * 80, free_gib or 80), abs=0.02)


def test_ranks_that_do_not_fit_on_a_shared_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    free = FreeMemory(1024 * GIB, gpus(1, 40))
    message = r"the 2 ranks .* on GPU 0 do not fit: each of engine 1 needs 20\.0 GiB .* use 36\.8 GiB together"
    with pytest.raises(ConfigError, match=message):
        sized({}, {}, free=free, needed=20, monkeypatch=monkeypatch)


def test_device_pools_are_smaller_than_the_host_store(monkeypatch: pytest.MonkeyPatch) -> None:
    free = FreeMemory(40 * GIB, gpus(1, 80))
    for config in sized({**TP2, "ranks_per_gpu": 2}, {}, free=free, needed=0, monkeypatch=monkeypatch):
        assert config.host_kv_gib == 10 and config.device_kv_gib is not None
        assert config.workers * config.device_kv_gib < 10


def test_sizes_that_the_user_sets_are_not_changed() -> None:
    for settings in ({"device_kv_tokens": 1000}, {"host_kv_gib": 1.0}, {"tiers": "off"}):
        given = engines(settings, settings)
        assert divide_memory(given, FreeMemory(64 * GIB)) == given
    given = engines({"device": "cuda:1", "device_kv_gib": 1.0}, {"device": "cuda:1", "host_kv_gib": 1.0})
    assert divide_memory(given, FreeMemory(GIB, gpus(2, 1))) == given


def test_host_memory_that_one_engine_asks_for_is_not_given_to_another() -> None:
    placed = divide_gpus(engines({"host_kv_gib": 400.0}, {}, {}), 3)
    _, *others = divide_memory(placed, FreeMemory(500 * GIB, gpus(3, 80)))
    assert [engine.config.host_kv_gib for engine in others] == [25, 25]


def test_a_rank_needs_memory_for_its_weights_and_its_steps() -> None:
    model = str(Path(__file__).resolve().parents[2] / "models" / "demo-dsa")
    matrices = 2 * 12_466_176  # in bfloat16
    few, many = (bytes_besides_kv(EngineConfig(model=model, max_num_seqs=seats)) for seats in (1, 256))
    assert matrices + GIB < few < many < matrices + 3 * GIB
    assert bytes_besides_kv(EngineConfig(model=model, max_num_seqs=1, tensor_parallel_size=4)) < few - matrices // 2
