"""What a subscriber knows of one prefix cache: the hashes of its pages. KV events call a page a block."""

from collections.abc import Iterable, Sequence

MAX_KNOWN_BLOCKS = 1 << 22  # of one publisher; a host store of 4 million pages of 1 MiB has 4 TiB


class KnownBlocks:
    """The blocks of one publisher, by medium. A block can be in several media at the same time."""

    def __init__(self, limit: int = MAX_KNOWN_BLOCKS) -> None:
        """Further blocks are ignored while `limit` are known, so a publisher cannot exhaust the memory."""
        self._limit = limit
        self._media: dict[str | None, set[int]] = {}

    def __len__(self) -> int:
        return len(self.hashes())

    def __contains__(self, block_hash: int) -> bool:
        # A router asks this hundreds of times for a prompt, and any() takes twice as long.
        for known in self._media.values():  # noqa: SIM110
            if block_hash in known:
                return True
        return False

    def hashes(self) -> set[int]:
        """Returns the hashes of all known blocks."""
        return set().union(*self._media.values())

    def store(self, hashes: Sequence[int], medium: str | None) -> None:
        room = self._limit - sum(map(len, self._media.values()))
        if accepted := hashes[: max(0, room)]:
            self._media.setdefault(medium, set()).update(accepted)

    def remove(self, hashes: Iterable[int], medium: str | None) -> None:
        if (known := self._media.get(medium)) is not None:
            known.difference_update(hashes)
            if not known:
                del self._media[medium]

    def clear(self) -> None:
        self._media.clear()
