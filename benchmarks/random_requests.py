"""Makes random requests for every endpoint of a server. Most are valid, the others are wrong in many ways.

`case_of(seed, number)` returns one request. benchmarks/fuzz_requests.py sends the requests.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hostile import MAKERS, ROOT, Json, Rng, outputs_request, schema_request

LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")  # without them, answers would take long
WORDS = ("once", "upon", "a", "time", "there was", "little", "🙂", "é", "\n", "<|im_start|>", "</think>", "{", '"')
# JSON that `json.dumps` cannot write: it replaces these placeholders in the written body.
RAW = {'"@DEEP@"': "[" * 3000 + "]" * 3000, '"@HUGE@"': "9" * 5000, '"@OBJECTS@"': '{"a":' * 900 + "1" + "}" * 900}
NUMBERS = [0, -1, 3, 1.5, 2**31, 2**63, -(2**64), 10**400, 1e308, float("nan"), float("inf")]
TEXTS = ["", " ", "4", "\0", "\ud800", "ключ", "x" * 20_000, *map(json.loads, RAW)]
ODD = [None, True, False, *NUMBERS, *TEXTS, [], {}, [[]], [None], [{}] * 300, {"": {}}, {"type": "text"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}, "tags": {"type": "array"}},
    "required": ["name"],
}
STRUCTURES: Sequence[Callable[[], Json]] = (
    lambda: {"response_format": {"type": "json_object"}},
    lambda: {"response_format": {"type": "text"}},
    lambda: schema_request(SCHEMA),
    lambda: schema_request({"anyOf": [{"type": "integer"}, {"enum": ["a", "b"]}]}),
    lambda: outputs_request(json=SCHEMA),
    lambda: outputs_request(regex=r"[a-c]{2,6}\d*"),
    lambda: outputs_request(choice=["yes", "no", "per haps"]),
    lambda: outputs_request(grammar='start: "a" b\nb: "b" | "c" b'),
    lambda: outputs_request(grammar='root ::= "a" | "b" root'),
)
Fields = dict[str, Callable[[Rng], Any]]  # each makes the value of a field
SAMPLING: Fields = {
    "temperature": lambda rng: rng.choice([0, 0.5, 1, 2.0]),
    "top_p": lambda rng: rng.choice([0.1, 0.9, 1]),
    "top_k": lambda rng: rng.choice([-1, 0, 1, 40]),
    "min_p": lambda rng: rng.choice([0, 0.1, 1]),
    "seed": lambda rng: rng.getrandbits(31),
    "tiers": lambda rng: rng.choice(["auto", "resident", "tiered"]),
    "landing": lambda rng: "auto",
    "cache_salt": lambda rng: f"salt-{rng.randrange(20)}",
    "model": lambda rng: rng.choice(["demo-dsa", str(ROOT / "models" / "demo-dsa")]),
    "stream": lambda rng: True,
}  # fields of all endpoints that generate
OPENAI: Fields = {
    "repetition_penalty": lambda rng: rng.choice([0.5, 1, 1.3]),
    "presence_penalty": lambda rng: rng.uniform(-2, 2),
    "frequency_penalty": lambda rng: rng.uniform(-2, 2),
    "logit_bias": lambda rng: {str(rng.randrange(4096)): rng.uniform(-100, 100) for _ in range(rng.randrange(4))},
    "n": lambda rng: rng.choice([1, 2]),
    "min_tokens": lambda rng: 1,
    "stop": lambda rng: rng.choice(["a", ["e", "the"], "\n"]),
    "stop_token_ids": lambda rng: [rng.randrange(4096)],
    "ignore_eos": lambda rng: rng.random() < 0.5,
    "skip_special_tokens": lambda rng: rng.random() < 0.5,
    "include_stop_str_in_output": lambda rng: rng.random() < 0.5,
    "prompt_logprobs": lambda rng: rng.randrange(4),
    "truncate_prompt_tokens": lambda rng: rng.choice([-1, 4, 100]),
    "return_token_ids": lambda rng: rng.random() < 0.5,
    "stream_options": lambda rng: {"include_usage": True, "continuous_usage_stats": rng.random() < 0.5},
    "user": lambda rng: "someone",
}


CHAT: Fields = {
    "add_generation_prompt": lambda rng: True,
    "chat_template_kwargs": lambda rng: {"enable_thinking": rng.random() < 0.5},
    "reasoning_effort": lambda rng: rng.choice(["none", "high"]),
    "include_reasoning": lambda rng: rng.random() < 0.5,
}
TOOL_TURN: Sequence[Json] = (
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "sunny"},
)


def some(rng: Rng, fields: Fields) -> Json:
    """Returns some of `fields`."""
    return {name: make(rng) for name, make in fields.items() if rng.random() < (0.4 if name == "stream" else 0.15)}


def text(rng: Rng) -> str:
    return " ".join(rng.choices(WORDS, k=400 if rng.random() < 0.01 else rng.choice([1, 2, 4, 8, 16])))


def structure(rng: Rng) -> Json:
    """Returns a structure, and null for the fields that cannot be combined with one."""
    return rng.choice(STRUCTURES)() | {"ignore_eos": None, "min_tokens": None}


def conversation(rng: Rng) -> list[Json]:
    """Returns messages that both OpenAI's and Anthropic's endpoints accept."""
    turns: list[Json] = [{"role": role, "content": text(rng)} for role in ("user", "assistant") * rng.randrange(3)]
    parts = [{"type": "text", "text": text(rng)} for _ in range(rng.randrange(1, 4))]
    return [*turns, {"role": "user", "content": rng.choice([text(rng), parts])}]


def tool_names(rng: Rng) -> list[str]:
    return [f"tool_{number}" for number in range(rng.randrange(1, 4))]


def completion(rng: Rng) -> Json:
    ids = [rng.randrange(3, 4096) for _ in range(rng.randrange(1, 20))]
    body = {"prompt": rng.choice([text(rng), [text(rng), "a"], ids, [ids, [5]]]), "max_tokens": rng.randrange(1, 9)}
    own: Fields = {"echo": lambda rng: True, "logprobs": lambda rng: rng.randrange(5)}
    return body | some(rng, SAMPLING | OPENAI | own) | (structure(rng) if rng.random() < 0.2 else {})


def chat(rng: Rng) -> Json:
    turns: list[Json] = [*rng.choice([[], [], TOOL_TURN]), *conversation(rng)]
    body = {"messages": turns, rng.choice(LENGTHS[:2]): rng.randrange(1, 9)} | some(rng, SAMPLING | OPENAI | CHAT)
    kind = rng.randrange(5)
    if kind == 0:
        body |= structure(rng)
    elif kind == 1:
        names = tool_names(rng)
        chosen = {"type": "function", "function": {"name": rng.choice(names)}}
        body["tools"] = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in names]
        body |= {
            "tool_choice": rng.choice(["auto", "none", "required", chosen]),
            "parallel_tool_calls": rng.random() < 0.5,
        }
    elif kind == 2:
        body |= {"logprobs": True, "top_logprobs": rng.randrange(5)}
    return body


def hostile(rng: Rng) -> Json:
    return {"messages": conversation(rng), "max_tokens": 8, "temperature": 1.0} | rng.choice(MAKERS)(rng)


def response(rng: Rng) -> Json:
    items: list[Json] = [{"type": "message", **message} for message in conversation(rng)]
    call = {"type": "function_call", "call_id": "c", "name": "tool_0", "arguments": "{}"}
    calls = [call, {"type": "function_call_output", "call_id": "c", "output": text(rng)}]
    body = {"input": rng.choice([text(rng), items, items + calls]), "max_output_tokens": rng.randrange(1, 9)}
    own: Fields = {
        "instructions": text,
        "text": lambda rng: {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}},
        "reasoning": lambda rng: {"effort": rng.choice(["none", "high"])},
        "metadata": lambda rng: {"a": "b"},
    }
    if rng.random() < 0.2:
        names = tool_names(rng)
        kinds: list[Json] = [{"parameters": SCHEMA, "type": "function"}, {"type": "custom"}]
        own["tools"] = lambda rng: [{"name": name} | rng.choice(kinds) for name in names]
        own["tool_choice"] = lambda rng: rng.choice(["auto", "none", "required"])
        return body | some(rng, SAMPLING) | {name: own[name](rng) for name in ("tools", "tool_choice")}
    return body | some(rng, SAMPLING | own)


def message(rng: Rng) -> Json:
    body = {"messages": conversation(rng), "max_tokens": rng.randrange(1, 9)}
    own: Fields = {
        "system": text,
        "stop_sequences": lambda rng: ["the", "\n"],
        "thinking": lambda rng: {"type": "enabled", "budget_tokens": 1024},
        "output_config": lambda rng: {"format": {"type": "json_schema", "schema": SCHEMA}},
    }
    if rng.random() < 0.2:
        names = tool_names(rng)
        kinds: list[Json] = [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": names[0]}, {"type": "none"}]
        body["tools"] = [{"name": name, "input_schema": SCHEMA} for name in names]
        return body | {"tool_choice": rng.choice(kinds)} | some(rng, SAMPLING)
    return body | some(rng, SAMPLING | own)


def counted(rng: Rng) -> Json:
    return {name: value for name, value in message(rng).items() if name not in ("max_tokens", "stop_sequences")}


def tokenized(rng: Rng) -> Json:
    source: Json = rng.choice([{"prompt": text(rng)}, {"messages": conversation(rng)}])
    return source | {"model": SAMPLING["model"](rng)}


def detokenized(rng: Rng) -> Json:
    return {"tokens": [rng.randrange(4096) for _ in range(rng.randrange(40))]}


def plan(rng: Rng) -> Json:
    fields = {"gpus": 8, "context": 8192, "host_gib": 500.0, "goal": "throughput", "model": "served", "gpu": "h200"}
    return {name: value for name, value in fields.items() if rng.random() < 0.7}


PATHS = (
    *("/v1/models", "/tokenizer_info", "/health", "/ping", "/version", "/handoff", "/metrics", "/openapi.json"),
    *("/", "/plan", "/docs", "/docs/start.js", "/nowhere"),
)
# (method, path) -> how many of 100 requests it gets, and the function that makes a body
ENDPOINTS: dict[tuple[str, str], tuple[int, Callable[[Rng], Json] | None]] = {
    ("POST", "/v1/chat/completions"): (24, chat),
    ("POST", "/v1/completions"): (22, completion),
    ("POST", "/v1/responses"): (12, response),
    ("POST", "/v1/messages"): (12, message),
    ("POST", "/v1/messages/count_tokens"): (5, counted),
    ("POST", "/tokenize"): (5, tokenized),
    ("POST", "/detokenize"): (4, detokenized),
    ("POST", "/plan/calculate"): (2, plan),
    ("GET", "/v1/models/{model_id}"): (2, None),
    ("GET", "/live"): (1, None),
    **{("GET", path): (1, None) for path in PATHS},
}
HEADERS = (
    {"content-type": "text/plain"},
    {"content-type": "application/x-www-form-urlencoded", "origin": "http://elsewhere.example"},
    {"content-type": "application/json; charset=utf-16"},
    {"content-encoding": "gzip"},
    {"authorization": "Bearer " + "x" * 3000, "x-api-key": "?"},
    {"x-request-id": "../../" + "a" * 200},
    {"x-hotset-prefill": "127.0.0.1:9", "x-hotset-prefill-signature": "0"},
    {"x-hotset-page-marks": "yes", "traceparent": "00-zz", "accept": "image/png", "connection": "close"},
    {"expect": "100-continue"},
)


@dataclass(frozen=True, slots=True)
class Case:
    """One request. Its client may leave in the middle of the body, or some seconds after the request."""

    number: int
    method: str
    endpoint: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    half: bool = False
    leaves_after: float | None = None


def members(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every member of `value`, at any depth, as a pair: the dict or list that contains it, and its key there."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from members(value[key])


def mutate(rng: Rng, body: Json) -> None:
    """Changes, removes or adds one member of `body`."""
    holder, key = rng.choice([*members(body)] or [(body, "a")])
    kind = rng.randrange(6)
    if key in LENGTHS:
        holder[key] = rng.choice([0, -1, True, 1.5, "4", 3, [], {}, float("nan"), 10**400])
    elif kind == 0 and holder:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice([f"{key}s", "", "\ud800", "echo", "x" * 3000])] = rng.choice(ODD)
    elif kind == 2 and holder and isinstance(holder[key], list | str):
        holder[key] = holder[key] * rng.choice([2, 100])
    elif isinstance(holder, dict) or key < len(holder):
        holder[key] = rng.choice(ODD)


def damaged(rng: Rng, raw: bytes) -> bytes:
    at = rng.randrange(len(raw))
    flipped = raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
    wrong = [b"", b"null", b"[]", b"7", b"\0" * 50, raw[:at], raw + b"}", flipped, flipped, b"\xef\xbb\xbf" + raw]
    return rng.choice([*wrong, raw.decode(errors="replace").encode("utf-16"), b'{"stream":[],' + raw[1:]])


def case_of(seed: int, number: int) -> Case:
    """Returns request `number`. The same arguments return the same request."""
    rng = Rng(f"{seed}:{number}")
    method, endpoint = rng.choices([*ENDPOINTS], [weight for weight, _ in ENDPOINTS.values()])[0]
    make = ENDPOINTS[method, endpoint][1]
    path = endpoint.replace("{model_id}", rng.choice(["demo-dsa"] * 6 + ["%00", "x" * 2000, "a/../b", "%ff"]))
    kind = rng.choices(["valid", "mutated", "damaged", "headers", "method", "hostile"], [64, 18, 5, 5, 3, 2])[0]
    if kind == "hostile" and make is chat:
        make = hostile
    body = json.loads(json.dumps(make(rng))) if make else {}  # a copy, because parts are shared
    if kind == "mutated" and make:
        mutate(rng, body)
    written = json.dumps(body, ensure_ascii=rng.random() < 0.5)
    for name, raw in RAW.items():
        written = written.replace(name, raw)
    content = written.encode(errors="surrogatepass") if make else b""
    if kind == "damaged" and make:
        content = damaged(rng, content)
    headers = {"content-type": "application/json"} if make else {}
    if kind == "headers":
        headers |= rng.choice(HEADERS)
    if kind == "method":
        method = rng.choice(["GET", "POST", "HEAD", "OPTIONS", "DELETE", "PUT", "BREW"])
    leaves = rng.uniform(0, 0.6) if endpoint == "/live" or rng.random() < 0.04 else None
    return Case(number, method, endpoint, path, headers, content, bool(make) and rng.random() < 0.02, leaves)
