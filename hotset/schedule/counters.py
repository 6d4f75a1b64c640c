"""What the scheduler counts."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from hotset.schedule.request import FinishReason


@dataclass(slots=True)
class Counters:
    """Totals since start; each is counted where the thing happens and nowhere else."""

    steps: int = 0
    tokens_prefilled: int = 0
    tokens_generated: int = 0
    demotions: int = 0
    promotions: int = 0
    parks: int = 0
    resumes: int = 0
    recomputes: int = 0
    landed: int = 0
    lost: int = 0  # attempts; the request may have been tried again
    asked_again: int = 0  # attempts after one that was lost
    handed_over: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)

    @classmethod
    def total(cls, counters: "Iterable[Counters]") -> "Counters":
        total = cls()
        for each in counters:
            for name in (name.name for name in fields(cls)):
                setattr(total, name, getattr(total, name) + getattr(each, name))
        return total
