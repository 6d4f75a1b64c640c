"""A chat template that never ends, or that grows without end, fails alone: the next rendering works, no child stays."""

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

from hotset.base.errors import CheckpointError, EngineStopped, RequestError
from hotset.models import template_process
from hotset.models.template_process import TemplateRenderer

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
WAIT_SECONDS = 60.0


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@contextmanager
def rendering(template: str = TRAPS, seconds: float = 30.0) -> Iterator[TemplateRenderer]:
    with closing(TemplateRenderer(template, {}, "the model", seconds)) as renderer:
        yield renderer


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_SECONDS
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds


def test_a_template_that_never_ends_is_killed_and_the_next_messages_are_rendered() -> None:
    before = children_of(os.getpid())
    with rendering(seconds=1.5) as renderer:
        (child,) = children_of(os.getpid()) - before
        with pytest.raises(RequestError, match=r"did not finish within 1\.5 s of CPU time") as failure:
            renderer.render(user("loop"))
        assert (failure.value.code, failure.value.param) == ("chat_template_failed", "messages")
        assert not is_running(child) and children_of(os.getpid()) <= before, "the child must be killed"
        assert renderer.render(user("hello")) == "hello!"


def test_a_rendering_may_wait_for_a_busy_machine_longer_than_its_limit_of_cpu_time() -> None:
    before = children_of(os.getpid())
    with rendering(seconds=0.2) as renderer, ThreadPoolExecutor(1) as threads:
        (child,) = children_of(os.getpid()) - before
        os.kill(child, signal.SIGSTOP)
        prompt = threads.submit(renderer.render, user("hello"))
        time.sleep(1.0)  # if it took no longer than the limit, the test would pass in any case
        os.kill(child, signal.SIGCONT)
        assert prompt.result(WAIT_SECONDS) == "hello!"


def test_a_child_that_does_not_run_at_all_is_killed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "WAIT_FACTOR", 1)
    before = children_of(os.getpid())
    with ThreadPoolExecutor(1) as threads, rendering(seconds=0.2) as renderer:
        (child,) = children_of(os.getpid()) - before
        os.kill(child, signal.SIGSTOP)
        with pytest.raises(RequestError, match=r"did not answer within 0\.2 s"):
            threads.submit(renderer.render, user("hello")).result(WAIT_SECONDS)
        assert not is_running(child)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("multiply", "more than 512.0 MiB"), ("double", "more than 512.0 MiB"), ("print", "more than 8388608 characters")],
)
def test_a_template_that_grows_without_end_fails_and_the_next_messages_are_rendered(kind: str, reason: str) -> None:
    with rendering() as renderer:
        with pytest.raises(RequestError, match=reason) as failure:
            renderer.render(user(kind))
        assert failure.value.code == "chat_template_failed"
        assert renderer.render(user("hello")) == "hello!"


def test_a_template_that_never_ends_does_not_delay_another_rendering() -> None:
    failures: list[str] = []

    def loop() -> None:
        try:
            renderer.render(user("loop"))
        except RequestError as error:
            failures.append(str(error))

    with rendering(seconds=600.0) as renderer:
        looping = threading.Thread(target=loop)
        looping.start()
        for _ in range(3):
            assert renderer.render(user("hello")) == "hello!"
        assert looping.is_alive()
        renderer.close()
        looping.join(WAIT_SECONDS)
        assert "ended its process (SIGKILL)" in failures[0], "closing must end a rendering in progress"


def test_after_a_child_has_died_a_new_one_renders() -> None:
    before = children_of(os.getpid())
    with rendering() as renderer:
        (child,) = children_of(os.getpid()) - before
        os.kill(child, signal.SIGKILL)
        assert wait_until(lambda: not is_running(child))
        assert renderer.render(user("hello")) == "hello!"


def test_closing_ends_the_children_and_refuses_later_messages() -> None:
    before = children_of(os.getpid())
    with rendering() as renderer:
        assert len(children_of(os.getpid()) - before) == 1
        renderer.close()
        assert children_of(os.getpid()) <= before
        with pytest.raises(EngineStopped):
            renderer.render(user("hello"))
    assert children_of(os.getpid()) <= before, "nothing may be started after the close"


ORPHANING = """
import sys
from hotset.models import template_process
from hotset.models.template_process import TemplateRenderer
renderer = TemplateRenderer(sys.argv[1], {}, "the model", float(sys.argv[3]))
print("ready", flush=True)
sys.stdin.readline()
renderer.render([{"role": "user", "content": sys.argv[2]}])
print("rendered", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(("kind", "seconds"), [("hello", 30.0), ("loop", 0.5)])
def test_no_child_outlives_a_parent_that_is_killed(kind: str, seconds: float) -> None:
    command = [sys.executable, "-c", ORPHANING, TRAPS, kind, str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        (child,) = children_of(parent.pid)
        parent.stdin.write("\n")
        parent.stdin.flush()
        if kind == "hello":
            assert parent.stdout.readline() == "rendered\n"
        else:
            assert wait_until(lambda: state_of(child) in ("R", "Z", None))
        parent.kill()
    try:
        assert wait_until(lambda: not is_running(child))
    finally:
        if is_running(child):
            os.kill(child, signal.SIGKILL)


def test_a_child_does_not_see_the_secrets_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_API_KEY", "open-sesame")
    before = children_of(os.getpid())
    with rendering():
        (child,) = children_of(os.getpid()) - before
        assert b"open-sesame" not in Path(f"/proc/{child}/environ").read_bytes()


def test_a_template_that_does_not_compile_is_refused_at_startup() -> None:
    before = children_of(os.getpid())
    for template in ("{% if %}", "{{ 1 | no_such_filter }}", "{{ " + "(" * 100_000 + " }}"):
        with pytest.raises(CheckpointError, match="the model: the chat template is broken: "):
            TemplateRenderer(template, {}, "the model")
    assert children_of(os.getpid()) <= before


def test_messages_that_are_not_json_are_refused() -> None:
    with rendering() as renderer:
        with pytest.raises(RequestError, match="JSON"):
            renderer.render([{"role": "user", "content": object()}])
        assert renderer.render(user("half a pair: \ud83d \x00\n")) == "half a pair: \ud83d \x00\n!"
