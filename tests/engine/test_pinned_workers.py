"""Workers pin their host stores and report how far they are. A fake of CUDA's runtime replaces the GPU."""

from typing import Any

import pytest
import torch
from engine.threaded import closing, split_engine
from memory.fake_cudart import FakeCudart
from models.split_workers import SPECS

from hotset.engine.workers import worker as worker_module
from hotset.memory.host_store import HostStore

SIZES = {"page_rows": 16, "max_num_seqs": 4, "device_kv_tokens": 256, "host_kv_tokens": 768}


@pytest.mark.parametrize(
    ("split", "stores_per_rank"), [({"tensor_parallel_size": 2}, 1), ({"pipeline_parallel_size": 2}, 0.5)]
)
def test_progress_counts_the_bytes_that_all_workers_pin(
    split: dict[str, int], stores_per_rank: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart, stores = FakeCudart(), []
    reported: list[tuple[int, int]] = []

    def pinned_store(shape: Any, pages: int, page_rows: int, _device: Any, *args: Any, **options: Any) -> HostStore:
        store = HostStore(shape, pages, page_rows, torch.device("cuda"), *args, **options)
        stores.append(store)
        return store

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(worker_module, "HostStore", pinned_store)
    spec = SPECS["deepseek_v32"]
    with closing(split_engine(spec, 3, on_pinned=lambda *each: reported.append(each), **split, **SIZES)) as engine:
        (shard, *_) = engine.executor.hosts()
        whole = sum(each.store.rows.nbytes + each.store.keys.nbytes for each in engine.executor.hosts())
        total = sum(cudart.pinned.values())
        assert total == sum(store.pinned_bytes for store in stores) == len(stores) * stores_per_rank * whole
        assert [done for done, _ in reported] == sorted({done for done, _ in reported})
        assert {each for _, each in reported} == {total} and reported[-1][0] == total
        assert len(reported) == len(cudart.pinned) and shard.store.pinned_bytes == 0, "the controller pins nothing"
    assert not cudart.pinned, "workers unpin their stores"
