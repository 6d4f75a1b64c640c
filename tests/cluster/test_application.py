"""An application on a real Ray cluster of one node: it serves, tells its state, and ends without leaving a process."""

from pathlib import Path

import pytest
from harness import tiny_directory
from processes import is_running, wait_until_ended
from simulated import RAY_WARNINGS, complete, simulated_cluster, spec_of

from hotset.base.errors import ConfigError
from hotset.cluster import application

pytestmark = [pytest.mark.filterwarnings(warning) for warning in RAY_WARNINGS]


@pytest.mark.slow
def test_an_application_serves_and_ends(tmp_path: Path) -> None:
    spec = spec_of(tiny_directory(tmp_path), flags={"load-format": "dummy"})
    with simulated_cluster(cpus=1) as cluster:
        cluster.up(spec)
        with pytest.raises(ConfigError, match="is up already"):
            application.start_application(spec, None)
        found = cluster.wait_until_complete()
        assert sorted(member["role"] for member in found["members"]) == ["decode", "prefill", "router"]
        assert complete(cluster.url, [5, 6, 7]).status_code == 200
        pids = [member["pid"] for member in found["members"]]
        assert all(map(is_running, pids))
        cluster.down(now=False)
        wait_until_ended(pids)
        with pytest.raises(ConfigError, match="no application 'hotset' runs"):
            cluster.status()
