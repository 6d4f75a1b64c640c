"""What may go wrong on loopback."""

import random
from dataclasses import dataclass
from enum import Enum


class Fate(Enum):
    """What becomes of a submitted list."""

    WRITTEN = "all of it lands: DONE"
    CUT = "a part lands: FAILED_QUIESCED"
    LOST = "a part lands: FAILED_UNKNOWN"
    SILENT = "a part lands, and nothing is heard until the deadline: FAILED_UNKNOWN"
    LATE = "a part lands: FAILED_UNKNOWN; the rest lands later"


@dataclass(frozen=True, slots=True)
class Faults:
    """How often what goes wrong, as probabilities, and how long things take, as ranges of seconds."""

    cut: float = 0.0
    lost: float = 0.0
    silent: float = 0.0
    late: float = 0.0
    reorder: float = 0.0  # the writes of a list land in any order, some of them after those of later lists
    duplicate: float = 0.0  # some writes land twice, never after the list has ended
    delay_s: tuple[float, float] = (0.0, 0.0)
    late_s: tuple[float, float] = (0.1, 1.0)  # from the failure to the landing of what is late

    def fate(self, source: random.Random) -> Fate:
        odds = {Fate.CUT: self.cut, Fate.LOST: self.lost, Fate.SILENT: self.silent, Fate.LATE: self.late}
        drawn = source.random()
        for fate, chance in odds.items():
            if drawn < chance:
                return fate
            drawn -= chance
        return Fate.WRITTEN
