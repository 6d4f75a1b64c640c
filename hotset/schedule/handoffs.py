"""Messages between a scheduler and the handoff endpoint of its engine, about prompts that one engine computes for
another.

A decode worker reserves pages (`Reservation`) and may give them up (`CancelFetch`). A prefill worker announces what it
has computed. The scheduler makes these values, plans carry the announcements, and the endpoint passes them on.
"""

from dataclasses import dataclass
from typing import Protocol

from hotset.base.sampling import Alternatives, PromptSpec


class DeviceEvent(Protocol):
    """An event on a device, for which handoffs wait. `torch.cuda.Event` satisfies this protocol."""

    def query(self) -> bool:
        """Returns whether the event has happened."""


@dataclass(frozen=True, slots=True)
class HandoffKey:
    """Identifies a handoff at its receiver. Each retry of a request has a higher attempt number."""

    request_id: str
    attempt: int


HandoffId = tuple[str, HandoffKey]  # identifies a handoff at its sender: the requesting peer, and that peer's key


@dataclass(frozen=True, slots=True)
class ContextPages:
    """All pages of a context in one store, in order."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowsComputed:
    """Announces rows and index keys [first, last) of a prompt.

    They are in the host store once the plan that carries the announcement has been executed and the event `after` has
    happened. If `device_pages` are given, they are also in these pages of the device pool, until the request is
    dropped. Rows before `first` are there by then too, because the events of a request are recorded on one stream.
    """

    peer: str
    key: HandoffKey
    first: int
    last: int
    pages: tuple[int, ...]  # all host pages of the request so far, from its first; rows do not move to other pages
    after: DeviceEvent | None = None  # set when the plan is submitted; None if the rows are there then
    device_pages: ContextPages | None = None  # None if the rows do not stay in the device pool


@dataclass(frozen=True, slots=True)
class FirstTokenSampled:
    """Announces that the whole prompt is computed. All its rows were announced before this."""

    peer: str
    key: HandoffKey
    token_id: int
    alternatives: Alternatives | None


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """Announces that the prompt will not be computed, or that no token can be sampled after it."""

    peer: str
    key: HandoffKey
    retry: bool  # another attempt may succeed
    reason: str


Announcement = RowsComputed | FirstTokenSampled | PrefillFailed


@dataclass(frozen=True, slots=True)
class Reservation:
    """Requests a prompt from the prefill worker at `prefill_at`, which writes the KV into the reserved pages.

    Rows [0, first) are in the prefix cache, and only the others are written. `row_pages` are the pages of rows from
    `first` on: device pages if `on_device`, otherwise host pages. `key_pages` are the device pages of index keys, from
    the page with key `first` on. If `keys_on_host`, `key_pages` are the host pages in `row_pages`. No peer gets a page
    of the prefix cache, so none can write to it.
    """

    key: HandoffKey
    prefill_at: str
    prompt: PromptSpec
    on_device: bool
    row_pages: tuple[int, ...]
    key_pages: tuple[int, ...]
    first: int = 0
    keys_on_host: bool = False


@dataclass(frozen=True, slots=True)
class CancelFetch:
    """Cancels a handoff for which pages are reserved. The pages stay held until the handoff ends."""

    key: HandoffKey
