"""Compares libraries for structured output, xgrammar and llguidance, on one CPU core.

    pip install xgrammar llguidance
    python benchmarks/grammars.py --json grammars.json

Vocabularies: the embedded model's, and the same extended by pairs of its tokens to 129,280 (DeepSeek-V3.2) and 154,880
(GLM-5) entries. Each library and vocabulary has a process of its own. "table" is the time and the memory of the
library's tables for the vocabulary. "compile" is the time from a structure to a matcher. Then a matcher walks along a
fixed answer, token by token: "first" is the first mask, "mask" and "worst" are the median and the slowest of all
others, "accept" is the median time to accept a token. The second walk with a copy of the compiled grammar gives "warm".
"bomb" is the time of a schema whose automaton is large: nested optional properties and long bounded repetitions.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from report import make_parser, report

from hotset.base.config import EngineConfig
from hotset.engine.frontend import load_frontend

SIZES = (49_152, 129_280, 154_880)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 8},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
ANSWER = (
    '{"name": "Ada Lovelace", "age": 36, "tags": ["red", "blue", "green"], '
    '"address": {"street": "12 St James\'s Square, London", "zip": "12345"}}'
)
BOMB = {
    "type": "object",
    "properties": {
        f"p{n}": {"type": "string", "maxLength": 20_000, "pattern": "^(a|b|ab)*c{1,900}$"} for n in range(40)
    },
}


class Llguidance:
    def __init__(self, tokens: list[bytes], eos: int) -> None:
        import llguidance
        import llguidance.numpy

        class Vocabulary:
            eos_token_id, bos_token_id, special_token_ids = eos, None, [eos]

            def __call__(self, text: bytes) -> list[int]:
                raise NotImplementedError

        vocabulary: Any = Vocabulary()
        vocabulary.tokens = tokens
        self._library, self._fill = llguidance, llguidance.numpy.fill_next_token_bitmask
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary), eos_token=eos)
        self._bits = llguidance.numpy.allocate_token_bitmask(1, len(tokens))

    def compile(self, schema: Any) -> Any:
        grammar = self._library.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        matcher = self._library.LLMatcher(self._tokenizer, grammar)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def matcher(self, compiled: Any) -> Any:
        return compiled.deep_copy()

    def mask(self, matcher: Any) -> None:
        self._fill(matcher, self._bits, 0)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.consume_token(token))


class Xgrammar:
    def __init__(self, tokens: list[bytes], eos: int) -> None:
        import xgrammar

        self._library = xgrammar
        info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[eos])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._bits = xgrammar.allocate_token_bitmask(1, len(tokens))

    def compile(self, schema: Any) -> Any:
        return self._compiler.compile_json_schema(schema)

    def matcher(self, compiled: Any) -> Any:
        return self._library.GrammarMatcher(compiled)

    def mask(self, matcher: Any) -> None:
        matcher.fill_next_token_bitmask(self._bits)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept_token(token))


LIBRARIES: dict[str, Callable[[list[bytes], int], Any]] = {"llguidance": Llguidance, "xgrammar": Xgrammar}


def vocabulary(size: int) -> tuple[list[bytes], int, list[int]]:
    """Returns the bytes of all tokens, the end of text, and the tokens of ANSWER."""
    tokenizer = load_frontend(EngineConfig()).tokenizer
    assert tokenizer is not None
    tokens = [tokenizer.token_bytes(token) for token in range(SIZES[0])]
    tokens += [tokens[300 + number % 20_000] + tokens[400 + number // 3] for number in range(size - len(tokens))]
    return tokens, tokenizer.chat_stop_ids[0], tokenizer.encode(ANSWER, add_special=False)


def measure(name: str, size: int) -> dict[str, float | str]:
    tokens, eos, answer = vocabulary(size)
    __import__("torch"), __import__(name)
    before = _mib()
    started = time.perf_counter()
    library = LIBRARIES[name](tokens, eos)
    row: dict[str, float | str] = {"library": name, "vocabulary": size, "table s": time.perf_counter() - started}
    row["table MiB"] = _mib() - before
    started = time.perf_counter()
    compiled = library.compile(SCHEMA)
    row["compile ms"] = 1e3 * (time.perf_counter() - started)
    for walk in ("", "warm "):
        matcher, masks, accepts = library.matcher(compiled), [], []
        for token in answer:
            started = time.perf_counter()
            library.mask(matcher)
            filled = time.perf_counter()
            assert library.accept(matcher, token)
            masks.append(1e6 * (filled - started))
            accepts.append(1e6 * (time.perf_counter() - filled))
        row |= {f"{walk}first us": masks[0], f"{walk}mask us": sorted(masks[1:])[len(masks) // 2]}
        row |= {f"{walk}worst us": max(masks[1:]), f"{walk}accept us": sorted(accepts)[len(accepts) // 2]}
    row["MiB"] = _mib() - before
    started = time.perf_counter()
    try:
        library.mask(library.matcher(library.compile(BOMB)))
        row["bomb"] = "compiled"
    except Exception as error:
        row["bomb"] = str(error)[:60]
    row |= {"bomb s": time.perf_counter() - started, "bomb MiB": _mib() - before}
    return row


def _mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--case", nargs=2, metavar=("LIBRARY", "SIZE"), help="measure one case in this process")
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(arguments.case[0], int(arguments.case[1]))))
        return
    rows = []
    for name in LIBRARIES:
        for size in SIZES:
            command = [sys.executable, __file__, "--case", name, str(size)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
            rows.append(json.loads(done.stdout))
    report("grammars", rows, arguments)


if __name__ == "__main__":
    main()
