"""The command `hotset bench`: its output, files, exit codes and Ctrl-C."""

import asyncio
import json
import os
import re
import signal
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from scripted_server import MODEL, ScriptedServer, Stream, all_tokens

from hotset import __version__
from hotset.cli import main

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_SECONDS = 120
SMALL = ("--input-tokens", "20", "--output-tokens", "4", "--warmup", "0", "--seed", "1")
# At exit, prints whether torch was imported.
COMMAND = """
import atexit, sys
atexit.register(lambda: print("torch imported:", "torch" in sys.modules, file=sys.stderr))
from hotset.cli import main
main()
"""


async def start(server: ScriptedServer, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", COMMAND, "bench", server.url, *SMALL, *arguments),
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]


def test_a_sweep_prints_tables_and_writes_json_and_a_picture_without_importing_torch(tmp_path: Path) -> None:
    async def scenario() -> tuple[str, str]:
        async with ScriptedServer() as server, asyncio.timeout(DEADLINE_SECONDS):
            files = ("--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.svg"))
            load = ("--concurrency", "1,4", "--num-requests", "8", "--slo", "e2e:600000")
            process = await start(server, *load, *files)
            out, err = await process.communicate()
            assert process.returncode == 0, err.decode()
            return out.decode(), err.decode()

    out, err = asyncio.run(scenario())
    assert err == "torch imported: False\n"
    assert "concurrency 1: 8 requests in " in out and "concurrency 4: 8 requests in " in out
    assert "mean length: prompts 20.0 tokens, answers 4.0 tokens\nwithin --slo: 100.0% of requests" in out
    assert re.search(r"milliseconds +mean +p50 +p90 +p95 +p99 +max", out)
    assert len(re.findall(r"to first token \(ttft\)( +[0-9.]+){6}", out)) == 2
    assert re.search(r"^ +1 +0( +[0-9.]+){6} +100.0%", out, re.MULTILINE), "the row of concurrency 1 in the last table"
    assert max(map(len, out.splitlines())) <= 80 and out.endswith("seed 1\n")
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["hotset"] == __version__ and report["server"]["model"] == MODEL and report["settings"]["seed"] == 1
    assert [load["concurrency"] for load in report["loads"]] == [1, 4]
    requests = report["loads"][1]["requests"]
    assert [(request["input_tokens"], request["output_tokens"]) for request in requests] == [(20, 4)] * 8
    assert all(len(request["chunk_times"]) == 4 and request["error"] is None for request in requests)
    shown = texts((tmp_path / "r.svg").read_text())
    for title in ("Throughput", "Time between tokens, by concurrency", "Running requests (concurrency 4)"):
        assert title in shown


def test_ctrl_c_reports_what_was_measured_and_exits_with_130(tmp_path: Path) -> None:
    async def scenario() -> None:
        arrived = asyncio.Event()

        async def script(stream: Stream) -> None:
            if stream.index < 3:
                await all_tokens(stream)
                return
            arrived.set()
            await asyncio.sleep(DEADLINE_SECONDS)

        async with ScriptedServer(script) as server, asyncio.timeout(DEADLINE_SECONDS):
            files = ("--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.html"))
            process = await start(server, "--concurrency", "1", "--num-requests", "9", *files)
            await arrived.wait()
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
        assert process.returncode == 130, err.decode()
        assert "concurrency 1: 3 requests, 1 cancelled in " in out.decode() and "Traceback" not in err.decode()

    asyncio.run(scenario())
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["interrupted"] and report["loads"][0]["completed"] == 3
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Runs `hotset bench` in this process and returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["hotset", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://127.0.0.1:1"], "http://127.0.0.1:1 cannot be reached: Cannot connect to host 127.0.0.1:1"),
        (["ftp://x"], "ftp://x cannot be reached"),
        (["http://127.0.0.1:1", "--plot", "x.png"], "--plot x.png: the name must end in .svg or .html"),
        (["http://127.0.0.1:1", "--json", "no/such/x.json"], "--json no/such/x.json: the directory "),
        (["http://127.0.0.1:1", "--trace", "no.jsonl"], "cannot read --trace no.jsonl: No such file"),
        (["http://127.0.0.1:1", "--rate", "fast"], "--rate fast: write a number"),
    ],
)
def test_an_error_is_one_line(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert run_main(monkeypatch, *arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
