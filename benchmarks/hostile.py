"""Sends hostile structures to a server, and measures how they affect other clients.

    OMP_NUM_THREADS=1 python benchmarks/hostile.py --json hostile.json
    OMP_NUM_THREADS=1 python benchmarks/hostile.py -- --disaggregate 1P1D
    OMP_NUM_THREADS=1 python benchmarks/hostile.py -- --disaggregate 1P2D

The script starts `hotset serve MODEL` with the flags after `--`. It reads two streams without structures and asks for
/health again and again, in four phases:

  alone      no other requests
  harmless   the hostile requests are sent without their structures, --at-once at a time
  first      ordinary structures are sent, for which a server makes its tables once
  hostile    the hostile structures are sent

The hostile structures are schemas, grammars, regular expressions, choices and tools that must be called. They are made
from --seed, and are nested, repeated, aliased, enormous, ambiguous or recursive. At the end, SIGTERM ends the server in
the middle of hostile requests. The server's host store has room for only KV_TOKENS tokens, so that the earlier phases
fill it. Otherwise, memory that the store writes for the first time would look like memory that structures keep.

Columns (times in ms):
  health, longest    the longest time until /health has answered
  gap, longest       the longest time between two tokens of a stream
  gap, median        the median of these times
  gap, 99.9 %        the time that one gap of a thousand exceeds
  memory             of all processes of the server, shared pages divided among them (PSS), in MiB

Bars (against "harmless"): /health takes at most 200 ms longer; the longest gap at most doubles; no answer is a 5xx;
every stream has the tokens that it has alone (not checked on a GPU, where batches round differently); no process of an
engine or router is replaced; the memory returns (at most 64 MiB more than before, --settle seconds after the last
answer); SIGTERM ends the server within its drain time.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import torch
from report import Bar, make_parser, report

ROOT = Path(__file__).resolve().parents[1]
DRAIN_SECONDS = 20
MAX_TOOL_PARTS = 30  # tools are also part of the prompt, and this script does not measure the cost of long prompts
STREAM_TOKENS = 100
KV_TOKENS = 12_288  # the prompts of "harmless" have some 75,000
SENDERS = ProcessPoolExecutor(1, get_context("spawn"))  # starts its process with the first work
Json = dict[str, Any]
Rng = random.Random


def schema_request(schema: Any) -> Json:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def outputs_request(**outputs: Any) -> Json:
    return {"structured_outputs": outputs}


def tools_request(parameters: Json, count: int = 1) -> Json:
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": parameters}} for n in range(count)]
    return {"tools": tools, "tool_choice": "required"}


def nested(rng: Rng) -> Json:
    schema: Json = {"type": "string"}
    for _ in range(rng.randrange(20, 400)):
        kind = rng.randrange(3)
        if kind == 0:
            schema = {"type": "array", "items": schema}
        elif kind == 1:
            schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        else:
            schema = {rng.choice(["anyOf", "allOf"]): [schema, {"type": "null"}]}
    return schema_request(schema)


def repeated(rng: Rng) -> Json:
    inner = rng.choice([{}, {"type": "string"}, {"enum": [1, 2]}, {"$ref": "#/allOf/0"}])
    return schema_request({rng.choice(["allOf", "anyOf", "oneOf"]): [inner] * rng.randrange(2000, 20_000)})


def aliased(rng: Rng) -> Json:
    spell = rng.choice([lambda n: "0" * n, lambda n: "%30" * n, lambda n: "²" * n, lambda n: "~0" * n])
    return schema_request({"allOf": [{}, *({"$ref": f"#/allOf/{spell(n)}0"} for n in range(rng.randrange(20, 200)))]})


def enormous_numbers(rng: Rng) -> Json:
    bound = rng.choice([10 ** rng.randrange(20, 400), -(10 ** rng.randrange(20, 400)), 1.5e308, 10**18 + 7])
    name = rng.choice(["multipleOf", "minimum", "maximum", "minLength", "maxItems", "minItems", "maxLength"])
    return schema_request({"type": rng.choice(["integer", "number", "string", "array"]), name: bound})


def enormous_objects(rng: Rng) -> Json:
    names = [f"p{n}" for n in range(rng.randrange(500, 6000))]
    schema: Json = {"type": "object", "required": names}
    if rng.random() < 0.5:
        schema["properties"] = {name: rng.choice([{}, {"type": "integer", "multipleOf": 7}]) for name in names}
    return schema_request(schema)


def chained(rng: Rng) -> Json:
    size = rng.randrange(50, 2000)
    defs = {
        f"d{n}": {rng.choice(["allOf", "anyOf"]): [{"$ref": f"#/$defs/d{(n * 7 + k) % size}"} for k in (1, 2)]}
        for n in range(size)
    }
    return schema_request({"$defs": defs, "$ref": "#/$defs/d0"})


def patterns(rng: Rng) -> Json:
    made = [
        "[" * rng.randrange(1000, 16_000),
        "(" * rng.randrange(1000, 16_000),
        "(a|" * 2000 + "b" + ")" * 2000,
        rf"(.*a.{{{rng.randrange(5, 20)}}}b.*)|(.*c.{{13}}d)",
        rf"((a|b|ab){{1,{rng.randrange(10, 1000)}}}){{1,{rng.randrange(10, 1000)}}}",
        r"(?=a)b",
        "\\" * rng.randrange(1000, 16_001),
    ]
    pattern = rng.choice(made)
    return rng.choice([outputs_request(regex=pattern), schema_request({"type": "string", "pattern": pattern})])


def ambiguous(rng: Rng) -> Json:
    letters = rng.sample("abcdefgh ", 3)
    rules = [f'"{letter}" s "{letter}"' for letter in letters] + ["s s", "s s s"][: rng.randrange(1, 3)]
    return outputs_request(grammar="start: s\ns: " + " | ".join([*rules, *(f'"{letter}"' for letter in letters), ""]))


def many_rules(rng: Rng) -> Json:
    size, step = rng.randrange(100, 900), rng.randrange(2, 50)
    rules = (f"r{n}: /[a-z ]*{n}?[a-z]*/ r{(n * step + 1) % size} | /[0-9a-z]+/ |" for n in range(size))
    return outputs_request(grammar="start: " + " | ".join(f"r{n}" for n in range(size)) + "\n" + "\n".join(rules))


def lexemes(rng: Rng) -> Json:
    terminals = [f"/.*{letter}.{{{rng.randrange(3, 30)}}}{letter}.*/" for letter in "abcdefghij"]
    return outputs_request(grammar=f"start: (A|B)*\nA: {rng.choice([' | ', ' & ']).join(terminals)}\nB: ~/.*x.*/")


def blank_grammar(rng: Rng) -> Json:
    blanks = rng.choice(["\n", " \n", "\t\n", "a\n"]) * rng.randrange(4000, 16_000)
    return outputs_request(grammar=blanks + rng.choice(['start: "a"', 'root ::= "a"', "%json {}"]))


def recursive(rng: Rng) -> Json:
    if rng.random() < 0.5:
        return outputs_request(grammar=rng.choice(['start: "a" start', "start: start start | ", "start: start"]))
    return schema_request({"type": "array", "items": {"$ref": "#"}, "minItems": rng.randrange(0, 3)})


def choices(rng: Rng) -> Json:
    return outputs_request(choice=[f"{rng.getrandbits(900):x}" for _ in range(rng.randrange(500, 1100))])


def tool_patterns(rng: Rng) -> Json:
    pattern = rng.choice(["[", "(", "\\", "[^]", "a|"]) * rng.randrange(100, MAX_TOOL_PARTS * 30)
    return tools_request({"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}})


def tool_chains(rng: Rng) -> Json:
    size = rng.randrange(10, MAX_TOOL_PARTS)
    defs = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(size)} | {f"d{size}": {"type": "integer"}}
    return tools_request(
        {"type": "object", "properties": {f"p{n}": {"$ref": "#/$defs/d0"} for n in range(size)}, "$defs": defs}
    )


def tool_definitions(rng: Rng) -> Json:
    size = rng.randrange(4, MAX_TOOL_PARTS // 3)
    defs = {f"d{n}": {"type": "object", "properties": {"x": {"type": "string"}}} for n in range(size)}
    properties = {f"p{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n}"}} for n in range(size)}
    return tools_request({"type": "object", "properties": properties, "$defs": defs}, rng.randrange(1, 4))


MAKERS: Sequence[Callable[[Rng], Json]] = (
    nested,
    repeated,
    aliased,
    enormous_numbers,
    enormous_objects,
    chained,
    patterns,
    ambiguous,
    many_rules,
    lexemes,
    blank_grammar,
    recursive,
    choices,
    tool_patterns,
    tool_chains,
    tool_definitions,
)


def hostile_requests(seed: int, count: int) -> Iterator[Json]:
    """Yields bodies for /v1/chat/completions, without the model. All kinds come in turn."""
    rng = Rng(seed)
    for number in range(count):
        body = MAKERS[number % len(MAKERS)](rng)
        # The structure must not end the answer at once, so that it is followed for a while.
        common = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 24, "temperature": 1.0}
        yield common | {"seed": number} | body


def harmless(body: Json) -> Json:
    """Returns a request with the same prompt and without the structure."""
    kept = {name: value for name, value in body.items() if name not in ("response_format", "structured_outputs")}
    return kept | ({"tool_choice": "auto"} if "tools" in body else {})


@dataclass
class Answers:
    """How the requests of one phase were answered."""

    statuses: Counter[int] = field(default_factory=Counter)
    slowest: float = 0.0  # seconds


@dataclass
class Observed:
    """The measurements of other clients in one phase."""

    health: list[float] = field(default_factory=list)  # seconds
    gaps: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # of complete streams
    answers: Answers = field(default_factory=Answers)


class Server:
    """A `hotset serve` process. Its log goes to the file `log`, if one is given."""

    def __init__(self, model: str, flags: Sequence[str], log: Path | None = None) -> None:
        command = [sys.executable, "-m", "hotset", "serve", model, "--port", "0", "--max-queue", "1000", *flags]
        command += ["--drain-seconds", str(DRAIN_SECONDS)] if "--drain-seconds" not in flags else []
        stderr = subprocess.DEVNULL if log is None else log.open("w")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        found = re.search(r"http://\S+", ready)
        assert found is not None, f"the server did not start: {ready!r}"
        self.url = found[0].rstrip("/")

    def memory(self) -> float:
        """Returns the memory of all processes in MiB."""
        return sum(map(_pss, self.pids()))

    def pids(self) -> list[int]:
        pending, found = [self.process.pid], []
        while pending:
            found.append(pending.pop())
            for task in Path(f"/proc/{found[-1]}/task").glob("*/children"):
                pending += map(int, task.read_text().split())
        return found

    def engines(self) -> list[int]:
        """Returns the processes that run Python with torch: engines and the processes that own them."""
        return sorted(pid for pid in self.pids() if "fork_server" not in _command_of(pid))


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return "fork_server"  # it has ended


def _pss(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


async def read_streams(client: httpx.AsyncClient, number: int, observed: Observed, ended: asyncio.Event) -> None:
    """Reads one stream after the other until `ended`."""
    body = {"prompt": f"{number} Once upon a time", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
    while not ended.is_set():
        text, last = "", None
        async with client.stream("POST", "/v1/completions", json=body | {"temperature": 1.0, "seed": number}) as lines:
            async for line in lines.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                if last is not None:
                    observed.gaps.append(now - last)
                last = now
                text += json.loads(line[6:])["choices"][0]["text"]
                if ended.is_set():
                    return
        observed.texts.append(text)


async def ask_for_health(client: httpx.AsyncClient, observed: Observed, ended: asyncio.Event) -> None:
    while not ended.is_set():
        began = time.monotonic()
        response = await client.get("/health")
        assert response.status_code == 200, response.text
        observed.health.append(time.monotonic() - began)
        await asyncio.sleep(0.05)


def attack(url: str, bodies: Sequence[str], at_once: int) -> Answers:
    """Sends all bodies, `at_once` at a time."""
    answers, waiting, headers = Answers(), iter(bodies), {"content-type": "application/json"}

    async def sender(client: httpx.AsyncClient) -> None:
        for body in waiting:
            began = time.monotonic()
            response = await client.post("/v1/chat/completions", content=body, headers=headers, timeout=300)
            answers.statuses[response.status_code] += 1
            answers.slowest = max(answers.slowest, time.monotonic() - began)
            if response.status_code >= 500:
                print(response.status_code, response.text[:300], body[:300], file=sys.stderr)

    async def send_all() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120, verify=False) as client:
            await asyncio.gather(*(sender(client) for _ in range(at_once)))

    asyncio.run(send_all())
    return answers


async def observe(url: str, bodies: Sequence[Json], at_once: int, seconds: float = 0.0) -> Observed:
    """Measures two streams and /health while `bodies` are sent, and for `seconds` after that.

    Another process sends the bodies, so that its work between two requests does not delay the clock of the streams."""
    observed, ended, loop = Observed(), asyncio.Event(), asyncio.get_running_loop()
    async with httpx.AsyncClient(base_url=url, timeout=120, verify=False) as client:
        others = [asyncio.create_task(read_streams(client, number, observed, ended)) for number in range(2)]
        others.append(asyncio.create_task(ask_for_health(client, observed, ended)))
        # As texts: a nested body is too deep for `pickle`.
        texts = [json.dumps(body) for body in bodies]
        observed.answers = await loop.run_in_executor(SENDERS, attack, url, texts, at_once)
        await asyncio.sleep(seconds)
        ended.set()
        await asyncio.gather(*others)
    return observed


def drained(server: Server) -> float:
    """Sends SIGTERM in the middle of hostile requests. Returns the seconds until the server has ended."""

    async def sent() -> None:
        bodies = [body | {"stream": True} for body in hostile_requests(99, 16)]
        async with httpx.AsyncClient(base_url=server.url, timeout=120, verify=False) as client:
            requests = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for body in bodies]
            await asyncio.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.gather(*requests, return_exceptions=True)

    began = time.monotonic()
    with contextlib.suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(sent(), DRAIN_SECONDS + 30))
    server.process.wait(DRAIN_SECONDS + 30)
    return time.monotonic() - began


def ordinary_requests(count: int) -> list[Json]:
    """Returns requests with ordinary structures of each kind."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    kinds = [
        schema_request(schema),
        outputs_request(regex="[a-z]{1,5}"),
        outputs_request(choice=["yes", "no"]),
        outputs_request(grammar='start: "a" | "b"'),
        tools_request(schema),
    ]
    prompt = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
    return [prompt | kinds[number % len(kinds)] for number in range(count)]


def row_of(name: str, observed: Observed, memory: float) -> Json:
    return {
        "phase": name,
        "health, longest": max(observed.health) * 1e3,
        "gap, median": statistics.median(observed.gaps) * 1e3,
        "gap, 99.9 %": sorted(observed.gaps)[int(0.999 * len(observed.gaps))] * 1e3,
        "gap, longest": max(observed.gaps) * 1e3,
        "memory": memory,
        "answers": ", ".join(f"{count} x {status}" for status, count in sorted(observed.answers.statuses.items())),
    }


def main() -> None:
    own, flags = sys.argv[1:], list[str]()
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = make_parser(__doc__)
    parser.add_argument("--model", default=str(ROOT / "models" / "demo-dsa"))
    parser.add_argument("--count", type=int, default=200, help="hostile requests")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--alone", type=float, default=15.0, help="seconds without hostile requests")
    parser.add_argument("--settle", type=float, default=40.0, help="seconds until the memory must have returned")
    args = parser.parse_args(own)
    kv = ["--max-model-len", "5120", "--device-kv-tokens", str(KV_TOKENS // 2), "--host-kv-tokens", str(KV_TOKENS)]
    server = Server(args.model, [*kv, *flags])
    try:
        bodies = list(hostile_requests(args.seed, args.count))
        SENDERS.submit(attack, server.url, [], args.at_once).result()  # its process starts before anything is timed
        alone = asyncio.run(observe(server.url, [], args.at_once, args.alone))
        beside = asyncio.run(observe(server.url, [harmless(body) for body in bodies], args.at_once))
        first = asyncio.run(observe(server.url, ordinary_requests(5 * args.at_once), args.at_once))
        before, engines = server.memory(), server.engines()
        under = asyncio.run(observe(server.url, bodies, args.at_once))
        during = server.memory()
        time.sleep(args.settle)
        after, engines_after = server.memory(), server.engines()
        rows = [row_of("alone", alone, 0), row_of("harmless", beside, 0), row_of("first", first, before)]
        rows.append(row_of("hostile", under, during))
        rows.append(dict.fromkeys(rows[0], "") | {"phase": "afterwards", "memory": after})
        known = {*alone.texts, *beside.texts, *first.texts}
        wrong = [text for text in under.texts if text not in known]
        seconds = drained(server)
    finally:
        if server.process.poll() is None:
            for pid in server.pids():
                os.kill(pid, signal.SIGKILL)
    bars = [
        Bar("longest /health, ms more than without", (max(under.health) - max(beside.health)) * 1e3, 200),
        Bar("longest gap, times that without", max(under.gaps) / max(beside.gaps), 2),
        Bar("answers with a 5xx", sum(count for status, count in under.answers.statuses.items() if status >= 500), 0),
        *([] if torch.cuda.is_available() else [Bar("streams with other tokens", len(wrong), 0)]),
        Bar("processes of engines replaced", len(set(engines) ^ set(engines_after)), 0),
        Bar("MiB more than before", after - before, 64),
        Bar("seconds until SIGTERM has ended the server", seconds, DRAIN_SECONDS + 5),
    ]
    print(
        f"slowest hostile answer: {under.answers.slowest:.1f} s; whole streams: {len(alone.texts)}, {len(under.texts)}"
    )
    report("Hostile structures", rows, None)
    report("Bars", [bar.row() for bar in bars], args.json)
    sys.exit(not all(bar.met for bar in bars))


if __name__ == "__main__":
    main()
