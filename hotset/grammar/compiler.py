"""Compiles structures for one vocabulary, and keeps the compiled grammars that were used last."""

import contextlib
import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import tokenizers

from hotset.base.errors import CheckpointError, RequestError
from hotset.base.structure import Structure, invalid_structure
from hotset.grammar.matcher import MaskShape, Matcher, StructureFailed
from hotset.grammar.source import library_grammar

MAX_COMPILED = 64  # grammars that are kept; one has some 10 kB, and at most LIMITS["max_lexer_states"] kB
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,  # for one mask: about 10 ms
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}
END_TOKEN = "<|end of the structure|>"
INSTALL = "structured output needs the package llguidance: pip install 'llguidance>=1.9'"


class GrammarCompiler:
    """Makes matchers. Thread-safe. The library's tables for the vocabulary are built when the first is needed."""

    def __init__(self, tokenizer_json: Callable[[], str | None], vocab: int) -> None:
        """`tokenizer_json` returns a tokenizer in the format of tokenizer.json, or None if the model has none. `vocab`
        is the number of logits."""
        self._tokenizer_json, self._vocab = tokenizer_json, vocab
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._masks = MaskShape(vocab, vocab, 0)
        self._special_tokens: frozenset[str] = frozenset()
        self._compiled: OrderedDict[Structure, Any] = OrderedDict()  # the structure used last is at the end

    def matcher(self, structure: Structure, stop_ids: frozenset[int]) -> Matcher:
        """Returns a matcher at the beginning of an answer. The first of a structure can take a second.

        Raises RequestError if the structure cannot be compiled, is too complex, or allows no answer.
        """
        with self._lock:
            compiled = self._compiled.get(structure)
            if compiled is None:
                compiled = self._compile(structure)
                self._compiled[structure] = compiled
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(structure)
            return Matcher(compiled.deep_copy(), self._masks, stop_ids)

    def warm_up(self) -> None:
        """Builds the tables for the vocabulary, which can take a second, if the package and a tokenizer are there.

        A model that a program built itself has no files, and so no tokenizer.
        """
        with self._lock, contextlib.suppress(RequestError, CheckpointError):
            self._library_tokenizer()

    def check(self, structure: Structure) -> None:
        """Compiles a structure. Raises like `matcher`."""
        self.matcher(structure, frozenset())

    def forget(self, structure: Structure) -> None:
        """Drops a compiled grammar. All its matchers share one lexer, which can reach the limit of its states."""
        with self._lock:
            self._compiled.pop(structure, None)

    def _compile(self, structure: Structure) -> Any:
        tokenizer = self._library_tokenizer()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS, verbose_errors=False)
        compiled = LLMatcher(tokenizer, library_grammar(structure, self._special_tokens), log_level=0, limits=limits)
        name = structure.kind.replace("_", " ")
        if compiled.is_error():
            raise invalid_structure(f"the {name} cannot be compiled: {_one_line(compiled.get_error())}")
        try:
            first = Matcher(compiled.deep_copy(), self._masks, frozenset())
            first.fill(self._masks.empty(1), 0)
            first.check_forced()
        except StructureFailed as error:
            raise invalid_structure(f"the {name} matches no answer: {error}") from None
        return compiled

    def _library_tokenizer(self) -> Any:
        if self._tokenizer is None:
            if importlib.util.find_spec("llguidance") is None:
                raise RequestError(INSTALL, code="missing_package")
            from llguidance import LLTokenizer

            tokenizer_json = self._tokenizer_json()
            if tokenizer_json is None:
                raise invalid_structure("structured output needs a tokenizer, and this model has none")
            # Requests have their own stop tokens. The library gets an end token that is never sampled.
            extended = tokenizers.Tokenizer.from_str(tokenizer_json)
            extended.add_special_tokens([END_TOKEN])
            end_id = extended.token_to_id(END_TOKEN)
            assert end_id is not None, "a token that was added has no id"
            added = extended.get_added_tokens_decoder().values()
            self._special_tokens = frozenset(token.content for token in added if token.special)
            self._masks = MaskShape(self._vocab, max(self._vocab, end_id + 1), end_id)
            self._tokenizer = LLTokenizer(extended.to_str(), n_vocab=self._masks.width, eos_token=end_id)
        return self._tokenizer


def _one_line(text: str) -> str:
    return " ".join(text.replace("<non-verbose/>", "").split())[:400]
