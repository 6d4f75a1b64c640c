"""Server-sent events: splits the bytes of a stream into the data of its events."""


class EventParser:
    """Collects bytes of a stream as they arrive. An event may be divided between any two bytes."""

    def __init__(self) -> None:
        self._rest = b""  # the beginning of a line whose end has not arrived
        self._data: list[bytes] = []  # the data lines of an event whose end has not arrived

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the data of the events that end in these bytes. Comments and other fields are dropped."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
