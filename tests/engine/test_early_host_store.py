"""The host store that is allocated and pinned while the weights are loaded."""

import threading
from contextlib import closing
from typing import Any

import pytest
import torch
from harness import DEMO
from memory.fake_cudart import FakeCudart

from hotset.base.config import EngineConfig
from hotset.base.errors import StartupError
from hotset.engine import model_workers
from hotset.engine.build import build_engine
from hotset.engine.loading import ModelLoader
from hotset.engine.model_workers import EarlyHostStore
from hotset.kernels.rows import RowLayout
from hotset.memory import host_store
from hotset.memory.device_pool import KvShape

GPU = torch.device("cuda:0")
SHAPE = KvShape(4, RowLayout(512, torch.bfloat16))


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    fake = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr(host_store, "store_nodes", lambda gpus: ())
    return fake


def test_the_store_is_pinned_beside_other_work_and_then_handed_over(cudart: FakeCudart) -> None:
    begun, allowed = threading.Event(), threading.Event()
    register = cudart.cudaHostRegister

    def waiting(address: int, nbytes: int, flags: int) -> int:
        begun.set()
        assert allowed.wait(60)
        return register(address, nbytes, flags)

    cudart.cudaHostRegister = waiting  # type: ignore[method-assign]
    with closing(EarlyHostStore(SHAPE, 40, 64, GPU)) as early:
        assert begun.wait(60) and not cudart.pinned, "the thread works while this one goes on"
        allowed.set()
        early.wait(lambda done, total: None)
        store = early.take(40)
        assert store is not None and store.pinned_bytes == sum(cudart.pinned.values()) > 0
    assert cudart.pinned, "a store that was taken must stay pinned"
    store.close()
    assert not cudart.pinned


def test_progress_is_reported_once_somebody_waits(cudart: FakeCudart) -> None:
    allowed = threading.Event()
    register = cudart.cudaHostRegister

    def waiting(address: int, nbytes: int, flags: int) -> int:
        assert allowed.wait(60)
        return register(address, nbytes, flags)

    cudart.cudaHostRegister = waiting  # type: ignore[method-assign]
    reported: list[tuple[int, int]] = []

    with closing(EarlyHostStore(SHAPE, 40, 64, GPU)) as early:
        threading.Timer(0.05, allowed.set).start()
        early.wait(lambda done, total: reported.append((done, total)))
        total = sum(cudart.pinned.values())
        assert reported[-1] == (total, total)


def test_a_store_of_another_size_is_released(cudart: FakeCudart) -> None:
    with closing(EarlyHostStore(SHAPE, 40, 64, GPU)) as early:
        early.wait(lambda done, total: None)
        assert early.take(41) is None and cudart.pinned
    assert not cudart.pinned


def test_a_failed_start_releases_the_store(cudart: FakeCudart) -> None:
    early = EarlyHostStore(SHAPE, 40, 64, GPU)
    early.close()
    early.close()
    assert not cudart.pinned


def test_too_little_memory_is_reported_to_whoever_waits(cudart: FakeCudart) -> None:
    cudart.fails_at = 2
    with closing(EarlyHostStore(SHAPE, 40, 64, GPU)) as early:
        with pytest.raises(StartupError, match="cannot be pinned"):
            early.wait(lambda done, total: None)
        assert early.take(40) is None
    assert not cudart.pinned


def test_an_engine_begins_its_host_store_before_it_loads_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    class Recorded(EarlyHostStore):
        def __init__(self, shape: KvShape, pages: int, page_rows: int, device: torch.device) -> None:
            events.append(("begin", pages))
            super().__init__(shape, pages, page_rows, device)

        def wait(self, progress: Any) -> None:
            events.append("wait")
            super().wait(progress)

        def take(self, pages: int) -> Any:
            events.append(("take", pages))
            self.taken = host_store.HostStore(shape_of[0], pages, 64, torch.device("cpu"))
            return self.taken

    shape_of: list[KvShape] = []
    load = ModelLoader.load

    def recorded_load(self: ModelLoader, progress: Any) -> Any:
        events.append("load")
        shape_of.append(self.plan.weights.kv_shape)
        return load(self, progress)

    monkeypatch.setattr(model_workers, "EarlyHostStore", Recorded)
    monkeypatch.setattr(ModelLoader, "load", recorded_load)
    config = EngineConfig(model=DEMO, device="cpu", device_kv_tokens=512, max_num_seqs=2)
    with closing(build_engine(config)) as engine:
        (shard,) = engine.executor.hosts()
        pages = shard.store.rows.shape[1] // 64
        assert events == [("begin", pages), "load", "wait", ("take", pages)]


def test_there_is_no_early_store_on_a_cpu() -> None:
    with closing(EarlyHostStore(SHAPE, 40, 64, torch.device("cpu"))) as early:
        early.wait(lambda done, total: None)
        assert early.take(40) is None
