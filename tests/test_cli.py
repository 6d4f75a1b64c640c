"""The command line: flags that match the configuration, one-line errors, and the commands with the embedded model."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from harness import DEMO, tiny_directory
from pseudo_terminal import run_on_terminal, screen
from typer.testing import CliRunner

from hotset import LLM, SamplingParams, __version__
from hotset.base.config import CHAT_SETTINGS, EngineConfig
from hotset.base.errors import ContextLengthExceeded
from hotset.base.flags import BASICS, PANELS, SERVER_ONLY_SETTINGS, config_values
from hotset.base.host_memory import HostMemory
from hotset.base.numa import HugePages, NumaNode
from hotset.base.serve_config import ServeConfig
from hotset.base.settings import flag_name
from hotset.cli import app, machine, main
from hotset.cli.machine import Gpu, MachineReport, PackageReport, inspect_machine, print_machine
from hotset.cli.terminal import DIM, NOT_DIM, Conversation
from hotset.engine import sizing
from hotset.engine.outputs import Delta
from hotset.fleet.router.config import RouterConfig
from hotset.models.answer_parser import ThinkParser

ROOT = Path(__file__).resolve().parents[1]
SERVE_WITHOUT_FASTAPI = """
import sys
sys.modules["fastapi"] = None  # Python then treats the package as missing
sys.argv = ["hotset", "serve"]
from hotset.cli import main
main()
"""


def flags_of(command: str) -> set[str]:
    commands = typer.main.get_command(app).commands
    options = [p for p in commands[command].params if p.param_type_name == "option"]
    return {name for option in options for name in option.opts}


def fields_as_flags(*config_types: Any) -> set[str]:
    return {f"--{flag_name(setting.name)}" for config_type in config_types for setting in fields(config_type)}


@pytest.mark.parametrize(
    "command", ["serve", "router", "cluster", "generate", "chat", "eval", "bench", "info", "doctor"]
)
def test_help_of_each_command_shows_all_its_flags(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert shown.exit_code == 0
    assert all(flag in shown.stdout for flag in flags_of(command))


def test_every_setting_is_a_flag_and_every_flag_is_a_setting_or_an_option_of_the_command() -> None:
    sampling = {"--max-tokens", "--temperature", "--top-p"}
    server_only = {f"--{flag_name(name)}" for name in SERVER_ONLY_SETTINGS}
    serve_only = {"--disaggregate", "--prefill-args", "--decode-args", "--api-key-file"}
    assert flags_of("serve") == fields_as_flags(EngineConfig, ServeConfig) - {"--model"} | serve_only
    assert flags_of("doctor") == fields_as_flags(EngineConfig, ServeConfig) - {"--model"} | {"--api-key-file", "--json"}
    assert flags_of("router") == fields_as_flags(RouterConfig) | {"--api-key-file"}
    chat_only = {f"--{flag_name(name)}" for name in CHAT_SETTINGS}
    assert flags_of("generate") == fields_as_flags(EngineConfig) - server_only - chat_only | sampling | {"--json"}
    assert flags_of("chat") == fields_as_flags(EngineConfig) - server_only | sampling | {"--system"}


@pytest.mark.parametrize(
    ("command", "first"),
    [
        ("serve", ["model", "--host", "--port", "--api-key", "--api-key-file", "--served-model-name"]),
        ("router", ["--prefill", "--decode", "--host", "--port", "--api-key", "--api-key-file"]),
        ("generate", ["prompt", "--model", "--max-tokens", "--temperature"]),
        ("chat", ["--model", "--system", "--max-tokens"]),
        ("eval retrieval", ["--model", "--url", "--api-key"]),
    ],
)
def test_help_begins_with_the_model_the_address_and_the_key(command: str, first: list[str]) -> None:
    wide = {"COLUMNS": "200", "TERMINAL_WIDTH": "200", "NO_COLOR": "1"}
    shown = CliRunner().invoke(app, [*command.split(), "--help"], env=wide).stdout
    names = re.findall(r"^│ \*? {0,4}(--[\w-]+|\w+) ", shown, re.MULTILINE)
    assert [name for name in names if name in first] == first == names[: len(first)]


def test_every_setting_has_a_panel_of_help() -> None:
    settings = {setting.name for kind in (EngineConfig, ServeConfig, RouterConfig) for setting in fields(kind)}
    listed = [*BASICS, *(name for names in PANELS.values() for name in names)]
    assert len(listed) == len(set(listed))
    assert set(listed) - {"", "api_key_file", "url"} == settings


def test_api_key_of_the_environment_is_used_but_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_API_KEY", "from-environment")
    assert config_values(ServeConfig, {"api_key": None}) == {"api_key": "from-environment"}
    assert config_values(ServeConfig, {"api_key": "from-flag"}) == {"api_key": "from-flag"}
    assert config_values(EngineConfig, {}) == {}
    assert "from-environment" not in CliRunner().invoke(app, ["serve", "--help"]).stdout


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Runs `hotset` in this process and returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["hotset", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["router", "--port", "0"]])
def test_api_keys_are_read_from_files(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configs: list[Any] = []
    monkeypatch.setattr("hotset.fleet.router.server.run", lambda config, listener: configs.append(config) or 0)
    monkeypatch.setattr(
        "hotset.serve.server.run", lambda engine, config, process, listener: configs.append(config) or 0
    )
    monkeypatch.setattr("hotset.engine.process.EngineProcess", lambda config: None)
    monkeypatch.setenv("HOTSET_API_KEY", "from-environment")
    (tmp_path / "key").write_text("from-file\n")
    assert run_main(monkeypatch, *command, "--api-key-file", str(tmp_path / "key")) == 0
    assert run_main(monkeypatch, *command) == 0
    assert capsys.readouterr().err == ""
    assert run_main(monkeypatch, *command, "--api-key", "from-flag") == 0
    assert capsys.readouterr().err.startswith("warning: other users of this machine can see --api-key")
    assert [config.api_key for config in configs] == ["from-file", "from-environment", "from-flag"]


def test_version_is_printed() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"hotset {__version__}\n"


@pytest.mark.parametrize("arguments", [("--version",), ("router", "--port", "0")])
def test_output_that_cannot_be_written_is_one_line_and_exit_status_1(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "hotset", *arguments]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr == "error: cannot write the output: No space left on device\n"


def test_the_progress_line_is_erased_before_an_error_of_the_engine(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"damaged, which only the engine notices")
    command = [sys.executable, "-m", "hotset", "serve", tiny_directory(tmp_path), "--port", "0"]
    code, output = run_on_terminal(command, ROOT, os.environ | {"TERM": "xterm"})
    assert "Starting the engine" in output
    error, last = screen(output)
    assert (code, last) == (1, "") and error.startswith(f"error: {tmp_path / 'model.safetensors'} is damaged")


def test_server_without_its_packages_prints_the_command_that_installs_them() -> None:
    done = subprocess.run([sys.executable, "-c", SERVE_WITHOUT_FASTAPI], cwd=ROOT, capture_output=True, text=True)
    message = 'error: the server needs fastapi; run: pip install "hotset[serve]"\n'
    assert (done.returncode, done.stderr) == (1, message)


def test_info_reports_the_machine_and_every_package() -> None:
    report = json.loads(CliRunner().invoke(app, ["info", "--json"]).stdout)
    assert report["hotset"] == __version__
    assert report["torch"].startswith("2.")
    assert report["ram_bytes"] > report["free_ram_bytes"] > 0
    assert {"serve", "gguf", "embedded model", "nixl"} <= {package["name"] for package in report["packages"]}


def test_info_and_the_engine_agree_on_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sizing, machine):
        monkeypatch.setattr(module, "host_memory", lambda: HostMemory(99_999, 12_345, 55_555))
    report = inspect_machine()
    assert report.free_ram_bytes == sizing.free_bytes(torch.device("cpu")) == 12_345
    assert (report.ram_bytes, report.ram_limit_bytes) == (99_999, 55_555)


def test_info_shows_the_topology_and_the_brackets_of_an_install_command(capsys: pytest.CaptureFixture[str]) -> None:
    missing = PackageReport("serve", "HTTP server", None, 'pip install "hotset[serve]"')
    nodes = tuple(NumaNode(number, 64 << 30, 32 << 30, f"{number}-7", number == 0) for number in (0, 1))
    gpus = tuple(Gpu("H200", 141 << 30, 140 << 30, numa_node=node) for node in (0, 1, 1))
    huge = HugePages("madvise", "never", 2 << 20, 512)
    print_machine(MachineReport("0", "3", "Linux", None, 2, 1 << 30, None, 1 << 20, nodes, huge, gpus, (missing,)))
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert 'missing: pip install "hotset[serve]"' in shown
    assert "NUMA node 0 64.0 GiB, 32.0 GiB free, CPUs 0-7, GPUs 0 NUMA node 1" in shown
    assert "CPUs 1-7, GPUs 1,2, not allowed for this process" in shown
    assert "transparent: madvise; in shared memory: never (to allow: echo advise > /sys/" in shown
    assert "reserved and free: 1.0 GiB" in shown


def test_generate_streams_the_continuation_of_standard_input() -> None:
    arguments = ["generate", "-", "--temperature", "0", "--max-tokens", "4"]
    done = CliRunner().invoke(app, arguments, input="The capital of France is\n")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(" Paris") and done.stdout.endswith("\n")


def test_generate_prints_json_with_usage() -> None:
    arguments = ["generate", "The capital of France is", "--model", DEMO, "--max-tokens", "4", "--json"]
    report = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert report["text"] and report["finish_reason"] == "length"
    assert report["usage"]["prompt_tokens"] > 4 == report["usage"]["completion_tokens"]


def test_ctrl_c_stops_the_answer_and_the_chat_continues() -> None:
    options = ["--model", DEMO, "--device", "cpu", "--temperature", "0", "--max-tokens", "250"]
    command = [sys.executable, "-m", "hotset", "chat", *options]  # this model never ends an answer itself
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(b"Tell me a very long story about the sea.\n")
        process.stdin.flush()
        os.read(process.stdout.fileno(), 1)  # returns when the answer has begun
        process.send_signal(signal.SIGINT)
        try:
            output, notes = process.communicate(b"/reset\nWhat is the capital of France?\n/exit\nnever read\n", 120)
        finally:
            process.kill()
    assert process.returncode == 0
    # On a busy machine, lines of progress come first. The last line is about the limit of the second answer.
    assert notes.decode().splitlines()[-3:-1] == ["(stopped)", "(conversation cleared)"]
    assert "No Gods, in his ownership" in output.decode()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with closing(LLM(DEMO, max_model_len=80, device="cpu", progress=False)) as llm:
        yield llm


@pytest.fixture
def conversation(llm: LLM) -> Conversation:
    return Conversation(llm, SamplingParams(temperature=0.0, max_tokens=4), system="Be brief.")


def test_chat_sends_the_system_message_and_earlier_turns(conversation: Conversation) -> None:
    conversation.run(["What is the capital of France?", "", "/system Be kind.", "And of Spain?"])
    messages = [{"role": "system", "content": "Be kind."}, *conversation.turns[:3]]
    assert [turn["role"] for turn in conversation.turns] == ["user", "assistant", "user", "assistant"]
    assert conversation.turns[3]["content"] == conversation.llm.chat(messages, conversation.params)[0].outputs[0].text


def test_reset_clears_the_chat_and_exit_ends_it(conversation: Conversation) -> None:
    conversation.run(["What is the capital of France?", "/system", "/reset", "/exit", "What is the capital of Spain?"])
    assert (conversation.system, conversation.turns) == (None, [])


def test_a_full_context_drops_the_oldest_turns(conversation: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    long_questions = ["word " * 40 + str(number) for number in range(3)]
    conversation.run(long_questions)
    assert "the oldest questions and answers were dropped" in capsys.readouterr().err
    assert [turn["content"] for turn in conversation.turns[::2]] == [long_questions[-1]]


def test_chat_rejects_a_question_longer_than_the_context_and_keeps_all_turns(conversation: Conversation) -> None:
    conversation.run(["What is the capital of France?"])
    before = list(conversation.turns)
    with pytest.raises(ContextLengthExceeded):
        conversation.run(["word " * 200])
    assert conversation.turns == before


class ScriptedLlm:
    """An LLM that thinks, and gives the same answer to every question."""

    def __init__(self) -> None:
        self.asked: list[list[Any]] = []

    def stream_chat(self, messages: Sequence[Any], params: SamplingParams) -> Generator[Delta, None, None]:
        self.asked.append(list(messages))
        pieces = ["I a", "dd.</th", "ink>2", "!"]
        yield from (Delta(0, piece, (1,)) for piece in pieces)
        yield Delta(0, "", (2,), finish_reason="stop")

    def answer_parser(self, messages: Sequence[Any]) -> ThinkParser:
        return ThinkParser(in_reasoning=True)


@pytest.mark.parametrize("terminal", [False, True])
def test_reasoning_goes_to_stderr_and_the_next_prompt(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm: Any = ScriptedLlm()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    Conversation(llm, SamplingParams()).run(["1 + 1?", "Sure?"])
    printed = capsys.readouterr()
    assert printed.out == "2!\n2!\n"
    shown = printed.err.replace(NOT_DIM + DIM, "")
    assert shown == 2 * (f"{DIM}I add.{NOT_DIM}\n" if terminal else "I add.\n")
    answer = {"role": "assistant", "content": "2!", "reasoning_content": "I add."}
    assert llm.asked[1] == [{"role": "user", "content": "1 + 1?"}, answer, {"role": "user", "content": "Sure?"}]
