"""Follows one answer through its grammar."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_FORCED_BYTES = 1 << 14
Bits = npt.NDArray[np.int32]  # [requests, words]: bit i % 32 of word i // 32 is set if token i is allowed


class StructureFailed(Exception):
    """An answer cannot be continued: its grammar is too complex for the library, or allows no token."""


@dataclass(frozen=True, slots=True)
class MaskShape:
    """The size of masks for one vocabulary."""

    vocab: int  # number of logits
    width: int  # number of tokens that the library knows; all from `vocab` on are never sampled
    end_id: int  # the library's own end token, which is never sampled

    def empty(self, requests: int) -> Bits:
        return np.zeros((requests, (self.width + 31) // 32), dtype=np.int32)

    def allows(self, mask: npt.NDArray[np.int32], token: int) -> bool:
        return token < self.vocab and bool(mask[token // 32] >> (token % 32) & 1)

    def of(self, token_ids: Iterable[int]) -> npt.NDArray[np.int32]:
        """Returns the mask of these tokens, without those outside the vocabulary."""
        mask: npt.NDArray[np.int32] = self.empty(1)[0]
        for token in token_ids:
            if token < self.vocab:
                mask.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))
        return mask


class Matcher:
    """The state of one answer. Stop tokens are allowed exactly where the grammar may end, and after the end.

    Only one thread may use it at a time.
    """

    def __init__(self, state: Any, masks: MaskShape, stop_ids: frozenset[int]) -> None:
        """`state` is an `LLMatcher` that only this object uses."""
        from llguidance.numpy import fill_next_token_bitmask

        self._state, self._fill = state, fill_next_token_bitmask
        self.masks, self._stop_ids = masks, stop_ids
        self._stops, self._not_stops = masks.of(stop_ids), ~masks.of((*stop_ids, masks.end_id))
        self._num_after_end = 0  # tokens accepted from the first stop token on

    @property
    def may_end(self) -> bool:
        """True if the answer so far is complete. It may still allow further tokens."""
        return bool(self._state.is_accepting())

    @property
    def finished(self) -> bool:
        """True if a stop token was accepted."""
        return self._num_after_end > 0

    def fill(self, bits: Bits, row: int) -> None:
        """Writes the tokens that may come next into `bits[row]`. Raises StructureFailed if there are none."""
        if self.finished:
            bits[row] = self._stops
            return
        self._fill(self._state, bits, row)
        self._check()
        bits[row] &= self._not_stops
        if self.may_end:
            bits[row] |= self._stops
        elif not bits[row].any():
            raise StructureFailed("no token of the vocabulary continues the answer as its structure demands")

    def accept(self, token: int) -> None:
        """Advances by one token. Raises StructureFailed if the token is not allowed."""
        if self.finished or (token in self._stop_ids and self.may_end):
            self._num_after_end += 1
        elif not self._state.consume_token(token):
            self._check()
            raise StructureFailed(f"token {token} does not fit the structure")

    def rollback(self, count: int) -> None:
        """Takes back the newest `count` tokens."""
        after_end = min(count, self._num_after_end)
        self._num_after_end -= after_end
        if count > after_end and not self._state.rollback(count - after_end):
            raise StructureFailed(f"{count} tokens cannot be taken back: {self._state.get_error()}")

    def check_forced(self) -> None:
        """Raises StructureFailed if the grammar allows only one text for very long: it usually never ends."""
        if len(self._state.compute_ff_bytes()) > MAX_FORCED_BYTES:
            raise StructureFailed(f"it begins with a fixed text of more than {MAX_FORCED_BYTES} bytes, or never ends")

    def _check(self) -> None:
        if self._state.is_error():
            reason = self._state.get_error().partition("\n")[0]
            raise StructureFailed(f"the structure is too complex, or no token fits it: {reason}")
