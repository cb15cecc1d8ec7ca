"""Comments and errors in event streams, by API."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from services.gateway.errors import anthropic_error_body, error_body
from shared.contracts.requests import ErrorInfo


@dataclass(frozen=True, slots=True)
class ApiForm:
    """Form of errors, and of what keeps a stream alive, in one API."""

    comment: bytes
    """What clients receive and ignore while a stream waits."""
    error_body: Callable[[ErrorInfo], bytes]
    """Body of a response with an error."""
    error_name: bytes
    """Line with the name of an error event; empty if errors have none."""

    def event(self, info: ErrorInfo, request_id: str | None = None) -> bytes:
        """Event that ends a stream with an error."""
        return self.error_event(self.error_body(info), request_id)

    def error_event(self, body: bytes, request_id: str | None) -> bytes:
        """Event with the error in *body*, which is a response in JSON, and the request's id."""
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError:
            return self._named(msgspec.json.encode({"error": body.decode("latin-1")}))
        if request_id is not None:
            fields["request_id"] = msgspec.Raw(msgspec.json.encode(request_id))
        return self._named(msgspec.json.encode(fields))

    def _named(self, data: bytes) -> bytes:
        return self.error_name + b"data: " + data + b"\n\n"


OPENAI = ApiForm(b": keep-alive\n\n", error_body, b"")
ANTHROPIC = ApiForm(
    b'event: ping\ndata: {"type": "ping"}\n\n', anthropic_error_body, b"event: error\n"
)


def form_of(path: str) -> ApiForm:
    """The form of the API to which *path* belongs."""
    return ANTHROPIC if path.startswith("/v1/messages") else OPENAI
