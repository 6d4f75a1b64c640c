"""Files whose few tests take long come first: begun last, one of them would run on while others have nothing to do."""

import pytest

LONG = (
    "tiers/test_state_machine.py",
    "engine/test_invariance.py",
    "serve/test_disaggregated.py",
    "kernels/test_interpreted.py",
    "models/test_parity.py",
    "evaluate/test_retrieval.py",
    "tiers/test_same_tokens.py",
    "engine/test_handoff_processes.py",
    "engine/test_worker_processes.py",
    "tiers/test_peer_defects.py",
    "engine/test_workers.py",
    "test_cli.py",
    "serve/test_shutdown.py",
    "models/test_demo_model.py",
    "serve/test_workers_die.py",
    "kernels/test_swap_in.py",
    "kernels/test_sparse_attention_cuda.py",
    "schedule/test_scheduler.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def turn(item: pytest.Item) -> int:
        path = item.path.as_posix()
        return next((at for at, name in enumerate(LONG) if path.endswith(f"tests/{name}")), len(LONG))

    items.sort(key=turn)
