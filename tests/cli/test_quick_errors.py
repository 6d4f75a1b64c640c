"""Mistakes that flags and the model's configuration files show are answered before torch is imported and before a
process is started. Torch is blocked here in all processes, so a command that needs it fails with another message."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import tiny_directory

from hotset.base.devices import has_gpu_driver

ROOT = Path(__file__).resolve().parents[2]
# Python imports this module at the start of every process, also of those that Hotset starts.
BLOCK_TORCH = """
import importlib.abc, os, sys
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            open(os.environ["TORCH_IMPORTS"], "a").write(f"{sys.argv}\\n")
            raise ModuleNotFoundError("torch is blocked", name=name)
sys.meta_path.insert(0, Blocked())
"""
# Runs every command line of the JSON list on stdin in this process. Prints the results, and which of the packages that
# would delay an answer were imported, as JSON.
RUN_ALL = """
import contextlib, io, json, sys, time
from hotset.cli import main
results = []
for arguments in json.load(sys.stdin):
    sys.argv, output, error = ["hotset", *arguments], io.StringIO(), io.StringIO()
    began, code = time.process_time(), None
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
        try:
            main()
        except SystemExit as end:
            code = end.code
    results.append((code, error.getvalue(), time.process_time() - began))
slow = [name for name in ("numpy", "rich", "asyncio", "fastapi", "tokenizers") if name in sys.modules]
json.dump((results, slow), sys.stdout)
"""


@dataclass(frozen=True)
class Answer:
    code: int
    error: str  # on one line
    cpu_seconds: float  # without the import of the command line


def answers_without_torch(commands: list[list[str]], folder: Path, allowed: Sequence[str] = ()) -> list[Answer]:
    """Runs `hotset` with each list of arguments. Fails if a process tries to import torch, or if other slow packages
    than `allowed` are imported."""
    (folder / "sitecustomize.py").write_text(BLOCK_TORCH)
    imports = folder / "torch-imports"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))),
        "TORCH_IMPORTS": str(imports),
        "HF_HUB_CACHE": str(folder / "hub"),
        "COLUMNS": "300",
        "TERMINAL_WIDTH": "300",
        "NO_COLOR": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input=json.dumps(commands),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert not imports.exists(), imports.read_text()
    found, slow = json.loads(done.stdout)
    assert slow == list(allowed)
    return [Answer(code, " ".join(error.split()), seconds) for code, error, seconds in found]


def model(folder: Path, name: str, *, weights: bool = True, **changes: Any) -> str:
    """Writes a model directory with files that look complete, and returns its path."""
    directory = folder / name
    directory.mkdir()
    tiny_directory(directory, **changes)
    (directory / "tokenizer.json").write_text("{}")
    if weights:
        (directory / "model.safetensors").write_bytes(b"not read by the command line")
    return str(directory)


def sharded_model(folder: Path) -> str:
    path = model(folder, "sharded", weights=False)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (Path(path) / "model.safetensors.index.json").write_text(json.dumps(index))
    (Path(path) / "model-00001-of-00002.safetensors").write_bytes(b"")
    return path


@pytest.fixture
def taken_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield str(other.getsockname()[1])


@pytest.fixture
def own_port() -> Iterator[str]:
    """A port that other tests cannot take, but on which a process can listen."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield str(reserved.getsockname()[1])


def test_mistakes_are_answered_without_torch(tmp_path: Path, taken_port: str, own_port: str) -> None:
    tiny = model(tmp_path, "tiny")
    no_config, broken = tmp_path / "no-config", model(tmp_path, "broken")
    no_config.mkdir()
    (Path(broken) / "config.json").write_text("{")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03")
    sparse, no_tokenizer = model(tmp_path, "sparse", model_type="deepseek_v32"), model(tmp_path, "no-tokenizer")
    (Path(no_tokenizer) / "tokenizer.json").unlink()
    fp8 = model(tmp_path, "fp8", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    huge = model(tmp_path, "huge", hidden_size=1 << 20, intermediate_size=1 << 20)
    serve = ["serve", "--port", "0"]
    cases: list[tuple[list[str], str]] = [
        (["sevre"], "Did you mean 'serve'?"),
        (["serve", "--prot", "1"], "No such option: --prot; did you mean --port?"),
        (["serve", "--port", "eighty"], "'--port'"),
        (["serve", "--port", "65536"], "--port must lie in [0, 65535], got 65536"),
        (["serve", "--device", "gpu"], "--device 'gpu' is not supported; use 'cpu', 'cuda' or 'cuda:N'"),
        (["serve", "--api-key-file", str(tmp_path / "key")], "cannot read --api-key-file"),
        (
            ["serve", tiny, "--port", taken_port],
            f"cannot listen on 127.0.0.1 port {taken_port}: Address already in use",
        ),
        (
            ["serve", tiny, "--port", own_port, "--kv-events", f"tcp://127.0.0.1:{own_port}"],
            f"--kv-events tcp://127.0.0.1:{own_port} uses the port of --port 127.0.0.1:{own_port}; choose another port",
        ),
        (
            [*serve, tiny, "--role", "prefill", "--control", f"127.0.0.1:{taken_port}"],
            f"cannot listen at 127.0.0.1:{taken_port}: Address already in use; choose another --control",
        ),
        (["router", "--port", taken_port], f"cannot listen on 127.0.0.1 port {taken_port}: Address already in use"),
        ([*serve, str(tmp_path / "tinny")], f"{tmp_path / 'tinny'} does not exist; a model is a directory"),
        ([*serve, str(no_config)], f"{no_config} holds no config.json"),
        ([*serve, str(tmp_path / "cut.gguf")], "cut.gguf is damaged or cut short"),
        ([*serve, broken], "config.json is not readable as JSON"),
        ([*serve, model(tmp_path, "gpt2", model_type="gpt2")], "model_type is 'gpt2'; supported: llama, qwen3, "),
        ([*serve, model(tmp_path, "bare", weights=False)], "bare holds no *.safetensors files"),
        ([*serve, sharded_model(tmp_path)], "model-00002-of-00002.safetensors is missing"),
        (
            [*serve, tiny, "--max-model-len", "129"],
            "--max-model-len 129 exceeds the 128 tokens of this model's context",
        ),
        ([*serve, huge, "--device", "cpu"], "take 49152.4 GiB of memory, but only"),
        ([*serve, tiny, "--tokenizer", str(no_config)], f"{no_config} holds no tokenizer.json"),
        ([*serve, tiny, "--chat-template", str(tmp_path / "chat.jinja")], "chat.jinja"),
        ([*serve, tiny, "--default-chat-template-kwargs", "{"], "must be a JSON object, got '{'"),
        ([*serve, tiny, "--tensor-parallel-size", "3"], "does not divide 2 attention heads"),
        ([*serve, fp8, "--tensor-parallel-size", "2"], "24 columns of a dense MLP in fp8 blocks of 128 and 16 columns"),
        ([*serve, model(tmp_path, "awq", quantization_config={"quant_method": "awq"})], "quant_method is 'awq'"),
        ([*serve, tiny, "--pipeline-parallel-size", "3"], "the model has 2 layers; from 1 to 2 stages work"),
        ([*serve, tiny, "--kv-dtype", "fp8"], "--kv-dtype fp8 needs a model with latent KV"),
        ([*serve, tiny, "--hot-slots", "64"], "--hot-slots needs a model with sparse attention"),
        ([*serve, sparse, "--hot-slots", "4"], "--hot-slots 4 cannot hold the 2048 rows"),
        ([*serve, tiny, "--speculate", "3"], "has no layer for multi-token prediction (MTP), which would draft"),
        ([*serve, tiny, "--speculate-by", "lookup"], "--speculate-by lookup needs --speculate N"),
        ([*serve, tiny, "--accept", "distribution"], "--accept distribution is for drafts of the model's MTP layer"),
        ([*serve, tiny, "--disaggregate", "1X1D"], "--disaggregate takes the numbers"),
        ([*serve, str(tmp_path / "tinny"), "--disaggregate", "1P1D"], "does not exist"),
        (["serve", tiny, "--disaggregate", "1P1D", "--port", taken_port], f"port {taken_port}: Address already in use"),
        (["generate", "Hello", "--model", str(tmp_path / "tinny")], "does not exist"),
        (["generate", "Hello", "--model", no_tokenizer], "name a directory that has one with --tokenizer"),
        (["chat", "--model", tiny, "--max-model-len", "129"], "--max-model-len 129 exceeds"),
        (["eval", "retrieval", "--model", str(tmp_path / "tinny")], "does not exist"),
    ]
    answers = answers_without_torch([arguments for arguments, _ in cases], tmp_path)
    for (arguments, message), answer in zip(cases, answers, strict=True):
        assert message in answer.error, (arguments, answer)
        assert answer.error.startswith("error: ") and answer.code == (2 if "Usage: " in answer.error else 1), answer
        print(f"{1000 * answer.cpu_seconds:6.1f} ms  hotset {' '.join(arguments)}")


def test_help_version_and_info_need_no_torch_on_a_machine_without_a_gpu(tmp_path: Path) -> None:
    commands = [["--version"], ["--help"], ["serve", "--help"], *([] if has_gpu_driver() else [["info"]])]
    answers = answers_without_torch(commands, tmp_path, allowed=["rich"])
    assert [(answer.code, answer.error) for answer in answers] == [(0, "")] * len(commands)
