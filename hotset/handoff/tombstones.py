"""What a sender remembers of handoffs that are over, or were never begun: enough not to begin them again."""

from dataclasses import dataclass

from hotset.handoff.messages import Hello, Key

Name = tuple[str, Key]  # of a handoff to its sender: the peer that asked, and the peer's key

NEVER = -1


@dataclass(frozen=True, slots=True)
class Tombstone:
    quiesced: bool  # nothing is written any more, and the sender knows it
    until: float
    hello: Hello | None  # of the incarnation that asked; None: it had not introduced itself


class Tombstones:
    """For `limit` seconds each, and never more than `most` of them: the oldest give way."""

    def __init__(self, limit: float, most: int) -> None:
        self._limit, self._most = limit, most
        self._tombstones: dict[Name, Tombstone] = {}  # in the order in which they lapse
        self._newest: dict[tuple[str, str], int] = {}  # (peer, request): its highest attempt that lies here

    def __len__(self) -> int:
        return len(self._tombstones)

    def get(self, name: Name) -> Tombstone | None:
        return self._tombstones.get(name)

    def newest_attempt(self, peer: str, request_id: str) -> int:
        """The highest that is remembered; lower than any if none is."""
        return self._newest.get((peer, request_id), NEVER)

    def add(self, name: Name, quiesced: bool, hello: Hello | None, now: float) -> None:
        """One of the same name before gives way to it."""
        peer, key = name
        self._tombstones.pop(name, None)
        self._tombstones[name] = Tombstone(quiesced, now + self._limit, hello)
        self._newest[peer, key.request_id] = max(key.attempt, self._newest.get((peer, key.request_id), key.attempt))
        self.lapse(now)

    def forget_others(self, peer: str, hello: Hello) -> None:
        """Another incarnation of the peer may use the same keys for other requests."""
        stale = [name for name, each in self._tombstones.items() if name[0] == peer and each.hello != hello]
        for name in stale:
            self._remove(name)

    def lapse(self, now: float) -> None:
        while self._tombstones:
            oldest = next(iter(self._tombstones))
            if self._tombstones[oldest].until > now and len(self._tombstones) <= self._most:
                return
            self._remove(oldest)

    def audit(self) -> None:
        """Proves that nothing is remembered for longer than its tomb."""
        assert len(self._tombstones) <= self._most, f"{len(self._tombstones)} tombs, {self._most} at the most"
        newest = {(peer, request_id, attempt) for (peer, request_id), attempt in self._newest.items()}
        assert newest <= {(peer, key.request_id, key.attempt) for peer, key in self._tombstones}, (
            "a name without a tomb"
        )

    def _remove(self, name: Name) -> None:
        peer, key = name
        del self._tombstones[name]
        if self._newest.get((peer, key.request_id)) == key.attempt:
            del self._newest[peer, key.request_id]
