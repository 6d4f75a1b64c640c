"""Compiles structures for one vocabulary."""

import importlib.util
from typing import Any

import tokenizers

from hotset.base.errors import RequestError
from hotset.base.structure import Structure, invalid_structure
from hotset.grammar.matcher import MaskShape, Matcher, StructureFailed
from hotset.grammar.source import library_grammar

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


class CompiledGrammar:
    """A structure for one vocabulary. Its matchers share a lexer and the limit on the lexer's states."""

    def __init__(self, state: Any, masks: MaskShape) -> None:
        self._state, self._masks = state, masks

    def matcher(self, stop_ids: frozenset[int]) -> Matcher:
        """Returns a matcher at the beginning of an answer."""
        return Matcher(self._state.deep_copy(), self._masks, stop_ids)


class GrammarCompiler:
    """Compiles structures for one vocabulary."""

    def __init__(self, tokenizer_json: str, vocab: int) -> None:
        """Builds the library's tables for the vocabulary, which can take a second.

        `tokenizer_json` is a tokenizer in the format of tokenizer.json, and `vocab` the number of logits. Raises
        RequestError if the library is missing.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise RequestError(INSTALL, code="missing_package")
        from llguidance import LLTokenizer

        # Requests have their own stop tokens. The library gets an end token that is never sampled.
        extended = tokenizers.Tokenizer.from_str(tokenizer_json)
        extended.add_special_tokens([END_TOKEN])
        end_id = extended.token_to_id(END_TOKEN)
        assert end_id is not None, "a token that was added has no id"
        added = extended.get_added_tokens_decoder().values()
        self._special_tokens = frozenset(token.content for token in added if token.special)
        self._masks = MaskShape(vocab, max(vocab, end_id + 1), end_id)
        self._tokenizer = LLTokenizer(extended.to_str(), n_vocab=self._masks.width, eos_token=end_id)

    def compile(self, structure: Structure) -> CompiledGrammar:
        """Compiles a structure. Raises RequestError if that is not possible, if it is too complex, or if it allows no
        answer."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS, verbose_errors=False)
        state = LLMatcher(self._tokenizer, library_grammar(structure, self._special_tokens), log_level=0, limits=limits)
        if state.is_error():
            raise invalid_structure(f"the {structure.name} cannot be compiled: {_one_line(state.get_error())}")
        compiled = CompiledGrammar(state, self._masks)
        try:
            first = compiled.matcher(frozenset())
            first.fill(self._masks.empty(1), 0)
            first.check_forced()
        except StructureFailed as error:
            raise invalid_structure(f"the {structure.name} matches no answer: {error}") from None
        return compiled


def _one_line(text: str) -> str:
    return " ".join(text.replace("<non-verbose/>", "").split())[:400]
