"""Divides the events of a call into the steps of its answers."""

import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

import msgspec

from shared.api.events import data_of
from shared.contracts.requests import Tokens

_FIRST_INDEX = re.compile(rb'"choices": ?\[\{(?:[^{}\[\]"]|"[^"]*")*?"index": ?(\d+)')
"""Index of the first choice of an event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Tokens that the application has read at once, and the events that it has written then."""

    index: int
    """Index of the answer."""
    token_ids: Tokens
    events: bytes
    finish: str
    """Reason for which the answer has ended; empty before."""


class Output(Protocol):
    """One of the outputs of a `vllm.RequestOutput`, as far as it is used here."""

    index: int
    token_ids: Iterable[int]
    finish_reason: str | None


@dataclass(slots=True)
class _Answer:
    token_ids: list[int] = field(default_factory=list)
    """Tokens that the application has read, and whose events are not complete."""
    events: list[bytes] = field(default_factory=list)
    finish: str = ""
    has_ended: bool = False


class CallEvents:
    """
    Divides the events that the application writes for a call into steps. A step ends when the
    application reads the next output of the same request. All methods run in the application's
    thread.

    The events of the last step of a call are no part of that step: `rest` has them with those that
    follow, because the mesh's results are sent with them.

    Args:
        on_step: Called with each step.
    """

    def __init__(self, on_step: Callable[[Step], object]) -> None:
        self._on_step = on_step
        self._answers: dict[int, _Answer] = {}
        self._indices: dict[str, dict[int, int]] = {}
        """Request of the application -> index of its outputs -> index of the answer."""
        self._early: list[bytes] = []
        """Events before the first request, which belong to the first token of its answer."""
        self._late: list[bytes] = []
        """Events that belong to no answer."""
        self.refusal: tuple[int, bytes] | None = None
        """Status and body of the error that the application has written instead of an answer."""
        self.rest = b""
        """Events after those of all steps, once the response has ended."""

    def begins(self, request_id: str, index: int) -> None:
        """The application has made the request *request_id* for the answer *index*."""
        self._answers[index] = _Answer(events=self._early if index == 0 else [])
        number, separator, parent = request_id.partition("_")
        if separator and number.isdigit():  # one of several answers to one prompt
            self._indices.setdefault(parent, {})[int(number)] = index
        self._indices.setdefault(request_id, {})[0] = index

    def reads(self, request_id: str) -> None:
        """The application asks for the next output: it has written the events of those before."""
        for index in self._indices.get(request_id, {}).values():
            self._complete(index)

    def has_read(self, request_id: str, outputs: Iterable[Output]) -> None:
        """The application has got outputs of a request."""
        for output in outputs:
            answer = self._answers[self._indices[request_id][output.index]]
            answer.token_ids += output.token_ids
            answer.finish = output.finish_reason or ""

    def wrote(self, events: bytes) -> None:
        """The application has written events."""
        if b'"error"' in events[:64] and (refusal := _refusal(events)) is not None:
            self.refusal = refusal
        elif not self._answers:
            self._early.append(events)
        elif (index := self._index_of(events)) is None:
            self._late.append(events)
        else:
            self._answers[index].events.append(events)

    def end(self) -> None:
        """The response has ended."""
        rest: list[bytes] = []
        for index, answer in self._answers.items():
            rest += answer.events
            answer.events = []
            self._complete(index)
        self.rest = b"".join(rest + self._late)

    def _index_of(self, events: bytes) -> int | None:
        """Answer to which events belong; None if they belong to all."""
        if len(self._answers) == 1:
            return 0
        found = _FIRST_INDEX.search(events)
        return int(found[1]) if found else None

    def _complete(self, index: int) -> None:
        answer = self._answers[index]
        if answer.has_ended or not (answer.token_ids or answer.finish):
            return  # events without tokens belong to the next step
        step = Step(
            index=index,
            token_ids=tuple(answer.token_ids),
            events=b"".join(answer.events),
            finish=answer.finish,
        )
        answer.token_ids, answer.events = [], []
        answer.has_ended = bool(answer.finish)
        self._on_step(step)


events_of_call: ContextVar[CallEvents | None] = ContextVar("events of the call", default=None)
"""Events of the call in whose context the application runs; None if it does not stream."""


class _Error(msgspec.Struct, frozen=True):
    code: Any = None


class _ErrorEvent(msgspec.Struct, frozen=True):
    error: _Error


def _refusal(event: bytes) -> tuple[int, bytes] | None:
    """Status and body of an event with an error; None if it is another event."""
    data = data_of(event)
    try:
        code = msgspec.json.decode(data, type=_ErrorEvent).error.code
    except msgspec.DecodeError:
        return None
    is_status = isinstance(code, int) and code >= HTTPStatus.BAD_REQUEST
    return (code if is_status else HTTPStatus.INTERNAL_SERVER_ERROR), data
