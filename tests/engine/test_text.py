from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hotset.base.sampling import SamplingParams
from hotset.engine.text import TextAssembler


class Pieces:
    """A text source whose token i reads as `texts[i]`, and which flushes `last`."""

    def __init__(self, texts: Sequence[str], last: str = "") -> None:
        self._texts = texts
        self._last = last

    def push(self, token_id: int) -> str:
        return self._texts[token_id]

    def flush(self) -> str:
        last, self._last = self._last, ""
        return last


def cut(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The definition, by trying every end: the first end of any stop string, the longest of those that end there."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


def assembled(texts: Sequence[str], stops: Sequence[str], *, include: bool = False, last: str = "") -> list[str]:
    assembler = TextAssembler(Pieces(texts, last), SamplingParams(stop=stops, include_stop_str_in_output=include))
    return [*(assembler.push(token) for token in range(len(texts))), assembler.finish()]


words = st.text(alphabet="ab\n", min_size=0, max_size=6)
stop_lists = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4)


@settings(max_examples=1000, deadline=None)
@given(texts=st.lists(words, max_size=8), stops=stop_lists, include=st.booleans(), last=words)
@example(texts=["aa", "ab"], stops=["aab"], include=False, last="")
@example(texts=["ab", "abb"], stops=["ababb", "ba"], include=False, last="")
def test_deltas_add_up_to_the_brute_force_cut_and_nothing_is_shown_too_early(
    texts: list[str], stops: list[str], include: bool, last: str
) -> None:
    assembler = TextAssembler(Pieces(texts, last), SamplingParams(stop=stops, include_stop_str_in_output=include))
    shown, so_far = "", ""
    for token, text in enumerate(texts):
        shown, so_far = shown + assembler.push(token), so_far + text
        whole, stop = cut(so_far, stops, include)
        assert assembler.stopped_by == stop
        if stop is not None:
            assert shown == whole
            continue
        # Held back is exactly the longest end of the text that some stop string begins with: no less and no more.
        held = max(
            (n for n in range(len(so_far) + 1) for s in stops if n < len(s) and so_far.endswith(s[:n])), default=0
        )
        assert shown == so_far[: len(so_far) - held]
    whole, stop = cut(so_far + last, stops, include)
    assert (shown + assembler.finish(), assembler.stopped_by) == (whole, stop)
    assert assembler.finish() == ""


def test_a_stop_string_across_tokens_never_shows_in_part() -> None:
    assert assembled(["Hello wo", "rl", "d! more", "even more"], ["world"]) == ["Hello ", "", "", "", ""]


def test_text_held_back_in_vain_is_shown_once_it_is_certain() -> None:
    assert assembled(["a\n", "b", "c\n"], ["\n\n"]) == ["a", "\nb", "c", "\n"]


def test_the_first_stop_string_to_be_complete_wins_whatever_the_token_bounds() -> None:
    for texts in (["xabc"], ["xa", "bc"], ["x", "a", "b", "c"]):
        assert "".join(assembled(texts, ["abc", "b"])) == "xa"
        assert "".join(assembled(texts, ["bc", "abc"])) == "x"


def test_the_stop_string_is_kept_and_what_follows_dropped_when_asked() -> None:
    assert "".join(assembled(["one. t", "wo"], ["."], include=True)) == "one."


@pytest.mark.parametrize(("include", "text"), [(False, "hi"), (True, "hi<end>")])
def test_a_stop_tokens_own_text_shows_only_when_asked(include: bool, text: str) -> None:
    params = SamplingParams(stop=["iii"], include_stop_str_in_output=include)
    assembler = TextAssembler(Pieces(["hi", "<end>"]), params)
    shown = assembler.push(0) + assembler.push(1, is_stop_token=True) + assembler.finish()
    assert (shown, assembler.stopped_by) == (text, None)


def test_unfinished_characters_come_with_the_end() -> None:
    assert assembled(["caf", ""], [], last="\ufffd") == ["caf", "", "\ufffd"]


def test_without_a_tokenizer_the_text_stays_empty() -> None:
    assembler = TextAssembler(None, SamplingParams(stop=["x"]))
    assert (assembler.push(5), assembler.push(6, is_stop_token=True), assembler.finish()) == ("", "", "")
    assert assembler.stopped_by is None


def test_a_long_repetitive_stop_string_costs_linear_time() -> None:
    stop = "a" * 1000 + "b"
    assert "".join(assembled(["a" * 500] * 100, [stop])) == "a" * 50000
