"""Server-sent events."""


class EventSplitter:
    """Divides the bytes of a stream into events, which remain as the server sent them."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> list[bytes]:
        """Append *data* to the stream; return the events that are complete now."""
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        return [event for event in events if event.strip()]

    @property
    def rest(self) -> bytes:
        """The begin of an event that is not complete yet."""
        return self._rest


def data_of(event: bytes) -> bytes:
    """Data of an event; empty if it has none, e.g. because it keeps the connection alive."""
    lines = (line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(lines)
