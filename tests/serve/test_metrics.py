"""/metrics returns Prometheus text that counts the server's work."""

import httpx
from prometheus_client.parser import text_string_to_metric_families
from running_server import RunningServer

NAMES = {
    "hotset_engine_up",
    "hotset_requests_running",
    "hotset_requests_waiting",
    "hotset_device_pages_held",
    "hotset_device_pages_total",
    "hotset_tokens_generated_total",
    "hotset_tokens_prefilled_total",
    "hotset_recomputes_total",
    "hotset_handoff_retries_total",
    "hotset_prompts_handed_off_total",
    "hotset_steps_total",
    "hotset_time_to_first_token_seconds_count",
    "hotset_inter_token_seconds_count",
}
ANSWERED = 'hotset_http_requests_total{"endpoint": "/v1/completions", "status": "%s"}'


def samples(server: RunningServer) -> dict[str, float]:
    """Returns every sample of one scrape by its name and labels."""
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ", ".join(f'"{key}": "{value}"' for key, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def test_metrics_follow_the_requests(tiny_server: RunningServer) -> None:
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True, "n": 2}
    httpx.post(f"{tiny_server.url}/v1/completions", json=body, timeout=30).raise_for_status()
    before = samples(tiny_server)
    httpx.post(f"{tiny_server.url}/v1/completions", json=body, timeout=30).raise_for_status()
    httpx.post(f"{tiny_server.url}/v1/completions", json={}, timeout=30)
    after = samples(tiny_server)
    gained = {name: after[name] - before.get(name, 0) for name in after}
    assert before.keys() >= NAMES
    assert gained["hotset_tokens_generated_total"] == 10
    assert gained['hotset_requests_finished_total{"reason": "length"}'] == 2
    assert gained["hotset_time_to_first_token_seconds_count"] == 1
    assert gained["hotset_inter_token_seconds_count"] == 8
    assert gained[ANSWERED % 200] == gained[ANSWERED % 400] == 1
    assert after["hotset_device_pages_held"] == 0 and after["hotset_device_pages_total"] > 0
