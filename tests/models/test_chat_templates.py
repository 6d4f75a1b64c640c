"""A chat template that never ends, or that grows without end, fails alone: the next one works, and no process stays."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from processes import children_of, is_running, state_of
from waiting import WAIT_SECONDS, wait_until

from hotset.base import fork_server
from hotset.base.errors import CheckpointError, EngineStopped, RequestError
from hotset.models import chat_prompt
from hotset.models.chat_prompt import ChatFormat, ChatOptions

# Each kind of message triggers one defect; other messages are rendered.
TRAPS = """
{%- set kind = messages[0].content %}
{%- if kind == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}
{%- if kind == 'multiply' %}{{ 'A' * 2000000000 }}{% endif %}
{%- if kind == 'double' %}
    {%- set box = namespace(text='A' * 1000) %}
    {%- for i in range(40) %}{% set box.text = box.text ~ box.text %}{% endfor %}
{%- endif %}
{%- if kind == 'print' %}{% for i in range(99999) %}{% for j in range(99999) %}{{ 'A' * 100 }}{% endfor %}{% endfor %}
{%- endif %}
{{- kind }}!"""


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@contextmanager
def rendering(template: str = TRAPS, seconds: float = 30.0) -> Iterator[ChatFormat]:
    with closing(ChatFormat(template, {}, "the model", seconds=seconds)) as renderer:
        yield renderer


def worker_of(renderer: ChatFormat) -> int:
    """Returns the process id of the worker that renders next."""
    renderer.render(user("hello"), ChatOptions())
    (worker,) = children_of(server_of(renderer))
    return worker


def server_of(renderer: ChatFormat) -> int:
    pid = renderer.jobs.server.pid
    assert pid is not None
    return pid


def test_a_template_that_never_ends_is_killed_and_the_next_messages_are_rendered() -> None:
    with rendering(seconds=0.5) as renderer:
        worker = worker_of(renderer)
        with pytest.raises(RequestError, match=r"did not finish within 0\.5 s of CPU time") as failure:
            renderer.render(user("loop"), ChatOptions())
        assert (failure.value.code, failure.value.param) == ("chat_template_failed", "messages")
        assert not is_running(worker) and not children_of(server_of(renderer)), "the worker was not killed"
        assert renderer.render(user("hello"), ChatOptions()) == "hello!"


def test_a_rendering_may_wait_for_a_busy_machine_longer_than_its_limit_of_cpu_time() -> None:
    with rendering(seconds=0.2) as renderer, ThreadPoolExecutor(1) as threads:
        worker = worker_of(renderer)
        os.kill(worker, signal.SIGSTOP)
        prompt = threads.submit(renderer.render, user("hello"), ChatOptions())
        time.sleep(0.5)  # longer than the limit of CPU time
        os.kill(worker, signal.SIGCONT)
        assert prompt.result(WAIT_SECONDS) == "hello!"


def test_a_worker_that_does_not_run_at_all_is_killed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as threads, rendering(seconds=0.2) as renderer:
        worker = worker_of(renderer)
        monkeypatch.setattr(chat_prompt, "WAIT_FACTOR", 1)
        os.kill(worker, signal.SIGSTOP)
        with pytest.raises(RequestError, match=r"did not answer within 0\.2 s"):
            threads.submit(renderer.render, user("hello"), ChatOptions()).result(WAIT_SECONDS)
        assert not is_running(worker)


def test_a_stopped_server_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with rendering() as renderer:
        server = server_of(renderer)
        os.kill(server, signal.SIGSTOP)
        monkeypatch.setattr(fork_server, "START_SECONDS", 0.2)
        with pytest.raises(RequestError, match=r"did not answer within 0\.2 s"):
            renderer.render(user("hello"), ChatOptions())
        assert not is_running(server)
        monkeypatch.undo()
        assert renderer.render(user("hello"), ChatOptions()) == "hello!"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("multiply", "more than 512.0 MiB"), ("double", "more than 512.0 MiB"), ("print", "more than 8388608 characters")],
)
def test_a_template_that_grows_without_end_fails_and_the_next_messages_are_rendered(kind: str, reason: str) -> None:
    with rendering() as renderer:
        with pytest.raises(RequestError, match=reason) as failure:
            renderer.render(user(kind), ChatOptions())
        assert failure.value.code == "chat_template_failed"
        assert renderer.render(user("hello"), ChatOptions()) == "hello!"


def test_a_template_that_never_ends_does_not_delay_another_rendering() -> None:
    failures: list[str] = []

    def loop() -> None:
        try:
            renderer.render(user("loop"), ChatOptions())
        except EngineStopped as error:
            failures.append(str(error))

    with rendering(seconds=600.0) as renderer:
        looping = threading.Thread(target=loop)
        looping.start()
        for _ in range(3):
            assert renderer.render(user("hello"), ChatOptions()) == "hello!"
        assert looping.is_alive()
        renderer.close()
        looping.join(WAIT_SECONDS)
        assert "was closed" in failures[0], "closing did not end the rendering in progress"


@pytest.mark.parametrize("process", [worker_of, server_of])
def test_after_a_process_has_died_a_new_one_renders(process: Callable[[ChatFormat], int]) -> None:
    with rendering() as renderer:
        worker, victim = worker_of(renderer), process(renderer)
        os.kill(victim, signal.SIGKILL)
        assert wait_until(lambda: not is_running(victim) and not is_running(worker))
        assert renderer.render(user("hello"), ChatOptions()) == "hello!"


def test_closing_ends_all_processes_and_refuses_later_messages() -> None:
    before = children_of(os.getpid())
    with rendering() as renderer:
        worker = worker_of(renderer)
        assert children_of(os.getpid()) - before == {server_of(renderer)}
        renderer.close()
        assert children_of(os.getpid()) <= before and wait_until(lambda: not is_running(worker))
        with pytest.raises(EngineStopped):
            renderer.render(user("hello"), ChatOptions())
    assert children_of(os.getpid()) <= before, "nothing may be started after the close"


ORPHANING = """
import sys
from hotset.models.chat_prompt import ChatFormat, ChatOptions
renderer = ChatFormat(sys.argv[1], {}, "the model", seconds=float(sys.argv[3]))
print("ready", flush=True)
sys.stdin.readline()
renderer.render([{"role": "user", "content": sys.argv[2]}], ChatOptions())
print("rendered", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(("kind", "seconds"), [("hello", 30.0), ("loop", 600.0)])
def test_no_process_outlives_a_parent_that_is_killed(kind: str, seconds: float) -> None:
    command = [sys.executable, "-c", ORPHANING, TRAPS, kind, str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        (server,) = children_of(parent.pid)
        parent.stdin.write("\n")
        parent.stdin.flush()
        if kind == "hello":
            assert parent.stdout.readline() == "rendered\n"
        else:
            assert wait_until(lambda: any(state_of(worker) == "R" for worker in children_of(server)))
        processes = {server, *children_of(server)}
        parent.kill()
    try:
        assert len(processes) == 2 and wait_until(lambda: not any(map(is_running, processes)))
    finally:
        for process in filter(is_running, processes):
            os.kill(process, signal.SIGKILL)


def test_no_process_of_a_template_sees_the_secrets_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_API_KEY", "open-sesame")
    with rendering() as renderer:
        for process in (server_of(renderer), worker_of(renderer)):
            assert b"open-sesame" not in Path(f"/proc/{process}/environ").read_bytes()


def test_a_template_that_does_not_compile_is_refused_at_startup() -> None:
    before = children_of(os.getpid())
    for template in ("{% if %}", "{{ 1 | no_such_filter }}", "{{ " + "(" * 100_000 + " }}"):
        with pytest.raises(CheckpointError, match="the model: the chat template is broken: "):
            ChatFormat(template, {}, "the model")
    assert children_of(os.getpid()) <= before


def test_messages_that_are_not_json_are_refused() -> None:
    with rendering() as renderer:
        with pytest.raises(RequestError, match="JSON"):
            renderer.render([{"role": "user", "content": object()}], ChatOptions())
        assert renderer.render(user("half a pair: \ud83d \x00\n"), ChatOptions()) == "half a pair: \ud83d \x00\n!"
