"""Drives a headless Chromium over its debugging pipe: opens a page, evaluates scripts in it, and takes pictures.

Chromium is a system package (`apt-get install chromium-headless-shell`). Tests that need it are skipped without it.
"""

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
CHROMIUM = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync")
WAIT_SECONDS = 60.0


class Page:
    """One page. Records what the browser requested, and errors of scripts and policies."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._numbers = itertools.count(1)
        self._received = b""
        self._session: str | None = None
        self.requested: list[str] = []  # URLs
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command of the DevTools protocol and waits for its result."""
        number = next(self._numbers)
        session = {} if self._session is None else {"sessionId": self._session}
        message = {"id": number, "method": method, "params": parameters, **session}
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            self._record(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, script: str) -> Any:
        """Returns the value of an expression, after it has settled if it is a promise."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, script: str, seconds: float = WAIT_SECONDS) -> Any:
        """Waits until an expression is true, and returns its value. Elements need `!!` before them."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            assert time.monotonic() < deadline, f"{script} is not true after {seconds:g} s"
            time.sleep(0.1)
        return value

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            received = os.read(self._reading, 1 << 20)
            assert received, "the browser has ended"
            self._received += received
        line, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _record(self, event: dict[str, Any]) -> None:
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requested.append(event["params"]["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(str(event["params"]["exceptionDetails"]))
            case "Log.entryAdded" if event["params"]["entry"]["level"] == "error":
                self.errors.append(str(event["params"]["entry"]))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Runs Chromium with a profile in an empty folder, and yields a page of it."""
    assert CHROMIUM is not None
    child_reads, writing = os.pipe()
    reading, child_writes = os.pipe()
    # The browser reads commands from descriptor 3 and writes to descriptor 4.
    redirect = f'exec "$@" 3<&{child_reads} 4>&{child_writes}'
    command = [
        "bash",
        "-c",
        redirect,
        "browser",
        CHROMIUM,
        *FLAGS,
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
    ]
    process = subprocess.Popen(command, pass_fds=(child_reads, child_writes), stderr=subprocess.DEVNULL)
    os.close(child_reads)
    os.close(child_writes)
    try:
        yield Page(reading, writing)
    finally:
        os.close(writing)  # this ends the browser
        os.close(reading)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
