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

import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from report import make_parser, report

from hotset.base.config import EngineConfig
from hotset.engine.frontend import load_frontend
from hotset.models.tokenizer import BYTE_OF

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


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary in the forms that the libraries take, its end token, and the tokens of ANSWER."""

    tokenizer_json: str
    tokens: list[bytes]
    end: int
    answer: list[int]


class Llguidance:
    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance
        import llguidance.numpy

        self._library, self._fill = llguidance, llguidance.numpy.fill_next_token_bitmask
        self._tokenizer = llguidance.LLTokenizer(vocabulary.tokenizer_json, eos_token=vocabulary.end)
        self._bits = llguidance.numpy.allocate_token_bitmask(1, len(vocabulary.tokens))

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
    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self._library = xgrammar
        tokens, eos = vocabulary.tokens, vocabulary.end
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


LIBRARIES: dict[str, Callable[[Vocabulary], Any]] = {"llguidance": Llguidance, "xgrammar": Xgrammar}


def vocabulary(size: int) -> Vocabulary:
    tokenizer = load_frontend(EngineConfig()).tokenizer
    assert tokenizer is not None
    described = json.loads(tokenizer.to_json())
    pieces: dict[str, int] = described["model"]["vocab"]
    texts = list(pieces)
    pairs = (texts[300 + number % 20_000] + texts[400 + number // 3] for number in range(10 * size))
    for pair in pairs:
        if len(pieces) == size:
            break
        pieces.setdefault(pair, len(pieces))
    tokenizer_json = json.dumps(described)
    extended = tokenizers.Tokenizer.from_str(tokenizer_json)
    tokens = [bytes(BYTE_OF.get(letter, 0) for letter in extended.id_to_token(token) or "") for token in range(size)]
    answer = tokenizer.encode(ANSWER, add_special=False)
    return Vocabulary(tokenizer_json, tokens, tokenizer.chat_stop_ids[0], answer)


def measure(name: str, size: int) -> dict[str, float | str]:
    words = vocabulary(size)
    answer = words.answer
    __import__("torch"), __import__(name)
    before = _mib()
    started = time.perf_counter()
    library = LIBRARIES[name](words)
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
    """Returns the memory of this process."""
    gc.collect()
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return resident_pages * resource.getpagesize() / (1 << 20)


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
    report("libraries for structured output", rows, arguments.json)


if __name__ == "__main__":
    main()
