"""Which GPU each worker gets, what is refused, and how workers that share a GPU divide its memory. The tests replace
functions of torch to simulate machines with several GPUs."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import tiny_directory

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError
from hotset.base.memory_shares import DeviceMemory
from hotset.base.units import GIB
from hotset.engine.loading import ModelLoader, use_device
from hotset.engine.model_checks import check_model
from hotset.engine.start_plan import WorkerPlan, check_start, usable_bytes
from hotset.engine.workers.placement import WorkerDevice, place_workers
from hotset.models.checkpoint.files import ModelFiles, find_model

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Makes torch report four usable GPUs, and a multi-process service that runs."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    (tmp_path / "control").touch()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    return monkeypatch


@pytest.mark.parametrize(
    ("settings", "devices", "shared"),
    [
        ({"tensor_parallel_size": 2}, ["cuda:0", "cuda:1"], 1),
        ({"data_parallel_size": 4}, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"], 1),
        ({"tensor_parallel_size": 2, "gpus": "3,1"}, ["cuda:3", "cuda:1"], 1),
        ({"gpus": "2"}, ["cuda:2"], 1),
        ({}, ["cuda"], 1),
        ({"device": "cuda:3"}, ["cuda:3"], 1),
        ({"device": "cpu", "tensor_parallel_size": 2}, ["cpu", "cpu"], 1),
        ({"tensor_parallel_size": 2, "ranks_per_gpu": 2}, ["cuda:0", "cuda:0"], 2),
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "ranks_per_gpu": 2, "gpus": "1,0"},
            ["cuda:1", "cuda:1", "cuda:0", "cuda:0"],
            2,
        ),
        ({"data_parallel_size": 8, "ranks_per_gpu": 2}, [f"cuda:{rank // 2}" for rank in range(8)], 2),
    ],
)
@pytest.mark.usefixtures("machine")
def test_workers_get_gpus_in_order_or_share_them(settings: dict[str, Any], devices: list[str], shared: int) -> None:
    assert place_workers(EngineConfig(**settings)) == [WorkerDevice(name, shared) for name in devices]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tensor_parallel_size": 8},
            "8 workers with --ranks-per-gpu 1 need 8 GPUs, but this machine has 4; lower --tensor-parallel-size, "
            "--pipeline-parallel-size or --data-parallel-size, or use --ranks-per-gpu 2 (for tests and small models)",
        ),
        ({"data_parallel_size": 6}, "or use --ranks-per-gpu 2 (for tests and small models)"),
        (
            {"tensor_parallel_size": 4, "gpus": "2"},
            "4 workers with --ranks-per-gpu 1 need 4 GPUs, but --gpus 2 has 1; lower --tensor-parallel-size, "
            "--pipeline-parallel-size or --data-parallel-size, name more GPUs, or use --ranks-per-gpu 4 (",
        ),
        ({"tensor_parallel_size": 2, "gpus": "0,1,2"}, "need 2 GPUs, but --gpus 0,1,2 has 3; name 2"),
        (
            {"tensor_parallel_size": 2, "gpus": "0,4"},
            "GPU 4 cannot be used: GPU 4 does not exist: this machine has 4, numbered from 0; name others with --gpus",
        ),
    ],
)
@pytest.mark.usefixtures("machine")
def test_gpus_that_do_not_suit_the_workers_are_refused_with_what_to_do(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        place_workers(EngineConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpus": "0,1,0"}, "--gpus 0,1,0 has GPU 0 twice; name each GPU once"),
        ({"gpus": "0;1"}, "--gpus takes the numbers of GPUs, like 0,1,2,3, got '0;1'"),
        ({"gpus": ""}, "--gpus takes the numbers of GPUs"),
        ({"gpus": "-1"}, "--gpus takes the numbers of GPUs"),
        ({"gpus": "0", "device": "cuda:1"}, "--gpus chooses among all GPUs, but --device is cuda:1"),
        ({"ranks_per_gpu": 2, "tensor_parallel_size": 2, "device": "cpu"}, "--ranks-per-gpu chooses among all GPUs"),
        ({"ranks_per_gpu": 2}, "--ranks-per-gpu 2 does not divide the number of workers, 1; use 1"),
        ({"ranks_per_gpu": 4, "tensor_parallel_size": 6}, "does not divide the number of workers, 6; use 1 or 2 or 3"),
        ({"ranks_per_gpu": 0}, "--ranks-per-gpu must be at least 1"),
    ],
)
def test_settings_that_no_machine_can_follow_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineConfig(**settings)


@pytest.mark.parametrize("settings", [{"gpus": "0"}, {"tensor_parallel_size": 2, "ranks_per_gpu": 2}])
def test_without_a_gpu_flags_for_gpus_are_refused(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(**settings)
    monkeypatch.setattr("hotset.engine.model_checks.has_gpu_driver", lambda: False)
    with pytest.raises(ConfigError, match="no GPU was found; leave them out"):
        check_model(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="GPU"):
        place_workers(config)


def test_shared_gpus_are_warned_of_with_the_share_and_with_how_to_start_the_service(
    machine: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    config = EngineConfig(tensor_parallel_size=4, ranks_per_gpu=4)

    def warnings() -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            place_workers(config)
        return [record.getMessage() for record in caplog.records]

    assert ["4 workers share each GPU" in text and "0.23 of its memory" in text for text in warnings()] == [True]
    (tmp_path / "control").unlink()
    _, missing = warnings()
    assert str(tmp_path / "control") in missing and missing.endswith("nvidia-cuda-mps-control -d")
    config = EngineConfig(tensor_parallel_size=4)
    assert warnings() == [], "workers with a GPU each need no service"


def test_a_worker_makes_its_gpu_the_current_one_and_names_a_gpu_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []

    def full(_device: torch.device) -> tuple[int, int]:
        raise RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")

    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, GIB))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert use_device(CPU) == CPU
    assert use_device(torch.device("cuda:2")) == torch.device("cuda:2")
    assert use_device(CUDA) == torch.device("cuda:1"), "threads would choose another GPU"
    assert current == [torch.device("cuda:2"), torch.device("cuda:1")]
    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    with pytest.raises(ConfigError, match=r"^GPU 3 cannot be used: CUDA error: out of memory; .* --gpus$"):
        use_device(torch.device("cuda:3"))


@pytest.fixture
def demo(tmp_path: Path) -> ModelFiles:
    return find_model(tiny_directory(tmp_path, num_key_value_heads=2))


def plan_on_gpu(config: EngineConfig, files: ModelFiles, memory: DeviceMemory, weights: int, ranks: int) -> WorkerPlan:
    on_cpu = ModelLoader(replace(config, device="cpu", ranks_per_gpu=1, load_format="dummy"), CPU).plan
    usable = usable_bytes(config, memory, CUDA, steps=0, ranks_on_gpu=ranks)
    return WorkerPlan(replace(on_cpu.weights, device_bytes=weights), memory, usable, steps=0, gpu=1, ranks_on_gpu=ranks)


def check(config: EngineConfig, files: ModelFiles, plan: WorkerPlan) -> int:
    """Returns the bytes of the device pools of all workers of one GPU."""
    workers = config.workers
    budget = check_start(config, files, [plan] * workers, [True] * workers, CUDA)
    return plan.ranks_on_gpu * plan.weights.kv_shape.layers * budget.geometry.layer_page_bytes * budget.device_pages


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("free", "usable"), [(99 * GIB, 50 * GIB), (20 * GIB, 20 * GIB)])
def test_the_workers_of_a_gpu_divide_the_share_of_its_memory(
    demo: ModelFiles, ranks: int, free: int, usable: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(
        str(demo.path),
        tensor_parallel_size=4,
        ranks_per_gpu=ranks,
        gpu_memory_utilization=0.5,
        max_num_seqs=10**7,
        tiers="off",
    )
    plan = plan_on_gpu(config, demo, DeviceMemory(100 * GIB, free), weights=2 * GIB, ranks=ranks)
    with caplog.at_level(logging.INFO):
        pools = check(config, demo, plan)
    assert pools == pytest.approx(usable - ranks * 2 * GIB, rel=0.001)
    remaining = f"{usable / GIB / ranks - 2:.1f} GiB of {100 / ranks:.1f} GiB of memory remain"
    assert remaining in caplog.text, "the log states the share of one worker"


def test_weights_that_do_not_fit_into_a_worker_s_share_are_refused_before_anything_is_read(demo: ModelFiles) -> None:
    config = EngineConfig(str(demo.path), tensor_parallel_size=4, ranks_per_gpu=2, gpu_memory_utilization=0.5)
    roomy = DeviceMemory(100 * GIB, 99 * GIB)
    with pytest.raises(ConfigError) as refused:
        check(config, demo, plan_on_gpu(config, demo, roomy, weights=26 * GIB, ranks=2))
    message = str(refused.value)
    assert "take 26.0 GiB per worker, but steps leave only 25.0 GiB of the GPU's 100.0 GiB" in message
    assert "(--gpu-memory-utilization 0.5, divided by the 2 workers of each GPU); lower --ranks-per-gpu 2" in message
    occupied = DeviceMemory(100 * GIB, 10 * GIB)
    with pytest.raises(ConfigError) as refused:
        check(config, demo, plan_on_gpu(replace(config, ranks_per_gpu=1), demo, occupied, weights=26 * GIB, ranks=1))
    message = str(refused.value)
    assert "take 26.0 GiB per GPU, but steps leave only 10.0 GiB" in message
    assert "GPU 1 has only 10.0 GiB free); end the other programs on GPU 1, choose other GPUs with --gpus" in message
