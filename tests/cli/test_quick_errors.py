"""Mistakes that flags and the model's configuration files show are answered before torch is imported and before a
process is started. Torch is blocked here in all processes, so a command that needs it fails with another message."""

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import tiny_directory
from ports import reserved_port

from hotset.base.devices import has_gpu_driver

ROOT = Path(__file__).resolve().parents[2]
DEMO = str(ROOT / "models" / "demo-dsa")
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
slow = [name for name in ("numpy", "rich", "asyncio", "fastapi", "tokenizers", "uvicorn") if name in sys.modules]
json.dump((results, slow), sys.stdout)
"""


WRONG_PREFILL_ARGS = {
    "--tensor-paralel-size 2": "No such option: --tensor-paralel-size; did you mean --tensor-parallel-size?",
    "--tensor-paralel-size=2": "No such option: --tensor-paralel-size; did you mean --tensor-parallel-size?",
    "--tensor-parallel-size two": "Invalid value for '--tensor-parallel-size'",
    "--tensor-parallel-size": "--tensor-parallel-size",
    "--tiers sometimes": "'sometimes'",
    "--max-num-seqs 0": "prefill 1: --max-num-seqs must be at least 1",
    "'": "No closing quotation",
    "another-model": "unexpected extra argument",
    "--help": "No such option: --help",
    "--disaggregate 1P1D": "No such option: --disaggregate",
    "--port 1234": "--port cannot be set for one engine; give it to hotset serve itself",
    "--host 0.0.0.0": "--host cannot be set for one engine",
    "--control 127.0.0.1:0": "--control cannot be set for one engine",
    "--transfer mooncake": "--transfer cannot be set for one engine",
    "--dtype float64": "--dtype cannot be set for one engine",
    "--role decode": "--role cannot be set for one engine; leave it out",
    "--model other": "--model cannot be set for one engine; leave it out",
    "--handoff-secret s3cret-that-is-long": "--handoff-secret cannot be set for one engine",
    "--kv-events tcp://127.0.0.1:5557": "prefill 1: --disaggregate gives each engine its own ports; use port 0",
    "--gpus 0,0": "prefill 1: --gpus 0,0 has GPU 0 twice",
    "--data-parallel-size 2": "prefill 1: --role prefill does not support --data-parallel-size; use --pipeline",
}


@dataclass(frozen=True)
class Answer:
    code: int
    error: str  # on one line
    lines: int  # of the error as it was printed
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
    return [Answer(code, " ".join(error.split()), error.count("\n"), seconds) for code, error, seconds in found]


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
    with reserved_port() as port:
        yield str(port)


def test_mistakes_are_answered_without_torch(tmp_path: Path, taken_port: str, own_port: str) -> None:
    tiny = model(tmp_path, "tiny")
    no_config, broken, absurd = tmp_path / "no-config", model(tmp_path, "broken"), model(tmp_path, "absurd")
    no_config.mkdir()
    (Path(broken) / "config.json").write_text("{")
    (Path(absurd) / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": ' + "9" * 400 + "}")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03")
    sparse, no_tokenizer = model(tmp_path, "sparse", model_type="deepseek_v32"), model(tmp_path, "no-tokenizer")
    (Path(no_tokenizer) / "tokenizer.json").unlink()
    fp8 = model(tmp_path, "fp8", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    huge = model(tmp_path, "huge", hidden_size=1 << 20, intermediate_size=1 << 20)
    gpt2, bare = model(tmp_path, "gpt2", model_type="gpt2"), model(tmp_path, "bare", weights=False)
    awq, sharded = model(tmp_path, "awq", quantization_config={"quant_method": "awq"}), sharded_model(tmp_path)
    keys = {"empty": b"", "blank": b" \n", "two-lines": b"two\nlines", "no-text": b"\xff\xfe", "good": b"key"}
    for name, content in keys.items():
        (tmp_path / name).write_bytes(content)
    taken = f"cannot listen on 127.0.0.1 port {taken_port}: Address already in use"
    one_p_one_d = f"serve {DEMO} --device cpu --disaggregate 1P1D"
    cases = {
        "sevre": "Did you mean 'serve'?",
        "serve --prot 1": "No such option: --prot; did you mean --port?",
        "serve --port eighty": "'--port'",
        "serve --port 65536": "--port must lie in [0, 65535], got 65536",
        "serve --device gpu": "--device 'gpu' is not supported; use 'cpu', 'cuda' or 'cuda:N'",
        "serve --drain-seconds inf": "--drain-seconds must be a finite number",
        "serve --api-key ''": "--api-key must not be empty",
        f"serve --host {'a' * 64} --load-format dummy": "choose another --host",
        "serve --transfer mooncake": "leave it out",
        "generate Hello --temperature nan": "temperature must be a finite number",
        "chat --dtype int4": "--dtype must be one of",
        # A file with an API key.
        f"serve --api-key-file {tmp_path}/missing": "cannot read --api-key-file",
        **{
            f"router --api-key-file {tmp_path}/{name}": "on one line, and nothing else"
            for name in ("empty", "blank", "two-lines")
        },
        f"router --api-key-file {tmp_path}/no-text": "it is not a text file",
        f"router --api-key k --api-key-file {tmp_path}/good": "leave one of them out",
        # Ports.
        f"serve {tiny} --port {taken_port}": taken,
        f"serve {tiny} --disaggregate 1P1D --port {taken_port}": taken,
        f"router --port {taken_port}": taken,
        f"serve {tiny} --port {own_port} --kv-events tcp://127.0.0.1:{own_port}": f"--kv-events "
        f"tcp://127.0.0.1:{own_port} uses the port of --port 127.0.0.1:{own_port}; choose another port",
        # Model directories.
        f"serve {tmp_path}/tinny": f"{tmp_path / 'tinny'} does not exist; a model is a directory",
        f"serve {tmp_path}/tinny --disaggregate 1P1D": "does not exist",
        f"generate Hello --model {tmp_path}/tinny": "does not exist",
        f"eval retrieval --model {tmp_path}/tinny": "does not exist",
        f"serve {no_config}": f"{no_config} holds no config.json",
        f"serve {tmp_path}/cut.gguf": "cut.gguf is damaged or cut short",
        f"serve {broken}": "config.json is not readable as JSON",
        f"serve {absurd}": f"{absurd}/config.json: ",
        f"serve {gpt2}": "model_type is 'gpt2'; supported: llama, qwen3, ",
        f"serve {bare}": "bare holds no *.safetensors files",
        f"serve {sharded}": "model-00002-of-00002.safetensors is missing",
        f"serve {tiny} --tokenizer {no_config}": f"{no_config} holds no tokenizer.json",
        f"generate Hello --model {no_tokenizer}": "name a directory that has one with --tokenizer",
        f"serve {tiny} --chat-template {tmp_path}/chat.jinja": "chat.jinja",
        f"serve {awq}": "quant_method is 'awq'",
        # Settings that do not suit the model.
        f"serve {tiny} --max-model-len 129": "--max-model-len 129 exceeds the 128 tokens of this model's context",
        f"chat --model {tiny} --max-model-len 129": "--max-model-len 129 exceeds",
        f"serve {huge} --device cpu": "take 49152.4 GiB of memory, but only",
        f"serve {tiny} --default-chat-template-kwargs {{": "must be a JSON object, got '{'",
        f"serve {tiny} --tensor-parallel-size 3": "does not divide 2 attention heads",
        f"serve {fp8} --tensor-parallel-size 2": "24 columns of a dense MLP in fp8 blocks of 128 and 16 columns",
        f"serve {tiny} --pipeline-parallel-size 3": "the model has 2 layers; from 1 to 2 stages work",
        f"serve {tiny} --kv-dtype fp8": "--kv-dtype fp8 needs a model with latent KV",
        f"serve {tiny} --hot-slots 64": "--hot-slots needs a model with sparse attention",
        f"serve {sparse} --hot-slots 4": "--hot-slots 4 cannot hold the 2048 rows",
        f"serve {tiny} --speculate 3": "has no layer for multi-token prediction (MTP), which would draft",
        f"serve {tiny} --speculate-by lookup": "--speculate-by lookup needs --speculate N",
        f"serve {tiny} --accept distribution": "--accept distribution is for drafts of the model's MTP layer",
        # Routers and several engines.
        "router --decode nowhere": "address must look like",
        "router --poll-seconds 0": "--poll-seconds must be a finite number",
        "serve --disaggregate 1X1D": "--disaggregate takes the numbers",
        "serve --disaggregate 1P1D --role decode": "leave --role out",
        "serve --disaggregate 1P1D --control 127.0.0.1:7000": "use port 0 in --control",
        "serve --disaggregate 1P1D --kv-events tcp://127.0.0.1:5557": "use port 0 in --kv-events",
        "serve --disaggregate 1P1D --tiers off": "--tiers off",
        # --disaggregate generates a secret, so this --control needs an interface only.
        "serve --disaggregate 1P1D --control 10.0.0.1:0": "--transfer-interface must name the interface",
        f"serve {DEMO} --prefill-args ''": "are for --disaggregate",
        f"{one_p_one_d} --gpus 0,1": "give it in --prefill-args or --decode-args",
        f"{one_p_one_d} --decode-args '' --decode-args ''": "starts 1 decode engine; give it once",
        f"{one_p_one_d} --decode-args '--tensor-parallel-size 3'": "decode 1: --tensor-parallel-size 3",
        f"{one_p_one_d} --decode-args '--data-parallel-size 3'": "decode 1: --data-parallel-size 3 does not divide 8",
        f"serve {DEMO} --device cpu --disaggregate 1P2D --decode-args '' --decode-args '--hot-slots 1'": "decode 2: "
        "--hot-slots 1",
        **{
            f'serve {DEMO} --disaggregate 1P1D --prefill-args "{flags}"': message
            for flags, message in WRONG_PREFILL_ARGS.items()
        },
    }
    commands = [shlex.split(command) for command in cases]
    commands = [words + ["--port", "0"] * (words[0] == "serve" and "--port" not in words) for words in commands]
    answers = answers_without_torch(commands, tmp_path)
    for (command, message), answer in zip(cases.items(), answers, strict=True):
        assert message in answer.error, (command, answer)
        assert answer.error.startswith("error: ") and answer.code == (2 if "Usage: " in answer.error else 1), answer
        assert answer.lines == 1 or "Usage: " in answer.error, answer
        print(f"{1000 * answer.cpu_seconds:6.1f} ms  hotset {command}")


def test_help_version_and_info_need_no_torch_on_a_machine_without_a_gpu(tmp_path: Path) -> None:
    commands = [["--version"], ["--help"], ["serve", "--help"], *([] if has_gpu_driver() else [["info"]])]
    answers = answers_without_torch(commands, tmp_path, allowed=["rich"])
    assert [(answer.code, answer.error) for answer in answers] == [(0, "")] * len(commands)
