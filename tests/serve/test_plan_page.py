"""The page /plan: it is public and whole, and its calculation needs the key and refuses wrong input by name."""

import json
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plain_http
import pytest
from browser import CHROMIUM, browser
from processes import children_of, command_line
from running_server import API_KEY, RunningServer, error_of, serving

from hotset.base.config import EngineConfig
from hotset.base.units import GIB
from hotset.lab.plan.calculator import MAX_BYTES
from hotset.lab.plan.gpus import Machine, find_gpu
from hotset.lab.plan.model_configs import find_config
from hotset.lab.plan.planner import make_plan
from hotset.serve.page import page_response

WAIT_SECONDS = 120.0
KEY = {"Authorization": f"Bearer {API_KEY}"}


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "key.txt").write_text(API_KEY)
    flags = ["--load-format", "dummy", "--device", "cpu", "--api-key-file", str(folder / "key.txt")]
    with serving(folder, tiny_model, *flags) as server:
        yield server


def calculate(server: RunningServer, body: Any, headers: dict[str, str] = KEY) -> Any:
    return plain_http.post(f"{server.url}/plan/calculate", json=body, headers=headers, timeout=WAIT_SECONDS)


def calculator_of(server: RunningServer) -> int:
    """Returns the process that calculates plans."""
    (pid,) = [pid for pid in children_of(server.process.pid) if b"hotset.lab.plan.calculator" in command_line(pid)]
    return pid


def test_the_page_is_public_and_its_plans_are_those_of_the_command(server: RunningServer) -> None:
    page = plain_http.get(f"{server.url}/plan", timeout=WAIT_SECONDS)
    assert page.status_code == 200 and "<title>Hotset: plan</title>" in page.text
    error_of(calculate(server, {}, headers={}), 401)
    request = {"model": "glm-5.2", "gpus": 8, "host_gib": 1024, "context": 65536, "max_num_seqs": 128}
    answer = calculate(server, request).json()
    machine = Machine(1024 * GIB, find_gpu("h200"), 8)
    expected = make_plan("glm-5.2", find_config("glm-5.2"), machine, EngineConfig(max_num_seqs=128), (65536,))
    assert {name: answer[name] for name in expected.to_json()} == json.loads(json.dumps(expected.to_json()))
    assert "deepseek-v3.2" in answer["models"] and "h100" in answer["gpus"]
    served = calculate(server, {"model": "served", "gpus": 1, "context": 64}).json()
    assert served["model"] == "served" and served["splits"][0]["reason"] is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"gpu": "h2000"}, "--gpu h2000 is not known"),
        ({"gpus": 0}, "--gpus must lie in"),
        ({"gpus": "8"}, "gpus must be of type int, got '8'"),
        ({"colour": "red"}, "a plan has no setting 'colour'"),
        ({"model": "../secret.json"}, "model must be one of the examples"),
        ({"model": "no-such-model"}, "no-such-model"),
        ({"goal": "fame"}, "--goal must be one of"),
        ({"model": "models"}, "model must be one of the examples"),
        ({"model": "x" * 3000}, "model has 3000 characters, and the limit is 256"),
        ({"model": "x" * 5000}, "the limit for the request of a plan is 4096"),
        ({"host_gib": 1e308}, "--host-gib must lie in [0, 1048576]"),
        ({"host_gib": 10**400}, "host_gib has 1329 bits, and the limit is 64"),
        ([1], "the body must be a JSON object"),
    ],
)
def test_wrong_requests_are_refused_by_name_and_end_no_process(server: RunningServer, body: Any, message: str) -> None:
    assert calculate(server, {}).status_code == 200
    calculator = calculator_of(server)
    assert message in error_of(calculate(server, body), 400)["message"]
    assert calculator_of(server) == calculator


def test_the_process_has_a_limit_of_memory(server: RunningServer) -> None:
    assert calculate(server, {}).status_code == 200
    soft, hard = resource.prlimit(calculator_of(server), resource.RLIMIT_DATA)
    assert soft == hard == MAX_BYTES


def test_a_calculator_that_was_killed_is_started_again(server: RunningServer) -> None:
    assert calculate(server, {}).status_code == 200
    subprocess.run(["kill", "-9", str(calculator_of(server))], check=True)
    answers = [calculate(server, {}).status_code for _ in range(2)]
    assert answers[1] == 200


def test_the_file_of_the_page_loads_nothing_else_and_its_script_is_valid(tmp_path: Path) -> None:
    response = page_response("plan.html")
    html = bytes(response.body).decode()
    script, style = (re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)[0] for tag in ("script", "style"))
    assert "http" not in script and "url(" not in style and ' style="' not in html
    assert "unsafe" not in response.headers["content-security-policy"]
    assert set(re.findall(r'\$\("([\w-]+)"\)', script)) <= set(re.findall(r'id="([\w-]+)"', html))
    if shutil.which("node") is not None:
        (tmp_path / "plan.js").write_text(script)
        assert subprocess.run(["node", "--check", str(tmp_path / "plan.js")]).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium-headless-shell")
def test_the_sliders_change_the_plan_in_a_browser(server: RunningServer, tmp_path: Path) -> None:
    with browser(tmp_path) as page:
        page.open(f"{server.url}/plan")
        page.wait_for("document.querySelector('#key-form:not([hidden])') !== null")
        page.evaluate(
            f"document.getElementById('key').value = {API_KEY!r}; document.getElementById('key-form').requestSubmit()"
        )
        page.wait_for("document.getElementById('splits').rows.length > 0")
        page.errors.clear()  # the first calculation had no key

        def choose(control: str, value: str) -> None:
            page.evaluate(
                f"document.getElementById('{control}').value = '{value}'; "
                f"document.getElementById('{control}').dispatchEvent(new Event('input')); latest = 0; true"
            )
            page.wait_for("latest > 0 && document.getElementById('status').textContent === ''")

        choose("model", "deepseek-v3.2")
        assert page.evaluate("document.getElementById('splits').rows.length") == 5
        requests = "Number(document.getElementById('splits').rows[0].cells[4].textContent.replace(',', ''))"
        short = page.evaluate(requests)
        choose("context", "17")
        assert 0 < page.evaluate(requests) < short
        assert "--max-model-len 131072" in page.evaluate("document.getElementById('flags').textContent")
        choose("gpus", "0")
        assert "does not fit" in page.evaluate("document.getElementById('splits').textContent")
        assert page.errors == [] and all(url.startswith(server.url) for url in page.requested)
