"""What lanes ask of an engine that writes between processes. Lanes bring deadlines, order, merging and states."""

from dataclasses import dataclass
from typing import Any, Protocol

from hotset.transfer.api import Region, State, Writes
from hotset.transfer.regions import Regions


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine takes well."""

    writes: int  # in one post
    nbytes: int  # in one post
    write_nbytes: int  # in one write; longer ones are cut
    in_flight: int  # writes to one peer that have not ended


class Backend(Protocol):
    """Calls for one peer come from one thread; calls for several peers, from several."""

    name: str
    limits: Limits

    def register(self, region: Region) -> None:
        """StartupError if it cannot be."""

    def describe(self) -> bytes:
        """For `connect` on the other side."""

    def connect(self, native: bytes, regions: Regions) -> Any:
        """The peer, as the engine knows it; equal to another where the limits hold for both together. TransferError if
        it cannot be reached; that may take seconds to see."""

    def disconnect(self, remote: Any) -> None:
        """Nothing is in flight to it, and nothing will be."""

    def post(self, remote: Any, writes: Writes) -> Any:
        """Begins to write, and gives a handle for `check`. TransferError: not a byte has been or will be written."""

    def check(self, handle: Any) -> State:
        """How it stands. A handle that is not pending any more is not shown again."""

    def transport(self) -> str:
        """What bytes travel over, as far as it is known by now."""

    def close(self) -> None:
        """Nobody calls any more. Idempotent."""
