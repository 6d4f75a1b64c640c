"""The head of the Ray cluster dies or hangs: all processes end with a named error."""

import os
import signal
from pathlib import Path

import pytest
from harness import tiny_directory
from processes import wait_until_ended
from simulated import RAY_WARNINGS, simulated_cluster, spec_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
pytestmark += [pytest.mark.filterwarnings(warning) for warning in RAY_WARNINGS]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_without_the_ray_head_processes_end_with_a_named_error(tmp_path: Path, how: signal.Signals) -> None:
    spec = spec_of(tiny_directory(tmp_path), flags={"load-format": "dummy"}, restart={"head-seconds": 10.0})
    with simulated_cluster(cpus=1, nodes=1) as cluster:
        cluster.up(spec)
        found = cluster.wait_until_complete()
        logs = Path(cluster.cluster.head_node.get_logs_dir_path())
        head = cluster.cluster.head_node.all_processes["gcs_server"][0].process.pid
        try:
            os.kill(head, how)
            wait_until_ended([member["pid"] for member in found["members"]])
        finally:
            if how == signal.SIGSTOP:
                os.kill(head, signal.SIGCONT)
        texts = [path.read_text(errors="replace") for path in logs.glob("worker-*.err")]
        for member in found["members"]:
            assert any(f"[{member['name']}] error: head_lost: the Ray head at" in text for text in texts), member[
                "name"
            ]
