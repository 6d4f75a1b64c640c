"""A model of the slots of a hot buffer, in plain Python. Tests compare the CUDA kernels, their reference and the whole
KV memory with it."""

from collections.abc import Sequence
from dataclasses import dataclass

from hotset.kernels import EMPTY

NEVER = -1  # the stamp of a slot that was not used yet


@dataclass(slots=True)
class LruSlots:
    """The slots of one seat and index group. The least recently used slot is evicted; ties evict the lower slot."""

    position_of: list[int]
    last_used: list[int]

    @staticmethod
    def empty(slots: int) -> "LruSlots":
        return LruSlots([EMPTY] * slots, [NEVER] * slots)

    def slot_of(self, position: int) -> int:
        return self.position_of.index(position) if position in self.position_of else EMPTY

    def use(self, positions: Sequence[int], stamp: int) -> list[int]:
        """Puts missing positions into slots and stamps the slots of all `positions`. Returns the missing ones, each
        once, in the order in which they occur first."""
        missing = list(dict.fromkeys(position for position in positions if position not in self.position_of))
        for slot, position in enumerate(self.position_of):
            if position in positions:
                self.last_used[slot] = stamp
        idle = [slot for slot, used in enumerate(self.last_used) if used != stamp]
        victims = sorted(idle, key=lambda slot: self.last_used[slot])[: len(missing)]
        for slot, position in zip(sorted(victims), missing, strict=True):
            self.position_of[slot], self.last_used[slot] = position, stamp
        return missing
