"""Commands that end with the process that started them."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import is_running, pause, wait_until_ended
from waiting import in_event_loop, until

from hotset.base.processes import ProcessIdentity
from hotset.fleet import child_process
from hotset.fleet.child_process import ChildProcess

PARENT = """
import asyncio, sys
from hotset.fleet.child_process import ChildProcess

async def main():
    arguments = ["router", "--host", "127.0.0.1", "--port", "0", "--workers-file", sys.argv[1]]
    child = await ChildProcess.start("router", arguments, {}, lambda line: None)
    await child.ready()
    print(child.pid, flush=True)
    await child.ended()

asyncio.run(main())
"""


def test_a_stopped_command_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    workers = tmp_path / "workers.json"
    workers.write_text('{"prefill": [], "decode": []}')
    with subprocess.Popen([sys.executable, "-c", PARENT, str(workers)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        pause(child)
        assert is_running(child)
        parent.kill()
        wait_until_ended([child])


# Starts a process that ignores SIGTERM, as an engine does, prints its id, and ends with its input.
LEAVES_AN_ENGINE = """
import subprocess, sys
engine = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
process = subprocess.Popen([sys.executable, "-c", engine], stdin=-3, stdout=-1, stderr=-3)
process.stdout.readline()
print(process.pid, flush=True)
sys.stdin.read()
"""


async def start_command(lines: list[str]) -> tuple[ChildProcess, int]:
    """Starts a command as `ChildProcess.start` does. Returns it with the id of the process that it leaves."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LEAVES_AN_ENGINE), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )
    child = ChildProcess("serve", process, lines.append)
    return child, int(await child.ready())


@in_event_loop
async def test_a_killed_command_is_gone_when_what_it_has_started_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[list[ProcessIdentity]] = []

    def look(session: int) -> list[ProcessIdentity]:
        looks.append(session_members(session))
        return looks[-1]

    session_members = child_process.session_members
    monkeypatch.setattr(child_process, "session_members", look)
    child, left = await start_command([])
    child.kill()
    assert await child.ended() == "serve ended (SIGKILL)"
    gone = asyncio.create_task(child.gone())
    await until(lambda: len(looks) > 2)
    assert is_running(left) and not gone.done()
    os.kill(left, signal.SIGKILL)
    await gone
    assert not is_running(left)


@in_event_loop
async def test_what_a_command_has_left_is_killed_after_its_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = iter([0.0])
    monkeypatch.setattr(child_process, "ending_seconds", lambda: next(limits))
    monkeypatch.setattr(child_process, "KILL_SECONDS", 60.0)
    lines: list[str] = []
    child, left = await start_command(lines)
    await child.stop(0.0, asyncio.Event())
    assert not is_running(left)
    assert any(f"processes [{left}] have not ended, may hold memory, and are killed" in line for line in lines)
