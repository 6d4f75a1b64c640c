"""`TextAssembler` returns the text of a choice piece by piece, and ends the text at a stop string."""

from collections.abc import Sequence

import pytest
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st

from hotset.base.sampling import SamplingParams
from hotset.engine.text import TextAssembler


class FakeTextStream:
    """Returns the text `texts[i]` for token i, and `last` when it is flushed."""

    def __init__(self, texts: Sequence[str], last: str = "") -> None:
        self._texts = texts
        self._last = last

    def push(self, token_id: int) -> str:
        return self._texts[token_id]

    def flush(self) -> str:
        last, self._last = self._last, ""
        return last


def text_until_stop(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """Returns the text up to the stop string that ends first, and that stop string (None if there is none). If several
    stop strings end at the same character, the longest counts."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


words = st.text(alphabet="ab\n", min_size=0, max_size=6)
stop_lists = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4)


@examples(100)
@given(texts=st.lists(words, max_size=8), stops=stop_lists, include=st.booleans(), last=words)
@example(texts=["aa", "ab"], stops=["aab"], include=False, last="")
@example(texts=["ab", "abb"], stops=["ababb", "ba"], include=False, last="")
@example(texts=["xa", "bc"], stops=["abc", "b"], include=True, last="")
@example(texts=["a\n", "b", "c\n"], stops=["\n\n"], include=False, last="")
@example(texts=["caf", ""], stops=[], include=False, last="\ufffd")  # an incomplete character
def test_pieces_add_up_and_none_is_early(texts: list[str], stops: list[str], include: bool, last: str) -> None:
    assembler = TextAssembler(
        FakeTextStream(texts, last), SamplingParams(stop=stops, include_stop_str_in_output=include)
    )
    released, pushed = "", ""
    for token, text in enumerate(texts):
        released, pushed = released + assembler.push(token), pushed + text
        whole, stop = text_until_stop(pushed, stops, include)
        assert assembler.stopped_by == stop
        if stop is not None:
            assert released == whole
            continue
        # The text held back is exactly the longest prefix of a stop string that the text ends with.
        held = max(
            (n for n in range(len(pushed) + 1) for s in stops if n < len(s) and pushed.endswith(s[:n])), default=0
        )
        assert released == pushed[: len(pushed) - held]
    whole, stop = text_until_stop(pushed + last, stops, include)
    assert (released + assembler.finish(), assembler.stopped_by) == (whole, stop)
    assert assembler.finish() == ""


@pytest.mark.parametrize(("include", "text"), [(False, "hi"), (True, "hi<end>")])
def test_the_text_of_a_stop_token_is_released_only_if_requested(include: bool, text: str) -> None:
    params = SamplingParams(stop=["iii"], include_stop_str_in_output=include)
    assembler = TextAssembler(FakeTextStream(["hi", "<end>"]), params)
    released = assembler.push(0) + assembler.push(1, is_stop_token=True) + assembler.finish()
    assert (released, assembler.stopped_by) == (text, None)


def test_without_a_tokenizer_the_text_stays_empty() -> None:
    assembler = TextAssembler(None, SamplingParams(stop=["x"]))
    assert (assembler.push(5), assembler.push(6, is_stop_token=True), assembler.finish()) == ("", "", "")
    assert assembler.stopped_by is None


def test_a_long_repetitive_stop_string_is_searched_in_linear_time() -> None:
    """A search that compares whole prefixes at every character would take very long here."""
    stop = "a" * 1000 + "b"
    assembler = TextAssembler(FakeTextStream(["a" * 500]), SamplingParams(stop=[stop]))
    assert "".join(assembler.push(0) for _ in range(100)) + assembler.finish() == "a" * 50000
