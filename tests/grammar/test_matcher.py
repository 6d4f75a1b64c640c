"""Matchers against oracles: every answer that a random walk of allowed tokens ends satisfies its structure."""

import json
import random
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from structures import END, SMALL_STRUCTURES, SchemaGenerator, byte_tokenizer, of_schema, satisfies, small_tokenizer

from hotset.base.errors import RequestError
from hotset.base.fork_server import ForkServer
from hotset.base.structure import Structure
from hotset.grammar import compiler as compiler_module
from hotset.grammar.compiler import GrammarCompiler
from hotset.grammar.jobs import PreparedCompiler
from hotset.grammar.matcher import Matcher, StructureFailed

VOCAB = 64  # three logits have no token
STOPS = frozenset({END})
TOKENIZER = small_tokenizer()
BYTE_TOKENIZER = byte_tokenizer()


@cache
def grammars() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER.to_str(), VOCAB)


@cache
def byte_grammars() -> GrammarCompiler:
    return GrammarCompiler(BYTE_TOKENIZER.to_str(), BYTE_TOKENIZER.get_vocab_size())


@cache
def token_text(token: int) -> str:
    return TOKENIZER.decode([token], skip_special_tokens=False)


def allowed(matcher: Matcher) -> list[int]:
    bits = matcher.masks.empty(2)
    matcher.fill(bits, 1)
    assert not bits[0].any(), "a mask was written to another row"
    tokens = np.flatnonzero(np.unpackbits(bits[1].view(np.uint8), bitorder="little"))
    assert not len(tokens) or tokens.max() < 61, "a token that does not exist is allowed"
    return [int(token) for token in tokens]


def walk(matcher: Matcher, choose: Callable[[list[int]], int], most: int = 3000) -> str:
    """Accepts allowed tokens until a stop token. Returns the text."""
    text = ""
    for _ in range(most):
        tokens = allowed(matcher)
        assert (END in tokens) == matcher.may_end
        token = choose(tokens)
        matcher.accept(token)
        if token == END:
            assert matcher.finished and allowed(matcher) == [END]
            return text
        text += token_text(token)
    raise AssertionError(f"no end after {most} tokens: {text[-200:]!r}")


@pytest.mark.parametrize("structure", SMALL_STRUCTURES, ids=lambda structure: structure.kind)
@given(seed=st.integers(0, 1 << 30))
@examples(8)
def test_random_answers_satisfy_their_structure(structure: Structure, seed: int) -> None:
    text = walk(grammars().compile(structure).matcher(STOPS), random.Random(seed).choice)
    assert satisfies(structure, text)


@given(seed=st.integers(0, 1 << 30))
@examples(10)
def test_random_answers_satisfy_random_schemas(seed: int) -> None:
    rng = random.Random(seed)
    structure, tokens = of_schema(SchemaGenerator(rng).schema()), list[int]()
    matcher = byte_grammars().compile(structure).matcher(STOPS)
    bits = matcher.masks.empty(1)
    while not tokens or tokens[-1] != END:
        matcher.fill(bits, 0)
        tokens.append(int(rng.choice(np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little")))))
        matcher.accept(tokens[-1])
        assert len(tokens) < 50_000
    text = BYTE_TOKENIZER.decode(tokens[:-1])
    assert satisfies(structure, text), (structure, text)


def test_the_mask_of_a_choice_has_exactly_the_tokens_that_begin_or_continue_one() -> None:
    choices = ["ab12", "abc", "12", "ab1234"]
    pending = [""]
    while pending:
        text = pending.pop()
        matcher = grammars().compile(Structure("choice", json.dumps(choices))).matcher(STOPS)
        for letter in text:
            matcher.accept(TOKENIZER.token_to_id(letter))
        begins = [t for t in range(61) if t != END and any(c.startswith(text + token_text(t)) for c in choices)]
        assert allowed(matcher) == sorted([*begins, *([END] if text in choices else [])])
        pending += [text + token_text(token) for token in begins]


@given(seed=st.integers(0, 1 << 30), taken_back=st.integers(0, 12))
@examples(10)
def test_a_rollback_restores_the_masks_of_earlier_tokens(seed: int, taken_back: int) -> None:
    rng = random.Random(seed)
    matcher = grammars().compile(rng.choice(SMALL_STRUCTURES)).matcher(STOPS)
    masks, tokens = [], []
    for _ in range(12):
        masks.append(allowed(matcher))
        tokens.append(rng.choice(masks[-1]))  # from the first stop token on, only stop tokens
        matcher.accept(tokens[-1])
    matcher.rollback(taken_back)
    for mask, token in zip(masks[12 - taken_back :], tokens[12 - taken_back :], strict=True):
        assert allowed(matcher) == mask
        matcher.accept(token)


def test_a_token_that_does_not_fit_is_refused() -> None:
    matcher = grammars().compile(Structure("regex", "[0-9]+")).matcher(STOPS)
    with pytest.raises(StructureFailed, match="fits it"):
        matcher.accept(TOKENIZER.token_to_id("c"))


def test_a_stop_token_that_is_text_is_allowed_only_at_the_end() -> None:
    stop = TOKENIZER.token_to_id("12")
    matcher = grammars().compile(Structure("regex", "a[12]*")).matcher(frozenset({stop}))
    assert stop not in allowed(matcher)
    matcher.accept(TOKENIZER.token_to_id("a"))
    assert stop in allowed(matcher)
    matcher.accept(stop)
    assert matcher.finished


@pytest.mark.parametrize("after", ["abc", "<end>"])  # as text, and as a special token
def test_a_structure_can_begin_after_a_marker(after: str) -> None:
    matcher = grammars().compile(Structure("regex", "[0-9]{2}", after)).matcher(frozenset({9}))
    for piece in ["d", "true", *(["a", "b", "c"] if after == "abc" else ["<end>"]), "Ċ", "1"]:
        token = TOKENIZER.token_to_id(piece)
        assert token in allowed(matcher) and not matcher.may_end, piece
        matcher.accept(token)
    assert TOKENIZER.token_to_id("a") not in allowed(matcher)
    matcher.accept(TOKENIZER.token_to_id("2"))
    assert matcher.may_end


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        (Structure("regex", "(?=a)b"), "cannot be compiled: .*look-around"),
        (Structure("regex", r"[^\s\S]"), "matches no answer"),
        (Structure("grammar", 'start: "a" start'), "matches no answer: it begins with a fixed text"),
        (Structure("grammar", 'first: "a"'), "cannot be compiled: no start rule"),
        (Structure("grammar", 'start: %json {"type"'), "after %json"),
        (of_schema({"type": "strin"}), "Invalid type"),
        (of_schema({"not": {"type": "string"}}), "Unimplemented"),
        (of_schema({"x-guidance": {"lenient": True}, "not": {"type": "string"}}), "Unimplemented"),
        (of_schema({"$ref": "http://127.0.0.1:9/schema"}), "cannot be compiled"),
        (of_schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
    ],
)
def test_a_structure_that_cannot_be_compiled_is_refused_with_the_reason(structure: Structure, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        grammars().compile(structure)
    assert caught.value.code == "invalid_structure"


NESTED: dict[str, object] = {"type": "string"}
for _ in range(150):
    NESTED = {"type": "array", "items": NESTED}


@pytest.mark.parametrize(
    ("bomb", "reason"),
    [
        (of_schema({"type": "integer", "multipleOf": 999_983}), "its cost is"),
        (of_schema({"anyOf": [{"type": "number", "multipleOf": 0.09973 + n / 1e5} for n in range(50)]}), "its cost is"),
        (of_schema({"type": "object", "properties": {f"p{n}": {} for n in range(5000)}}), "its cost is"),
        (Structure("grammar", 'start: %json {"multipleOf": 99991} %json {"multipleOf": 99989}'), "its cost is"),
        (of_schema(NESTED), "more than 100 levels"),
        (of_schema({"allOf": [{"anyOf": [{"properties": {f"p{n}": {"const": m}}} for m in "ab"]} for n in range(20)]}),
         "cannot be compiled"),
    ],
)  # fmt: skip
def test_a_grammar_bomb_is_refused(bomb: Structure, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        grammars().compile(bomb)


def test_a_grammar_that_becomes_too_complex_fails_its_own_answer_only() -> None:
    bomb = Structure("regex", "((a{1,1000}){1,1000}){1,1000}")
    matcher = grammars().compile(bomb).matcher(STOPS)
    with pytest.raises(StructureFailed, match="too complex"):
        walk(matcher, lambda tokens: tokens[0] if tokens[0] != END else tokens[1])
    assert allowed(grammars().compile(Structure("choice", '["12"]')).matcher(STOPS))


def test_without_the_package_a_structure_is_refused_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match="pip install 'llguidance"):
        GrammarCompiler(TOKENIZER.to_str(), VOCAB)


def test_a_model_without_a_tokenizer_has_no_structures() -> None:
    with pytest.raises(RequestError, match="needs a tokenizer"):
        PreparedCompiler(ForkServer(), lambda: None, VOCAB).prepare()
