"""The live page of a router shows its workers with the numbers that they report, and needs the key for them."""

import json
from typing import Any

import plain_http
from running_router import Cluster, Router, Stub


def test_the_data_of_a_routers_page_are_the_states_of_its_workers(router: Router, idle_workers: list[Stub]) -> None:
    page = plain_http.get(f"{router.url}/", timeout=10)
    assert page.status_code == 200 and "script-src 'sha256-" in page.headers["content-security-policy"]
    with plain_http.stream("GET", f"{router.url}/live", timeout=30) as stream:
        messages: Any = (json.loads(line) for line in stream.iter_lines())
        first, second = next(messages), next(messages)
    assert first["hello"]["kind"] == "router" and "hello" not in second
    for message in (first, second):
        workers = {worker["url"]: worker for worker in message["workers"]}
        assert set(workers) == {stub.url for stub in idle_workers}
        assert {worker["role"] for worker in workers.values()} == {"prefill", "decode"}
        assert all(worker["up"] and worker["state"]["running"] >= 0 for worker in workers.values())
        assert "control" not in next(iter(workers.values()))["state"], "addresses for handoffs are for routers only"
        assert message["sample"]["tokens"] >= 0


def test_without_a_page_the_root_leads_to_the_documentation_and_a_key_protects_the_data(
    shared_cluster: Cluster, router_with_key: Router
) -> None:
    without = shared_cluster.router([], [], "--no-page", ready=False)
    answer = plain_http.get(f"{without.url}/", timeout=10, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "/docs")
    assert plain_http.get(f"{without.url}/live", timeout=10).status_code == 404
    assert plain_http.get(f"{router_with_key.url}/live", timeout=10).status_code == 401
