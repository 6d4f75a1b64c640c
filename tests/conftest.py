"""Sets the order of the test files and the number of hypothesis examples, starts garbage collection after the tests are
collected, lets Ctrl-C end the programs that tests start, and makes processes of engines start fast."""

import gc
import multiprocessing
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from examples import load_profile

# Collecting the tests creates a million objects that live until the end. Garbage collection would traverse them again
# and again, which takes 2 s in each worker. So it starts afterwards, and ignores these objects.
gc.disable()

# If a shell starts the tests in the background, they ignore SIGINT, and so do the programs that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# These files run first, in this order. If a slow file started last, the other workers would be idle at the end.
SLOW_FILES = (
    "serve/test_disaggregated.py",
    "serve/test_role_splits.py",
    "serve/test_clients.py",
    "serve/test_openai_client.py",
    "fleet/handoff/test_agent_processes.py",
    "engine/test_handoff_processes.py",
    "kernels/test_interpreted.py",
    "tiers/test_same_tokens.py",
    "tiers/test_known_defects.py",
    "engine/test_handoff.py",
    "engine/test_invariance.py",
    "engine/test_mtp_drafts.py",
    "engine/test_speculation.py",
    "models/test_parity.py",
    "tiers/test_state_machine.py",
    "engine/test_workers.py",
    "engine/test_worker_processes.py",
    "test_cli.py",
    "test_floors.py",
    "fleet/router/test_deaths.py",
    "models/test_sampler.py",
    "serve/test_requests.py",
    "serve/test_hung.py",
    "kernels/test_swap_in.py",
    "kernels/test_triton_compiles.py",
    "engine/test_client.py",
    "kernels/test_sparse_attention_cuda.py",
    "schedule/test_scheduler.py",
    "models/test_demo_model.py",
)


@pytest.fixture(scope="session", autouse=True)
def fast_process_starts() -> Iterator[None]:
    """Makes engine processes and their workers forks of one process that has imported torch. With the start method
    "spawn", each would import torch, which takes over two seconds of CPU time."""
    real = multiprocessing.get_context
    forkserver: Any = real("forkserver")
    forkserver.set_forkserver_preload(["torch", "hotset.engine.build", "hotset.fleet.connections"])

    def get_context(method: str | None = None) -> Any:
        return forkserver if method == "spawn" else real(method)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", get_context)
        yield


@pytest.fixture
def real_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes `fast_process_starts`, for processes that must be children of the test."""
    monkeypatch.setattr(multiprocessing, "get_context", multiprocessing.context._default_context.get_context)


def pytest_configure(config: pytest.Config) -> None:
    load_profile(thorough="not slow" not in config.getoption("markexpr"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def position(item: pytest.Item) -> int:
        path = item.path.as_posix()
        matches = (index for index, name in enumerate(SLOW_FILES) if path.endswith(f"tests/{name}"))
        return next(matches, len(SLOW_FILES))

    items.sort(key=position)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
