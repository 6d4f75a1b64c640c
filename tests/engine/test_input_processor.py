"""Token ids are checked together, with the verdict and the message of a check of each id."""

import enum
from collections.abc import Collection
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from hotset.base.errors import RequestError
from hotset.engine.frontend import token_ids_of
from hotset.engine.input_processor import all_in_vocabulary, check_token_ids

VOCAB = 151_552
NEAR_LIMITS = [0, VOCAB, 1 << 31, 1 << 32, 1 << 63, 1 << 64, 1 << 100]
IDS = st.one_of(
    st.integers(0, VOCAB - 1),
    st.sampled_from(NEAR_LIMITS).flatmap(lambda limit: st.integers(limit - 2, limit + 2)),
    st.integers(),
)


@examples(100)
@given(st.lists(IDS, max_size=6), st.sampled_from([list, tuple, frozenset, dict.fromkeys]))
def test_the_verdict_is_that_of_a_check_of_each_id(ids: list[int], container: Any) -> None:
    token_ids: Collection[int] = container(ids)
    assert all_in_vocabulary(token_ids, VOCAB) == all(0 <= token < VOCAB for token in ids)


@pytest.mark.parametrize("bad", [-1, VOCAB, 1 << 32, 1 << 64, -(1 << 70)])
def test_the_error_names_the_first_id_outside_the_vocabulary(bad: int) -> None:
    with pytest.raises(RequestError) as refused:
        check_token_ids("prompt", [5, VOCAB - 1, bad, -7, VOCAB + 7], VOCAB)
    assert str(refused.value) == f"prompt contains token id {bad}, but the vocabulary ends at {VOCAB - 1}"
    assert (refused.value.code, refused.value.param) == ("invalid_token_id", "prompt")


class Special(enum.IntEnum):
    BOS = 1


@pytest.mark.parametrize("ids", [[1, True], [1, 2.0], ["1"], [None], 5, {1: 2}])
def test_prompt_token_ids_that_are_not_whole_numbers_are_refused(ids: Any) -> None:
    with pytest.raises(RequestError, match="must be a list of whole numbers"):
        token_ids_of({"prompt_token_ids": ids}, None)


@pytest.mark.parametrize("ids", [[], [1, 2], (Special.BOS, 7), range(3)])
def test_every_sequence_of_whole_numbers_is_accepted(ids: Any) -> None:
    assert token_ids_of({"prompt_token_ids": ids}, None) == list(ids)
