"""Measures one prompt and its answer through `hotset serve --disaggregate 1P1D`, against one engine.

    python benchmarks/disaggregated.py --json disaggregated.json

Each server serves the demo model on this machine, both engines of 1P1D on the same GPU if there is one. Prompts of
6,000 random tokens are answered with 48 tokens, one at a time. The time is that of the whole HTTP request. The note
under the table counts the answers that are the same.

Bar (required result): at most 1.25 times the time of one engine.
"""

import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from report import Bar, make_parser, report, write_json

BAR = 1.25
START_SECONDS = 100.0
SETTINGS = {
    "max-model-len": 8192,
    "device-kv-tokens": 65536,
    "host-kv-tokens": 131072,
    "max-num-seqs": 16,
    "speculate": 0,
}


@contextmanager
def server(model: str, *flags: str) -> Iterator[str]:
    """Yields the URL of a running server."""
    with tempfile.TemporaryFile("w+") as log:
        command = [
            sys.executable,
            "-m",
            "hotset",
            "serve",
            model,
            "--port",
            "0",
            "--drain-seconds",
            "1",
            *(word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))),
            *flags,
        ]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield wait_for_url(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for_url(process: "subprocess.Popen[bytes]", log: Any) -> str:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        log.seek(0)
        if found := re.search(r"Hotset serves \S+ at (http://\S+)", log.read()):
            return found[1]
        time.sleep(0.2)
    log.seek(0)
    sys.exit(f"error: the server did not start:\n{log.read()[-3000:]}")


def ask(url: str, model: str, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
    """Returns the seconds of the request, and the tokens of its answer."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    data = json.dumps(body | {"return_token_ids": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=120) as answer:
        choice = json.load(answer)["choices"][0]
    return time.perf_counter() - began, choice["token_ids"]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="models/demo-dsa")
    parser.add_argument("--prompt", type=int, default=6000, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    name = Path(options.model).name
    rng = random.Random(3)
    prompts = [rng.choices(range(3, 200), k=options.prompt) for _ in range(options.rounds + 2)]  # two to warm up
    rows, answers = [], []
    for title, flags in (("one engine", []), ("1P1D", ["--disaggregate", "1P1D"])):
        with server(options.model, *flags) as url:
            timed = [ask(url, name, prompt, options.tokens) for prompt in prompts]
            first = [ask(url, name, [*prompt[1:], 5], 1)[0] for prompt in prompts[:4]]
        seconds = [taken for taken, _ in timed[2:]]
        answers.append([tokens for _, tokens in timed])
        rows.append(
            {
                "server": title,
                "ms": statistics.median(seconds) * 1e3,
                "fastest ms": min(seconds) * 1e3,
                "one token ms": statistics.median(first) * 1e3,
            }
        )
    same = sum(one == other for one, other in zip(*answers, strict=True))
    bars = [Bar("times the time of one engine", rows[1]["ms"] / rows[0]["ms"], BAR, at_least=False).row()]
    note = f"medians of {options.rounds} requests; {same} of {len(prompts)} answers are the same"
    report(f"A prompt of {options.prompt} tokens and {options.tokens} tokens of answer", rows, None, note)
    report("Bars", bars, None)
    if options.json is not None:
        write_json(options.json, "Disaggregated", {"bars": bars, "servers": rows})


if __name__ == "__main__":
    main()
