"""The live page and `hotset top` load nothing from elsewhere, and their data needs the API key. The traces of requests
reach a collector. A signal ends requests, pages and the server.

With a headless Chromium, the page is used against servers under load (`make test-all`).
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import plain_http
import pytest
from browser import CHROMIUM, browser
from harness import DEMO
from otlp_collector import Collector, attributes_of, check_spans, collector
from processes import children_of, command_line
from pseudo_terminal import run_on_terminal
from running_server import API_KEY, RunningServer, error_of, serving
from typer.testing import CliRunner
from waiting import WAIT_SECONDS, in_event_loop, wait_until

from hotset.base.serve_config import ServeConfig
from hotset.cli import app, main
from hotset.serve.app import create_app
from hotset.serve.page import page_response

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium-headless-shell")


class Elements(HTMLParser):
    """Collects ids and everything that would be loaded, and checks that elements are nested."""

    VOID = ("meta", "link", "input", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.ids += [values["id"]] if values.get("id") else []  # type: ignore[list-item]
        self.loaded += [value or "" for name, value in attributes if name in ("src", "srcset", "action", "style")]
        self.loaded += [values.get("href") or ""] if tag == "link" else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"


@pytest.fixture(scope="module")
def collected() -> Iterator[tuple[str, Collector]]:
    with collector() as url_and_collected:
        yield url_and_collected


@pytest.fixture(scope="module")
def server(
    tiny_model: str, collected: tuple[str, Collector], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server with an API key, which sends traces to the collector."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "key.txt").write_text(API_KEY)
    flags = ["--load-format", "dummy", "--device", "cpu", "--api-key-file", str(folder / "key.txt")]
    with serving(folder, tiny_model, *flags, "--drain-seconds", "4", "--otlp", collected[0]) as server:
        yield server


def test_the_page_is_whole_and_its_policy_allows_only_itself() -> None:
    response = page_response()
    html, policy = bytes(response.body).decode(), response.headers["content-security-policy"]
    elements = Elements()
    elements.feed(html)
    assert not elements.open and len(set(elements.ids)) == len(elements.ids)
    assert elements.loaded == ["data:,"], "everything must be in the file; attributes of style are forbidden"
    script, style = (re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)[0] for tag in ("script", "style"))
    assert not re.search(r"https?://(?!\S*\\/)|@import|url\(", style) and "http" not in re.sub(r"https\?", "", script)
    assert set(re.findall(r'\$\("([\w-]+)"\)', script)) <= set(elements.ids), (
        "the script uses an element that is missing"
    )
    directives = dict(part.split(" ", 1) for part in policy.split("; "))
    assert directives["default-src"] == "'none'" and directives["connect-src"] == "'self'"
    assert all(directives[name].startswith("'sha256-") for name in ("script-src", "style-src"))
    assert "unsafe" not in policy


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to check the script")
def test_the_script_of_the_page_is_valid(tmp_path: Path) -> None:
    html = bytes(page_response().body).decode()
    (tmp_path / "page.js").write_text(re.findall(r"<script>(.*?)</script>", html, re.DOTALL)[0])
    checked = subprocess.run(["node", "--check", str(tmp_path / "page.js")], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def lines_of(stream: httpx.Response) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in stream.iter_lines())


def test_the_page_is_public_and_its_data_needs_the_key_and_shows_a_request(server: RunningServer) -> None:
    page = plain_http.get(f"{server.url}/", timeout=WAIT_SECONDS)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    error_of(plain_http.get(f"{server.url}/live", timeout=WAIT_SECONDS), 401)
    key = {"Authorization": f"Bearer {API_KEY}"}
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 40, "ignore_eos": True}
    with plain_http.Client(base_url=server.url, timeout=WAIT_SECONDS, headers=key) as http:
        with http.stream("GET", "/live") as stream:
            messages = lines_of(stream)
            first = next(messages)
            assert (first["hello"]["model"], first["hello"]["kind"]) == ("tiny", "server")
            assert http.post("/v1/completions", json=body).status_code == 200
            ended: list[Any] = []
            while not ended:
                ended = [request for request in next(messages).get("ended", ()) if request["reason"]]
        assert (ended[0]["prompt"], ended[0]["answer"], ended[0]["reason"]) == (5, 40, "length")
        phases = [state for _, lane, state in ended[0]["story"] if lane == "phase"]
        assert phases[:3] == ["waiting", "prefill", "decode"] and phases[-1] == "finished"
        server.wait_for_log(r"GET /live")  # a stream is logged when it ends: the server has noticed it


@in_event_loop
async def test_without_the_page_its_data_are_not_served_either() -> None:
    client: Any = SimpleNamespace(model=SimpleNamespace(name="m"))
    transport = httpx.ASGITransport(app=create_app(client, ServeConfig(page=False)))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        root = await http.get("/")
        assert (root.status_code, root.headers["location"]) == (307, "/docs")
        error_of(await http.get("/live"), 404)


def test_top_shows_requests_in_a_terminal_until_it_is_interrupted(server: RunningServer, tmp_path: Path) -> None:
    key = {"Authorization": f"Bearer {API_KEY}"}
    body = {"model": "tiny", "prompt": [7] * 70, "max_tokens": 8000, "ignore_eos": True, "stream": True, "n": 6}
    deadline = time.monotonic() + WAIT_SECONDS
    command = [sys.executable, "-m", "hotset", "top", server.url]
    environment = {**os.environ, "HOTSET_API_KEY": API_KEY, "COLUMNS": "150", "LINES": "40", "TERM": "xterm"}

    has_request = re.compile(r"resident 6 .*cmpl-\S+ +resident +decode +70 ", re.DOTALL)

    interrupted: set[int] = set()

    def interrupt(output: str) -> None:
        if has_request.search(plain(output[-8000:])) or time.monotonic() > deadline:
            for pid in {pid for pid in children_of(os.getpid()) if b"\0top\0" in command_line(pid)} - interrupted:
                interrupted.add(pid)
                os.kill(pid, signal.SIGINT)

    with (
        plain_http.Client(base_url=server.url, timeout=WAIT_SECONDS, headers=key) as http,
        http.stream("POST", "/v1/completions", json=body) as stream,
    ):
        lines = stream.iter_lines()  # the request is aborted when this iterator is deleted
        next(lines)
        status, output = run_on_terminal(command, tmp_path, environment, interrupt)
    assert status == 0 and has_request.search(plain(output)), output
    assert output.count("\x1b[?1049h") == output.count("\x1b[?1049l") == 1, "it must leave the terminal as it was"
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l"), "the cursor must be visible again"
    assert "tokens/s" in plain(output) and "first token" in plain(output)


def plain(output: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)


def test_top_prints_one_frame_on_request_and_an_error_in_one_line(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    (tmp_path / "key.txt").write_text(API_KEY)
    shown = CliRunner().invoke(app, ["top", server.url, "--once", "--api-key-file", str(tmp_path / "key.txt")])
    assert shown.exit_code == 0 and "tiny cpu" in shown.stdout and not shown.stderr
    for url, problem in {
        server.url: "needs an API key",
        "localhost:1": "must look like http://127.0.0.1:8000",
        "http://127.0.0.1:1": "cannot read http://127.0.0.1:1/live: ",
    }.items():
        monkeypatch.setattr(sys, "argv", ["hotset", "top", url])
        with pytest.raises(SystemExit, match="1"):
            main()
        error = capsys.readouterr().err
        assert error.startswith("error: ") and problem in error and error.count("\n") == 1


def test_a_request_over_http_becomes_a_trace_within_that_of_its_client(
    server: RunningServer, collected: tuple[str, Collector]
) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "ignore_eos": True, "n": 2}
    headers = {"Authorization": f"Bearer {API_KEY}", "traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    answer = plain_http.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=WAIT_SECONDS)
    assert answer.status_code == 200
    collector = collected[1]
    spans = collector.wait_for(2, TRACE_ID)
    children = check_spans(spans)
    roots = [span for span in spans if span["name"] == "request"]
    assert [root["parentSpanId"] for root in roots] == [PARENT_ID] * 2
    for root in roots:
        assert attributes_of(root)["gen_ai.usage.output_tokens"] == "4"
        assert attributes_of(root)["hotset.finish_reason"] == "length"
        names = [span["name"] for span in children[root["spanId"]]]
        assert names[:3] == ["queue", "prefill", "decode"] and "tier resident" in names
    resource = collector.bodies[0]["resourceSpans"][0]["resource"]
    assert attributes_of(resource)["service.name"] == "hotset"


@pytest.fixture(scope="module")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    sizes = "--device-kv-tokens 3000 --host-kv-tokens 20000 --max-num-seqs 8 --max-model-len 4096"
    with serving(tmp_path_factory.mktemp("demo"), DEMO, "--device", "cpu", *sizes.split()) as server:
        yield server


@contextmanager
def long_request(url: str, seed: int) -> Iterator[None]:
    """Runs a request of 1500 random tokens, which would generate 2500 more, until the end of the block."""
    rng, stop = random.Random(seed), threading.Event()
    prompt = [rng.randrange(5, 500) for _ in range(1500)]
    body = {"model": "demo-dsa", "prompt": prompt, "max_tokens": 2500, "ignore_eos": True, "stream": True}

    def read() -> None:
        with plain_http.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as answer:
            for _line in answer.iter_lines():
                if stop.is_set():
                    return  # which closes the connection, and aborts the request

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        stop.set()
        reader.join()


WATCH_TIERS = """
window.changes = new Set();
new MutationObserver(records => {
  for (const { target, oldValue } of records) changes.add(oldValue + " " + target.dataset.tier);
}).observe(document.getElementById("picture"), {
  subtree: true, attributes: true, attributeFilter: ["data-tier"], attributeOldValue: true,
});
"""
SEND_CHAT = """
document.getElementById("prompt").value = "hello";
document.getElementById("tiers").value = "tiered";
document.getElementById("chat-form").requestSubmit();
"""
ANSWER = "document.querySelector('.message.assistant')"


@pytest.mark.slow
@NEEDS_CHROMIUM
def test_the_page_at_work_in_a_browser(demo_server: RunningServer, tmp_path: Path) -> None:
    """A request is demoted when another one of its size arrives: the device pool holds one and a half of them."""
    with browser(tmp_path) as page, ExitStack() as requests:
        page.open(demo_server.url)
        page.wait_for("state.hello && document.getElementById('dot').classList.contains('up')")
        page.evaluate(WATCH_TIERS)
        requests.enter_context(long_request(demo_server.url, seed=1))
        page.wait_for("[...state.requests.values()].some(request => request.phase === 'decode')", 240)
        assert page.evaluate("document.querySelector('.block').dataset.tier") == "resident"
        requests.enter_context(long_request(demo_server.url, seed=2))
        page.wait_for("changes.has('resident tiered')", 240)
        page.wait_for("Number.parseFloat(document.getElementById('n-tokens').textContent) > 0", 240)
        assert "transform" in page.evaluate("getComputedStyle(document.querySelector('.block')).transitionProperty")
        heat = "[...document.getElementById('c-heat').getContext('2d').getImageData(32, 0, 2000, 100).data]"
        page.wait_for(f"{heat}.filter((value, i) => i % 4 === 3 && value).length > 50", 240)

        page.evaluate(SEND_CHAT)
        length = page.wait_for(f"{ANSWER}?.textContent.length", 240)
        page.wait_for(f"{ANSWER}.textContent.length > {length}", 240)  # it streams
        page.wait_for("!!document.querySelector('.block.mine.tiered')", 240)
        page.evaluate("document.getElementById('chat-form').requestSubmit()")  # the button is called Stop now
        page.wait_for("!!document.querySelector('.message.assistant small')")
        assert not page.evaluate("document.querySelector('.message.error')?.textContent || ''")

        page.evaluate("document.querySelector('.block').click()")
        assert page.evaluate("document.getElementById('story').open")
        story = page.evaluate("document.getElementById('story-events').textContent")
        assert all(state in story for state in ("waiting", "prefill", "decode", "resident", "tiered")), story
        page.evaluate("document.getElementById('close').click()")
        ground = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(ground)
        page.evaluate("document.getElementById('theme').click()")
        assert page.evaluate(ground) != light
        page.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, "the page is too wide for a phone"
        assert page.errors == []
        assert {httpx.URL(url).host for url in page.requested if url.startswith("http")} == {"127.0.0.1"}


@pytest.mark.slow
@NEEDS_CHROMIUM
def test_the_page_shows_the_ranks_of_a_data_parallel_server(tiny_model: str, tmp_path: Path) -> None:
    flags = ["--load-format", "dummy", "--device", "cpu", "--data-parallel-size", "2"]
    (tmp_path / "profile").mkdir()
    with serving(tmp_path, tiny_model, *flags) as server, browser(tmp_path / "profile") as page:
        page.open(server.url)
        page.wait_for("document.getElementById('what').textContent.includes('DP2')")
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 40, "ignore_eos": True, "n": 4}
        assert plain_http.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_SECONDS).status_code == 200
        page.wait_for("document.querySelectorAll('#workers tr').length === 3")  # a head and two ranks
        assert not page.evaluate("document.getElementById('fleet').hidden")
        assert page.errors == []


@pytest.mark.slow
@NEEDS_CHROMIUM
def test_the_page_asks_for_the_key(server: RunningServer, tmp_path: Path) -> None:
    with browser(tmp_path) as page:
        page.open(server.url, dark=True)
        page.wait_for("!document.getElementById('key-form').hidden")
        page.evaluate(
            f"document.getElementById('key').value = {API_KEY!r}; document.getElementById('key-form').requestSubmit()"
        )
        page.wait_for("document.getElementById('dot').classList.contains('up')")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_sigterm_drains_running_requests_and_exits_with_0(server: RunningServer) -> None:
    """This is the last test of this file, because it ends the shared server."""
    key = {"Authorization": f"Bearer {API_KEY}"}
    body = {"model": "tiny", "prompt": [1, 2, 3], "ignore_eos": True, "stream": True}
    with (
        plain_http.Client(base_url=server.url, timeout=WAIT_SECONDS, headers=key) as http,
        http.stream("POST", "/v1/completions", json={**body, "max_tokens": 8000}) as endless,
        http.stream("POST", "/v1/completions", json={**body, "max_tokens": 10}) as short,
        http.stream("GET", "/live") as page,
    ):
        messages = lines_of(page)
        assert "hello" in next(messages)
        server.process.send_signal(signal.SIGTERM)
        assert not any("hello" in message for message in messages), "an open page must not delay the end"
        finished = plain_http.events_of(short)
        assert finished[-1] == "[DONE]" and finished[-2]["choices"][0]["finish_reason"] == "length"
        assert wait_until(lambda: plain_http.refuses_connections(server.url))
        assert server.process.poll() is None, "the server must refuse new connections while it drains"
        # A stream that outlasts the drain ends with an error event.
        assert plain_http.events_of(endless)[-1]["error"]["code"] == "engine_stopped"
        assert server.process.wait(90) == 0
        assert "Traceback" not in server.log()
