"""Commands that end with the process that started them."""

import subprocess
import sys
from pathlib import Path

from processes import is_running, pause, wait_until_ended

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
