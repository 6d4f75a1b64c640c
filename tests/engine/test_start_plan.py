"""Compares what an engine states and refuses before it reads weights with what is measured afterwards."""

import logging
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine.threaded import ThreadWorkers
from harness import CPU, DEMO, tiny_directory
from models.test_weight_plan import measured_bytes

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError, KvDoesNotFit
from hotset.base.host_checks import Finding, HostNeeds
from hotset.base.memory_shares import DeviceMemory
from hotset.base.units import GIB, MIB
from hotset.engine import loading, model_checks, sizing, start_plan
from hotset.engine.build import build_engine
from hotset.engine.loading import ModelLoader
from hotset.engine.model_checks import check_model, model_splits
from hotset.engine.sizing import KvBudget, WorkerMemory, shared_budget
from hotset.engine.start_plan import WorkerPlan, check_start, estimated_steps, report_findings, usable_bytes
from hotset.engine.step_memory import step_bytes
from hotset.kernels.linear import packed
from hotset.models.checkpoint.files import ModelFiles, find_model
from hotset.models.config_fields import read_json
from hotset.models.decoder import worker_kv_shape
from hotset.models.families import read_spec
from hotset.models.model_tensors import worker_weight_bytes
from hotset.models.spec import KvStorage
from hotset.models.split import WHOLE_MODEL, Split
from hotset.models.weight_plan import WeightPlan

ROOT = Path(__file__).resolve().parents[2]
CUDA = torch.device("cuda")
H200 = 140 * GIB
SIZES: dict[str, Any] = {"page_rows": 16, "max_num_seqs": 4, "device_kv_tokens": 512, "host_kv_tokens": 1024}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Returns a function that sets the free memory of this machine, as all parts of the engine measure it."""

    def set_free(nbytes: int) -> None:
        def measure(_device: torch.device) -> DeviceMemory:
            return DeviceMemory(64 * GIB, nbytes)

        for module in (loading, sizing):
            monkeypatch.setattr(module, "device_memory", measure)

    return set_free


def planned(loader: ModelLoader, config: EngineConfig) -> KvBudget:
    return check_start(config, loader.files, [loader.plan], [True], CPU)


MODELS: dict[str, dict[str, Any]] = {
    "demo-dsa": {"model": DEMO},
    "demo-dsa in bfloat16, random": {"model": DEMO, "dtype": "bfloat16", "load_format": "dummy"},
    "llama": {"load_format": "dummy"},
}
LLAMA = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 9000, "max_position_embeddings": 8000}


@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_stated_before_loading_are_those_measured_afterwards(
    name: str, memory: Callable[[int], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(**{"max_num_seqs": 4096, "model": tiny_directory(tmp_path, **LLAMA)} | MODELS[name])
    free = 400 * MIB
    memory(free)
    loader = ModelLoader(config, CPU)
    with caplog.at_level(logging.INFO, "hotset.engine"):
        before = planned(loader, config)
    reports: list[tuple[int, int]] = []
    decoder = loader.load(lambda done, total: reports.append((done, total)))
    measured = measured_bytes(decoder)
    assert loader.plan.weights.device_bytes == pytest.approx(measured, rel=0.03)
    assert reports == sorted(reports) and reports[-1] == (loader.plan.weights.read_bytes,) * 2

    memory(free - measured)
    worker = WorkerMemory(decoder.kv_shape, loader.free_for_kv())
    after = shared_budget(config, [worker], loader.files.spec.context, CPU)
    assert before.device_pages == pytest.approx(after.device_pages, rel=0.03)
    assert before.host_pages == pytest.approx(after.host_pages, rel=0.03)
    weights_line, kv_line = (record.getMessage() for record in caplog.records if record.module == "start_plan")
    assert mebibytes(weights_line, r"weights: (\S+) (\S+)") == pytest.approx(measured / MIB, rel=0.03)
    pool_bytes = after.device_pages * after.geometry.page_bytes
    assert mebibytes(kv_line, r"KV cache: (\S+) (\S+)") == pytest.approx(pool_bytes / MIB, rel=0.03)
    stated = re.search(r"requests of (\d+) tokens that fit at once: (\d+) resident(?:, (\d+) tiered)?$", kv_line)
    assert stated is not None and int(stated[1]) == after.max_model_len
    for number, counted in ((2, after.resident_requests), (3, after.tiered_requests)):
        assert int(stated[number] or 0) == pytest.approx(counted(after.max_model_len), rel=0.03, abs=1)


def mebibytes(line: str, pattern: str) -> float:
    found = re.search(pattern, line)
    assert found is not None, line
    return float(found[1]) * {"KiB": 1 / 1024, "MiB": 1, "GiB": 1024}[found[2].rstrip(",;")]


def test_weights_that_exceed_the_free_memory_are_refused_before_they_are_read(memory: Callable[[int], None]) -> None:
    config = EngineConfig(model=DEMO)
    memory(GIB)
    needed = ModelLoader(config, CPU).plan.weights.device_bytes
    memory(needed - 1)
    loader = ModelLoader(config, CPU)
    with pytest.raises(ConfigError, match=r"the weights take 71\.1 MiB of memory, but only 71\.1 MiB are free"):
        planned(loader, config)
    two_workers = [replace(loader.plan, usable=2 * needed - 1)] * 2
    with pytest.raises(ConfigError, match=r"take 142\.\d MiB of memory for 2 workers"):
        check_start(config, loader.files, two_workers, [True, True], CPU)


def test_weights_that_fit_only_unpacked_are_refused_with_the_flag_to_use(memory: Callable[[int], None]) -> None:
    config = EngineConfig(model=DEMO)
    memory(GIB)
    weights = ModelLoader(config, CPU).plan.weights
    assert 0 < weights.packed_bytes < weights.device_bytes
    plain_bytes = weights.device_bytes - weights.packed_bytes
    memory(plain_bytes)
    with pytest.raises(ConfigError, match=r"are free; use --no-pack-weights, which saves 23\.\d MiB$"):
        planned(ModelLoader(config, CPU), config)
    memory(plain_bytes + MIB)
    with pytest.raises(ConfigError, match="use --no-pack-weights"):
        planned(ModelLoader(config, CPU), config)
    loader = ModelLoader(replace(config, pack_weights=False, max_model_len=64, max_num_seqs=1), CPU)
    assert loader.plan.weights.device_bytes == plain_bytes
    assert measured_bytes(loader.load(lambda done, total: None)) == pytest.approx(plain_bytes, rel=0.01)


def test_weights_that_torch_cannot_pack_are_loaded_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "is_available", lambda: False)
    loader = ModelLoader(EngineConfig(model=DEMO), CPU)
    decoder = loader.load(lambda done, total: None)
    assert f"torch {torch.__version__} cannot pack weights" in caplog.text
    assert loader.plan.weights.packed_bytes == 0
    assert measured_bytes(decoder) == pytest.approx(loader.plan.weights.device_bytes, rel=0.01)


def test_weights_that_exceed_the_host_are_refused_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = 4 * 12_466_176  # in float32
    real = model_checks.host_memory()
    monkeypatch.setattr(model_checks, "host_memory", lambda: replace(real, free=matrices))
    with pytest.raises(ConfigError, match=r"the weights take 47\.\d MiB of memory, but only 47\.\d MiB are free"):
        check_model(EngineConfig(model=DEMO, device="cpu"))
    monkeypatch.setattr(model_checks, "host_memory", lambda: replace(real, free=matrices + MIB))
    check_model(EngineConfig(model=DEMO, device="cpu"))
    with pytest.raises(ConfigError, match=r"MiB of memory for 2 workers, but only 48\.\d MiB are free"):
        check_model(EngineConfig(model=DEMO, device="cpu", data_parallel_size=2))


def published(name: str) -> ModelFiles:
    path = ROOT / "hotset" / "lab" / "plan" / "configs" / f"{name}.json"
    return ModelFiles(path, read_spec(read_json(path), {}, str(path)))


def gpu_plan(config: EngineConfig, files: ModelFiles, split: Split, total: int = H200) -> WorkerPlan:
    """Returns the plan of one worker on an empty GPU. The weights' sizes are computed from the configuration."""
    spec = files.spec
    shape = worker_kv_shape(spec, torch.bfloat16, KvStorage(fp8_rows=True, fp8_keys=True))
    size = worker_weight_bytes(spec, split, 2)
    memory = DeviceMemory(total, total - GIB // 2)
    steps = estimated_steps(config, spec, split, CUDA, torch.bfloat16)
    return WorkerPlan(WeightPlan(size, size, shape), memory, usable_bytes(config, memory, CUDA, steps), steps)


def check_on_gpus(config: EngineConfig, files: ModelFiles, split: Split, total: int = H200) -> KvBudget:
    plans = [gpu_plan(config, files, split, total)] * split.size
    owns_store = [rank == 0 or split.dp_size > 1 for rank in range(split.size)]
    return check_start(config, files, plans, owns_store, CUDA)


@pytest.fixture
def large_host(memory: Callable[[int], None]) -> None:
    memory(4096 * GIB)


@pytest.mark.usefixtures("large_host")
@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5.2"])
def test_a_model_that_needs_more_gpus_is_refused_with_the_numbers_that_fit(name: str) -> None:
    files = published(name)
    with pytest.raises(ConfigError) as refused:
        check_on_gpus(EngineConfig(), files, WHOLE_MODEL)
    message = str(refused.value)
    assert re.search(
        r"weights take 6\d\d\.\d GiB per GPU, but steps leave only 12\d\.\d GiB of the GPU's 140\.0 GiB", message
    )
    assert "(--gpu-memory-utilization 0.92)" in message and "\n" not in message
    sizes = dict(re.findall(r"--(tensor|data)-parallel-size (\d+)", message))
    assert set(sizes) == {"tensor", "data"}
    check_on_gpus(EngineConfig(), files, Split(tp_size=int(sizes["tensor"])))
    check_on_gpus(EngineConfig(), files, Split(dp_size=int(sizes["data"])))
    smaller = [size for size in range(1, int(sizes["tensor"])) if 128 % size == 0]
    for size in smaller:
        with pytest.raises(ConfigError):
            check_on_gpus(EngineConfig(), files, Split(tp_size=size))


@pytest.mark.usefixtures("large_host")
def test_a_gpu_too_small_for_any_split_is_refused_without_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="use GPUs with more memory or a smaller model"):
        check_on_gpus(EngineConfig(), published("deepseek-v3.2"), WHOLE_MODEL, total=8 * GIB)


@pytest.mark.usefixtures("large_host")
def test_a_context_that_does_not_fit_is_refused_with_what_would_fit() -> None:
    files = published("deepseek-v3.2")
    config = EngineConfig(max_model_len=163_840, tiers="off", gpu_memory_utilization=0.76)
    with pytest.raises(KvDoesNotFit) as refused:
        check_on_gpus(config, files, Split(dp_size=8))
    message = str(refused.value)
    shorter = re.search(r"--gpu-memory-utilization .* or lower --max-model-len to (\d+)", message)
    assert shorter is not None and "drop --tiers off" in message
    assert check_on_gpus(replace(config, max_model_len=int(shorter[1])), files, Split(dp_size=8))
    larger = re.search(r"use --data-parallel-size (\d+)", message)
    assert larger is not None and check_on_gpus(config, files, Split(dp_size=int(larger[1])))
    with pytest.raises(KvDoesNotFit):
        check_on_gpus(replace(config, max_model_len=int(1.04 * int(shorter[1]))), files, Split(dp_size=8))
    tiered = check_on_gpus(replace(config, tiers="auto"), files, Split(dp_size=8))
    assert tiered.tiered_requests(163_840) >= 1 > tiered.resident_requests(163_840)


@pytest.mark.usefixtures("large_host")
@pytest.mark.parametrize("utilization", [0.5, 0.8, 0.92, 1.0])
def test_kv_gets_what_weights_and_steps_leave_of_the_share(utilization: float) -> None:
    files, split = published("dsa-50b"), WHOLE_MODEL
    config = EngineConfig(gpu_memory_utilization=utilization, tiers="off", max_num_seqs=4096)
    total = 300 * GIB
    budget = check_on_gpus(config, files, split, total)
    plan = gpu_plan(config, files, split, total)
    steps = step_bytes(files.spec, split, config, files.spec.context, 2)
    kv_bytes = budget.device_pages * plan.weights.kv_shape.layers * budget.geometry.layer_page_bytes
    free = min(int(total * utilization), plan.memory.free)
    assert kv_bytes == pytest.approx(free - plan.weights.device_bytes - steps, rel=0.001)


@pytest.mark.parametrize("given", [{}, {"host_kv_gib": 10.0}, {"host_kv_tokens": 1 << 16}])
def test_little_host_memory_makes_the_device_pool_smaller(memory: Callable[[int], None], given: dict[str, Any]) -> None:
    """Every row on the device also has a host page."""
    memory(16 * GIB)
    files = published("dsa-50b")
    small = check_on_gpus(EngineConfig(max_num_seqs=4096, **given), files, WHOLE_MODEL, 300 * GIB)
    assert small.geometry.max_row_pages(small.device_pages) <= small.host_pages
    memory(4096 * GIB)
    large = check_on_gpus(EngineConfig(max_num_seqs=4096), files, WHOLE_MODEL, 300 * GIB)
    assert small.max_model_len >= 2 and small.device_pages < large.device_pages


def test_other_programs_on_the_gpu_reduce_the_share_only_if_they_use_what_it_leaves() -> None:
    config, files = EngineConfig(gpu_memory_utilization=0.5), published("dsa-50b")

    def usable(free: int) -> int:
        steps = estimated_steps(config, files.spec, WHOLE_MODEL, CUDA, torch.bfloat16)
        return usable_bytes(config, DeviceMemory(H200, free), CUDA, steps)

    assert usable(H200) == usable(H200 // 2) == usable(H200 // 4) + H200 // 4
    assert usable(GIB) == 0, "fewer bytes than steps need"


def test_a_step_needs_more_memory_with_more_seats_tokens_and_context() -> None:
    files = published("deepseek-v3.2")

    def steps(context: int = 4096, split: Split = WHOLE_MODEL, **settings: int) -> int:
        return step_bytes(files.spec, split, EngineConfig(**settings), context, 2)

    vocabulary = 4 * 129_280
    assert steps(max_num_seqs=4096) - steps(max_num_seqs=2048) > 4 * 2048 * vocabulary
    assert steps(max_num_batched_tokens=16_384) > steps(max_num_batched_tokens=8192) + 8192 * 8 * 7168 * 2
    assert steps(context=131_072) > steps()
    assert steps(split=Split(dp_size=8)) > steps()


def test_the_progress_of_several_workers_counts_the_bytes_that_all_of_them_read() -> None:
    config = EngineConfig(model=DEMO, device="cpu", dtype="bfloat16", tensor_parallel_size=2)
    whole = ModelLoader(config, CPU).plan.weights
    with closing(ThreadWorkers(config, model_splits(config, check_model(config).spec), 1)) as workers:
        plans = workers.plan()
        total = sum(plan.weights.read_bytes for plan in plans)
        assert whole.read_bytes < total < 2 * whole.read_bytes, (
            "ranks divide most weights, and share norms and indexers"
        )
        reports: list[tuple[int, int]] = []
        workers.load(lambda done, total: reports.append((done, total)))
        assert reports == sorted(reports) and reports[-1] == (total, total)
        assert {report[1] for report in reports} == {total}


def test_an_engine_that_is_refused_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(ModelLoader, "load", read)
    config = EngineConfig(model=DEMO, device="cpu", max_model_len=1000, device_kv_tokens=64, tiers="off")
    with pytest.raises(KvDoesNotFit, match=r"holds 64 tokens, .* lower --max-model-len to 64, or drop --tiers off"):
        build_engine(config)


def test_what_is_slow_is_logged_and_what_cannot_work_is_refused_before_weights_are_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow, good = Finding("slow", "pages are small", "enlarge them"), Finding("good", "all is well")
    hint = Finding("good", "it works", "do more")
    with caplog.at_level(logging.INFO, "hotset.engine"):
        report_findings([slow, good, hint])
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, "pages are small; to mend it: enlarge them"),
        (logging.INFO, "it works; to mend it: do more"),
    ]
    with pytest.raises(ConfigError, match=r"^the limit is low; raise it$"):
        report_findings([slow, Finding("broken", "the limit is low", "raise it")])


@pytest.mark.parametrize("split", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_the_checks_of_a_start_are_given_what_the_workers_of_this_machine_need(
    split: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a DSA model share a store, which each of them pins. Stages have stores of their own layers."""
    asked: list[HostNeeds] = []
    monkeypatch.setattr(start_plan, "check_host", lambda needs: asked.append(needs) or [])
    config = EngineConfig(model=DEMO, **SIZES, **split)
    loaders = [ModelLoader(config, CPU, each) for each in model_splits(config, find_model(DEMO).spec)]
    shares = "tensor_parallel_size" in split
    plans = [replace(loader.plan, gpu=4 + number) for number, loader in enumerate(loaders)]
    budget = check_start(
        config, loaders[0].files, plans, [number == 0 or not shares for number in range(len(plans))], CUDA
    )
    stores = [budget.host_pages * config.page_rows * plan.weights.kv_shape.token_bytes for plan in plans]
    whole = stores[0] if shares else sum(stores)
    gpus = tuple(range(4, 4 + len(plans)))
    assert asked == [HostNeeds(whole, max(stores), len(plans), gpus)]
    asked.clear()
    check_start(config, loaders[0].files, [replace(plan, node="far") for plan in plans], [True] * len(plans), CUDA)
    assert asked == [HostNeeds(0, workers=0)], "other nodes have memory of their own"


@pytest.mark.parametrize(
    ("role", "transfer", "protocol", "interface", "needed"),
    [
        ("both", "nixl", None, "mlx5_0:1", False),
        ("decode", "nixl", None, "lo", False),
        ("decode", "nixl", None, "eth0", False),
        ("decode", "nixl", None, "mlx5_0:1,eth0", True),
        ("prefill", "mooncake", "rdma", "eth0", True),
        ("prefill", "mooncake", None, "eth0", False),
    ],
)
def test_locked_memory_is_needed_if_handoffs_use_rdma_devices(
    role: str, transfer: str, protocol: str | None, interface: str, needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_plan, "rdma_devices", lambda: ["mlx5_0"])
    config: Any = SimpleNamespace(
        role=role, transfer=transfer, transfer_protocol=protocol, listening_interface=interface
    )
    assert start_plan._registers_rdma(config) == needed
