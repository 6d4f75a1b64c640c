"""Real servers in processes of their own. What a test needs of them comes in as a fixture."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

START_SECONDS = 120
STOP_SECONDS = 60

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class RunningServer:
    """A `hotset serve` that has printed its ready line."""

    url: str
    process: subprocess.Popen[str]
    log_path: Path

    def log(self) -> str:
        return self.log_path.read_text()

    def gauge(self, name: str) -> float:
        """The present value of a metric without labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        assert found is not None, f"{name} is not among the metrics"
        return float(found[1])

    def gauge_becomes(self, name: str, wanted: Callable[[float], bool], seconds: float = 10.0) -> float:
        """Waits until the metric is as wanted; returns its last value either way."""
        deadline = time.monotonic() + seconds
        while not wanted(value := self.gauge(name)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return value

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        engines = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(engines) == 1, f"children {children} hold {len(engines)} engines"
        return int(engines[0])


Serving = Callable[..., AbstractContextManager[RunningServer]]


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Serving:
    """`serving(model, *flags)` is a context manager around a server on a free port."""

    @contextmanager
    def start(model: str, *flags: str) -> Iterator[RunningServer]:
        log_path = tmp_path_factory.mktemp("server") / "stderr.txt"
        command = [sys.executable, "-m", "hotset", "serve", model, "--port", "0", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (
            log_path.open("w") as log,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process,
        ):
            try:
                assert process.stdout is not None
                ready = process.stdout.readline()
                url = re.search(r"http://\S+:\d+", ready)
                assert url is not None, f"no ready line but {ready!r}; stderr: {log_path.read_text()}"
                yield RunningServer(url[0], process, log_path)
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                try:
                    process.wait(STOP_SECONDS)
                finally:
                    process.kill()

    return start


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory for `--load-format dummy`: starts quickly, has no tokenizer, answers token ids."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TINY_LLAMA))
    return str(directory)


@pytest.fixture(scope="session")
def embedded_server(serving: Serving) -> Iterator[RunningServer]:
    """The embedded chat model, shared by every test that does it no harm."""
    with serving("embedded") as server:
        yield server


@pytest.fixture(scope="session")
def client(embedded_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{embedded_server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def http(embedded_server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=embedded_server.url, timeout=60) as http:
        yield http
