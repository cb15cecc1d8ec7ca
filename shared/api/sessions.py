"""Names of sessions, which agents and chats send by themselves."""

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

SESSION_HEADERS = (
    *("x-session-id", "x-session-affinity", "session-id", "session_id"),
    *("x-claude-code-session-id", "conversation_id", "thread-id"),
)
"""Headers with the name of a session; the first one that a request has counts."""
SESSION_ARGUMENTS = ("agentic_context",)
"""Fields of `vllm_xargs` that name sessions; others would control the engine."""
_NAMES = ("session", "session_id", "program_id")
_MAX_CHARS = 128


class SessionFields(Struct, frozen=True, kw_only=True):
    """
    Fields of bodies by which clients name a session. They change no answer; values that name none
    are ignored.
    """

    session_id: Any = None
    vllm_xargs: Any = None

    @property
    def session(self) -> str | None:
        """The name of the session; None if there is none of 1 to 128 characters."""
        return _first((self.session_id, *_values(self.vllm_xargs)))


def session_in(headers: Mapping[str, str]) -> str | None:
    """The name of the session in headers; None if there is none of 1 to 128 characters."""
    return _first(headers.get(name) for name in SESSION_HEADERS)


def _values(arguments: object) -> Iterable[object]:
    contexts = (_field(arguments, name) for name in SESSION_ARGUMENTS)
    return (_field(context, name) for context in contexts for name in _NAMES)


def _field(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, dict) else None


def _first(values: Iterable[object]) -> str | None:
    return next((v for v in values if isinstance(v, str) and 1 <= len(v) <= _MAX_CHARS), None)
