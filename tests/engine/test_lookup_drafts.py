"""Prompt look-up drafts, compared with a search that looks at every position."""

from random import Random

import pytest

from hotset.engine.drafts import drafters as drafters_module
from hotset.engine.drafts.drafters import MAX_COMPARED, MAX_MATCHES, NGRAM, LookupDrafter


def naive_drafts(tokens: list[int], count: int) -> list[int]:
    """Returns the tokens after the longest of the newest matches. Drafts continue a text that ends."""
    ends = [end for end in range(len(tokens) - 1, NGRAM - 1, -1) if tokens[end - NGRAM : end] == tokens[-NGRAM:]]

    def matched(end: int) -> int:
        length = 0
        while length < min(end, MAX_COMPARED) and tokens[end - length - 1] == tokens[len(tokens) - length - 1]:
            length += 1
        return length

    if not ends:
        return []
    best = max(ends[:MAX_MATCHES], key=lambda end: (matched(end), end))
    text = list(tokens)
    for _ in range(count):
        text.append(text[best + len(text) - len(tokens)])
    return text[len(tokens) :]


@pytest.mark.parametrize("vocab", [1, 2, 4, 30])
def test_drafts_follow_the_longest_of_the_newest_matches(vocab: int) -> None:
    random = Random(vocab)
    drafter, found = LookupDrafter(), 0
    for name in ("a", "b", "c"):
        tokens = [random.randrange(vocab) for _ in range(random.randint(1, 40))]
        for _ in range(60):
            count = random.randint(1, 6)
            drafted = drafter.draft(name, tokens, count)
            assert list(drafted) == naive_drafts(tokens, count)
            found += bool(drafted)
            again = random.random() < 0.5
            copied = random.randrange(len(tokens))
            tokens += tokens[copied : copied + 5] if again else [random.randrange(vocab)]
    assert found > 50
    for name in ("a", "b", "b", "unknown"):
        drafter.forget(name)
    assert list(drafter._indexes) == ["c"]


def test_a_long_prompt_is_indexed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call indexes more than MAX_INDEXED tokens, so the end of a long prompt is found by a later call."""
    monkeypatch.setattr(drafters_module, "MAX_INDEXED", 10)
    tokens = [*range(35), 7, 8, *range(100, 110), 20, 21]
    drafter = LookupDrafter()
    assert drafter.draft("request", tokens, 2) == (), "positions 20 and 21 are not indexed yet"
    assert drafter.draft("request", tokens, 2) == () and list(drafter.draft("request", tokens, 2)) == [22, 23]
