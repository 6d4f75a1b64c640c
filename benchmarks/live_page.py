"""Measures what open live pages cost the server: CPU time of its HTTP process and its engine, with and without pages.

The load is one request with several long answers. It is not streamed, so the HTTP process has little else to do. Run it
as `.venv/bin/python benchmarks/live_page.py`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

MODEL = Path(__file__).resolve().parent.parent / "models" / "demo-dsa"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def engine_of(server: int) -> int:
    """Returns the child process of the server that uses the most memory."""
    children = [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]
    return max(children, key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]))


class OpenPages:
    """Reads streams of /live in threads, and counts their bytes."""

    def __init__(self, url: str, count: int) -> None:
        self.num_bytes = 0
        self._streams = [DIRECT.open(f"{url}/live") for _ in range(count)]
        for stream in self._streams:
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream) -> None:
        try:
            for line in stream:
                self.num_bytes += len(line)
        except (OSError, ValueError, AttributeError):
            pass  # closed


def post(url: str, requests: int, tokens: int) -> None:
    body = {"model": "demo-dsa", "prompt": [9] * 64, "max_tokens": tokens, "n": requests, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    DIRECT.open(request).read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each measurement")
    arguments = parser.parse_args()
    sizes = ["--device-kv-tokens", "6000", "--host-kv-tokens", "60000"]
    command = [sys.executable, "-m", "hotset", "serve", str(MODEL), "--device", "cpu", "--port", "0", *sizes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            url = re.search(r"http://\S+:\d+", server.stdout.readline())[0]
            load = threading.Thread(target=post, args=(url, arguments.requests, 4000), daemon=True)
            load.start()
            time.sleep(3.0)
            processes = {"HTTP process": server.pid, "engine": engine_of(server.pid)}
            for pages in (0, arguments.pages):
                opened = OpenPages(url, pages)
                time.sleep(2.0)  # the first message has the whole history
                before, num_bytes = {name: cpu_seconds(pid) for name, pid in processes.items()}, opened.num_bytes
                time.sleep(arguments.seconds)
                shares = {
                    name: 100 * (cpu_seconds(pid) - before[name]) / arguments.seconds for name, pid in processes.items()
                }
                rate = (opened.num_bytes - num_bytes) / arguments.seconds / max(1, pages) / 1000
                text = ", ".join(f"{name} {share:.2f} % of a core" for name, share in shares.items())
                print(f"{pages} pages, {arguments.requests} requests: {text}; {rate:.1f} kB/s per page", flush=True)
            assert load.is_alive(), "the requests ended during the measurement; give them more tokens"
        finally:
            server.kill()


if __name__ == "__main__":
    main()
