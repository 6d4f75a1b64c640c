"""The workers of one engine. They load the weights once, and can allocate KV memory more than once."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from hotset.base.config import EngineConfig
from hotset.base.status_line import ShowProgress, show_counts
from hotset.base.units import show_bytes
from hotset.engine.build_runner import build_runner
from hotset.engine.decode_graphs import RunnerModel
from hotset.engine.loading import ModelLoader, release_unused, use_device
from hotset.engine.sizing import KvBudget, WorkerMemory, free_bytes, shared_budget
from hotset.engine.start_plan import check_start
from hotset.engine.warm_up import run_largest_steps
from hotset.engine.workers.executor import Executor, InProcessExecutor
from hotset.engine.workers.processes import MultiprocessExecutor
from hotset.memory.device_pool import KvShape
from hotset.memory.host_store import HostStore
from hotset.models.checkpoint.files import ModelFiles
from hotset.models.checkpoint.model_names import model_name

LOGGER = logging.getLogger("hotset.engine")
WARM_UP_PAGES = 16  # pages of the KV memory on which steps are measured


class Started(NamedTuple):
    """Workers with KV memory, ready to execute steps."""

    budget: KvBudget
    executor: Executor


class EarlyHostStore:
    """A host store that a thread allocates and pins while the weights are loaded: both take long, and neither needs
    what the other does. On a CPU, where it takes no time, there is none.

    It has as many pages as are planned before loading. If another number is needed in the end, it is released.
    """

    def __init__(self, shape: KvShape, pages: int, page_rows: int, device: torch.device) -> None:
        """Begins. `close` must follow."""
        self._pages = pages
        self._store: HostStore | None = None
        self._failure: Exception | None = None
        self._progress: Callable[[int, int], None] = lambda done, total: None
        self._thread: threading.Thread | None = None
        if pages and device.type == "cuda":
            self._thread = threading.Thread(
                target=self._allocate, args=(shape, page_rows, device), name="hotset-host-store", daemon=True
            )
            self._thread.start()

    def wait(self, progress: Callable[[int, int], None]) -> None:
        """Waits for the store. `progress(done, total)` counts the bytes that are pinned meanwhile. Raises StartupError
        if there is too little memory."""
        if self._thread is None:
            return
        self._progress = progress
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def take(self, pages: int) -> HostStore | None:
        """Returns the store, which the caller then owns. None if there is none of `pages` pages. Call `wait` first."""
        if pages != self._pages:
            return None
        store, self._store = self._store, None
        return store

    def close(self) -> None:
        """Releases the store, unless it was taken. Idempotent."""
        if self._thread is not None:
            self._thread.join()
        if self._store is not None:
            self._store.close()
        self._store = None

    def _allocate(self, shape: KvShape, page_rows: int, device: torch.device) -> None:
        try:
            use_device(device)
            self._store = HostStore(shape, self._pages, page_rows, device, self._report)
        except Exception as error:
            self._failure = error

    def _report(self, done: int, total: int) -> None:
        self._progress(done, total)


class WorkerInProcess:
    """The worker of an engine that runs the whole model in its own process."""

    def __init__(
        self, config: EngineConfig, device: torch.device, show: ShowProgress, advance: Callable[[], None]
    ) -> None:
        """`advance` is called after each layer that a step computes."""
        device = use_device(device)
        self._device, self._show, self._advance = device, show, advance
        self._loader = ModelLoader(config, device)
        self._executor: Executor | None = None

    def start(self, config: EngineConfig) -> Started:
        """Loads the weights, unless they are loaded, sizes the KV memory and allocates it."""
        loader, device = self._loader, self._device
        spec, host_free = loader.files.spec, free_bytes(torch.device("cpu"))  # measured once: pinning takes it
        planned = check_start(config, loader.files, [replace(loader.plan, host_free=host_free)], [True], device)
        early = EarlyHostStore(loader.plan.weights.kv_shape, planned.host_pages, config.page_rows, device)
        try:
            model = loader.load(show_counts(self._show, f"Loading {model_name(config.model)}", in_bytes=True))
            model.on_layer = self._advance
            early.wait(show_counts(self._show, "Preparing the host store", in_bytes=True))
            steps = None
            if device.type == "cuda" and config.device_kv_tokens is None and config.device_kv_gib is None:
                steps = _measure_steps(config, model, planned, device, spec.vocab, self._show)
            memory = WorkerMemory(model.kv_shape, loader.free_for_kv(steps), host_free=host_free)
            budget = shared_budget(config, [memory], spec.context, device)
            if steps is not None:
                LOGGER.info(
                    "steps need %s (%s were estimated); KV cache: %s",
                    show_bytes(steps),
                    show_bytes(loader.plan.steps),
                    show_bytes(budget.device_bytes),
                )
            host = early.take(budget.host_pages)
        finally:
            early.close()
        pinned = show_counts(self._show, "Preparing the KV cache", in_bytes=True)
        runner = build_runner(config, model, budget, device, spec.vocab, pinned, host=host)
        self._executor = InProcessExecutor(runner)
        return Started(budget, self._executor)

    def drop_mtp(self, config: EngineConfig) -> None:
        """Releases the KV memory and the MTP layer, so that the worker can `start` again with `config`, which has no
        drafts. All other weights stay."""
        self.close()
        self._loader.drop_mtp(config)

    def close(self) -> None:
        """Releases the KV memory. Idempotent."""
        if self._executor is not None:
            self._executor.close()
        self._executor = None


class WorkerProcesses:
    """Worker processes, each of which has a part of the model. The methods are those of `WorkerInProcess`."""

    def __init__(
        self, executor: MultiprocessExecutor, files: ModelFiles, device: torch.device, show: ShowProgress
    ) -> None:
        """Owns the `executor`, whose workers have been started. `device` is that of its first worker."""
        self._executor, self._files, self._device, self._show = executor, files, device, show

    def start(self, config: EngineConfig) -> Started:
        workers = self._executor
        loading = show_counts(self._show, f"Loading {model_name(config.model)}", in_bytes=True)
        plans = workers.plan()
        check_start(config, self._files, plans, workers.owns_store, self._device)
        budget = shared_budget(config, workers.load(loading), self._files.spec.context, self._device)
        workers.init_cache(budget, show_counts(self._show, "Preparing the KV cache", in_bytes=True))
        return Started(budget, workers)

    def drop_mtp(self, config: EngineConfig) -> None:
        self._executor.drop_mtp(config)

    def close(self) -> None:
        self._executor.close()


ModelWorkers = WorkerInProcess | WorkerProcesses


def _measure_steps(
    config: EngineConfig, model: RunnerModel, planned: KvBudget, device: torch.device, vocab: int, show: ShowProgress
) -> int:
    """Returns the memory that the largest steps, the tables of all seats and all graphs take on a GPU.

    They run on a KV memory of a few pages, which is freed again. Graphs contain addresses, so they are captured once
    more on the real one. What libraries and loaded kernels keep is not counted, because the memory that is free for KV
    is measured after this.
    """
    torch.cuda.empty_cache()
    free = free_bytes(device)
    small = replace(
        planned,
        device_pages=min(WARM_UP_PAGES, planned.device_pages),
        host_pages=min(WARM_UP_PAGES, planned.host_pages),
    )
    executor = InProcessExecutor(build_runner(config, model, small, device, vocab))
    try:
        executor.warm_up(show_counts(show, "Compiling kernels of decode steps"))
        run_largest_steps(executor, config, small, 1, show_counts(show, "Compiling kernels of prompts"))
        torch.cuda.synchronize(device)
        # torch keeps what it has freed until the next capture, so this includes the peaks of all steps.
        taken = free - free_bytes(device) - executor.pool.bytes.nbytes
    finally:
        executor.close()
        del executor
        release_unused(device)
    kept = free - free_bytes(device)
    return max(0, taken - kept)
