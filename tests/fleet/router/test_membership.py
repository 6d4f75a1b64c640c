"""Workers join and leave a router. A worker of another model or role, or on a host that is not allowed, is rejected."""

import json
from pathlib import Path

import httpx
import plain_http
import pytest
from running_router import Cluster, Router, Stub
from waiting import wait_until

from hotset.base.errors import ConfigError
from hotset.fleet.router.config import LOOPBACK_HOSTS, RouterConfig, is_allowed
from hotset.fleet.router.workers_file import read_workers

KEY = {"Authorization": "Bearer sesame"}


def change_workers(router: Router, method: str, url: str, **headers: str) -> httpx.Response:
    return plain_http.request(method, f"{router.url}/workers", json={"url": url}, headers=headers, timeout=10)


def test_without_live_workers_clients_get_503_with_retry_after(router_with_key: Router) -> None:
    for answer in (
        plain_http.get(f"{router_with_key.url}/health", timeout=10),
        router_with_key.post(headers=KEY),
        plain_http.get(f"{router_with_key.url}/v1/models", headers=KEY, timeout=10),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_workers")
        assert int(answer.headers["retry-after"]) > 0
    assert router_with_key.metric("hotset_router_requests_total", outcome="no_workers") >= 1


def test_workers_join_and_leave_while_requests_run(router_with_key: Router, idle_workers: list[Stub]) -> None:
    p1, _, d1, d2 = idle_workers
    for stub, role in ((p1, "prefill"), (d1, "decode")):
        joined = change_workers(router_with_key, "POST", f"{stub.url}/", **KEY)
        assert (joined.status_code, joined.json()["role"], joined.json()["up"]) == (201, role, True)
    assert change_workers(router_with_key, "POST", d1.url, **KEY).json()["error"]["code"] == "known_worker"
    d1.behave(behaviour="drip")
    with router_with_key.stream(headers=KEY) as stream:
        pieces = stream.iter_raw()
        next(pieces)
        assert change_workers(router_with_key, "POST", d2.url, **KEY).status_code == 201
        assert change_workers(router_with_key, "DELETE", d1.url, **KEY).status_code == 204
        for _ in range(3):
            answer = router_with_key.post(headers=KEY)
            assert answer.headers["x-worker"] == "d2"
        assert all(next(pieces) for _ in range(3)), "a request in flight ended when its worker was removed"
    assert router_with_key.up(p1, d2, **KEY)
    assert change_workers(router_with_key, "DELETE", d1.url, **KEY).json()["error"]["code"] == "no_worker"
    for stub in (p1, d2):
        assert change_workers(router_with_key, "DELETE", stub.url, **KEY).status_code == 204


def test_workers_cannot_be_changed_without_the_key(
    router_with_key: Router, router: Router, idle_workers: list[Stub]
) -> None:
    before = router.workers()
    for answer in (
        change_workers(router_with_key, "POST", idle_workers[0].url),
        change_workers(router, "POST", "http://127.0.0.1:1", **KEY),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert change_workers(router, "DELETE", idle_workers[0].url).status_code == 401
    assert router.workers().keys() == before.keys()
    assert plain_http.post(f"{router_with_key.url}/v1/completions", json={}, timeout=10).status_code == 401


def test_a_url_that_is_not_a_worker_cannot_join(router_with_key: Router, cluster: Cluster) -> None:
    both, odd, moved, vague = cluster.stubs(
        both="both", odd="decode", moved="decode", vague="decode", behaviour="nonsense"
    )
    both.behave(behaviour="well")
    moved.behave(behaviour="redirects", target=vague.url)
    vague.behave(behaviour="well", control="0.0.0.0:9000")
    for url, why in (
        ("http://127.0.0.1:9", "cannot be reached"),
        (both.url, "its role is 'both'"),
        (odd.url, "something other than a worker's state"),
        (moved.url, "answered 307 at /handoff"),
        (vague.url, "its control address '0.0.0.0:9000' is not an address"),
        ("ftp://x", "address must look like"),
        ("http://user:secret@x:1", "address must look like"),
        ("http://x:1/path", "address must look like"),
    ):
        answer = change_workers(router_with_key, "POST", url, **KEY)
        assert answer.status_code == 400 and why in answer.json()["error"]["message"], answer.text
    for body in (b"", b"[]", b'{"url": 1}', b"\xff"):
        answer = plain_http.post(f"{router_with_key.url}/workers", content=body, headers=KEY, timeout=10)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    assert router_with_key.workers(**KEY) == {}


def test_a_worker_of_another_model_or_role_gets_no_requests(cluster: Cluster, idle_workers: list[Stub]) -> None:
    p1, p2, d1, _ = idle_workers
    other = cluster.stub("decode", "other", model="another")
    router = cluster.router([p1], [d1, p2], "--api-key", "sesame")
    assert wait_until(lambda: "its role is 'prefill', not 'decode'; start it with --role decode" in router.log())
    refused = change_workers(router, "POST", other.url, **KEY)
    assert refused.status_code == 400 and "serves 'another', while" in refused.json()["error"]["message"]
    assert router.up(p1, d1, **KEY)
    answers = [router.post(headers=KEY) for _ in range(3)]
    assert [answer.headers["x-worker"] for answer in answers] == ["d1"] * 3


def test_only_workers_on_allowed_hosts_may_join(cluster: Cluster, idle_workers: list[Stub]) -> None:
    _, _, d1, _ = idle_workers
    router = cluster.router(
        [], [], "--api-key", "sesame", "--allow-workers", "10.9.8.0/24", "worker.example", ready=False
    )
    for url in (d1.url, "http://169.254.169.254", "http://localhost:1", "http://worker.example.attacker.example"):
        answer = change_workers(router, "POST", url, **KEY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_allowed"), answer.text
        assert "10.9.8.0/24, worker.example" in answer.json()["error"]["message"]
    assert not d1.seen()["requests"] and router.workers(**KEY) == {}


@pytest.mark.parametrize(
    ("url", "allowed", "expected"),
    [
        ("http://127.0.0.1:8001", LOOPBACK_HOSTS, True),
        ("http://127.255.0.9", LOOPBACK_HOSTS, True),
        ("http://[::1]:1", LOOPBACK_HOSTS, True),
        ("http://LOCALHOST:1", LOOPBACK_HOSTS, True),
        ("http://10.0.0.1:1", LOOPBACK_HOSTS, False),
        ("http://0.0.0.0:1", LOOPBACK_HOSTS, False),
        ("http://[::]:1", LOOPBACK_HOSTS, False),
        ("http://2130706433:1", LOOPBACK_HOSTS, False),
        ("http://0x7f.1:1", LOOPBACK_HOSTS, False),
        ("http://[::ffff:127.0.0.1]:1", LOOPBACK_HOSTS, False),
        ("http://127.0.0.1.attacker.example:1", LOOPBACK_HOSTS, False),
        ("http://10.1.2.3:1", ["10.0.0.0/8"], True),
        ("http://11.1.2.3:1", ["10.0.0.0/8"], False),
        ("http://gpu-1.cluster:1", ["GPU-1.cluster"], True),
        ("http://gpu-2.cluster:1", ["gpu-1.cluster"], False),
        ("http://127.0.0.1:1", [], False),
    ],
)
def test_the_host_of_a_worker_is_compared_with_names_addresses_and_networks(
    url: str, allowed: list[str], expected: bool
) -> None:
    assert is_allowed(url, allowed) is expected


@pytest.mark.parametrize("host", ["10.0.0.0/33", "http://x", "a b", "", "1.2.3", "x:8001"])
def test_an_invalid_allowed_host_is_refused_at_startup(host: str) -> None:
    with pytest.raises(ConfigError, match="--allow-workers takes host names"):
        RouterConfig(allow_workers=(host,))


def write_workers(path: Path, **workers: list[str]) -> None:
    """Replaces the file as its readers expect: in one piece."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(workers))
    new.rename(path)


def test_the_workers_of_a_file_come_and_go_while_requests_run(
    shared_cluster: Cluster, idle_workers: list[Stub], tmp_path: Path
) -> None:
    p1, _, d1, d2 = idle_workers
    file = tmp_path / "workers.json"
    write_workers(file, prefill=[p1.url], decode=[d1.url])
    router = shared_cluster.router([], [], "--workers-file", str(file), "--api-key", "sesame")
    assert router.up(p1, d1, **KEY)
    d1.behave(behaviour="drip")
    with router.stream(headers=KEY) as stream:
        pieces = stream.iter_raw()
        next(pieces)
        write_workers(file, prefill=[p1.url], decode=[d2.url])
        assert wait_until(lambda: router.up(p1, d2, **KEY))
        answer = router.post(headers=KEY)
        assert answer.headers["x-worker"] == "d2"
        assert all(next(pieces) for _ in range(3)), "a request in flight ended when its worker was removed"
    file.write_text("{")
    assert wait_until(lambda: "must contain a JSON object" in router.log())
    file.unlink()
    assert router.up(p1, d2, **KEY), "a file that cannot be read has removed workers"
    refused = change_workers(router, "POST", d1.url, **KEY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_allowed")
    write_workers(file, prefill=[p1.url], decode=[d1.url, d2.url])
    assert wait_until(lambda: router.up(p1, d1, d2, **KEY)), "a file that returns is read"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "must contain a JSON object"),
        ('{"prefil": []}', "must contain a JSON object"),
        ('{"prefill": ["http://a:1"], "decode": ["http://a:1/"]}', "names a worker twice"),
        ('{"prefill": ["a:1"]}', "must look like http://host:port"),
        (json.dumps({"decode": [f"http://a:{port}" for port in range(1, 258)]}), "names 257 workers"),
        (None, "No such file"),
    ],
)
def test_a_file_that_does_not_name_workers_is_refused(tmp_path: Path, text: str | None, reason: str) -> None:
    file = tmp_path / "workers.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_workers(file)


def test_workers_come_from_a_file_or_from_flags() -> None:
    with pytest.raises(ConfigError, match="leave out --prefill and --decode"):
        RouterConfig(workers_file="w.json", decode=("http://a:1",))
