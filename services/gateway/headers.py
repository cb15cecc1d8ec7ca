"""Parses request headers with llm-d's names, their old aliases and Headway's own names."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

import msgspec

from shared.api.calls import ENDPOINTS
from shared.api.sessions import session_in
from shared.contracts.base import Seconds
from shared.contracts.errors import ContractError
from shared.contracts.ingress import MAX_PRIORITY
from shared.contracts.qos import Importance
from shared.tracing.context import TRACEPARENT, TRACESTATE, TraceContext, trace_of

TTFT = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TBT = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
TTLT = ("x-headway-slo-ttlt-ms",)
DEADLINE = "x-headway-deadline"
OBJECTIVE = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
FAIRNESS_ID = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
PRIORITY = "x-headway-priority"
PRIORITY_LOWER_FIRST = ("x-request-priority", "x-vllm-priority")
IMPORTANCE = "x-headway-importance"
APPLICATION = "x-headway-application"
TIMEOUT = "x-request-timeout-seconds"
REQUEST_ID = "x-request-id"
MESH_REQUEST_ID = "x-headway-request-id"
"""Header of answers with the id of the request in the mesh."""
IDEMPOTENCY_KEY = "idempotency-key"
PREFER = "prefer"
RESPOND_ASYNC = "respond-async"
"""Preference of RFC 7240: answer at once, and let the client collect the result."""

HINTS = frozenset(
    {
        *(*TTFT, *TBT, *TTLT, DEADLINE, *OBJECTIVE, PRIORITY, *PRIORITY_LOWER_FIRST),
        *(IMPORTANCE, APPLICATION, TRACEPARENT, TRACESTATE),
    }
)
"""
Headers that change how a request is served, without those about one connection and its client.
"""
MAX_TARGET_S = 30 * 24 * 3600.0
MAX_LABEL_CHARS = 128
MAX_KEY_CHARS = 255
EARLIEST_DEADLINE_MS = 1e11
"""Smallest valid deadline in ms of Unix time; a smaller value was probably meant in seconds."""


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """
    Parsed headers of a request; durations are in seconds, and higher priorities are served first.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None
    ttlt_s: float | None = None
    deadline_at: float | None = None
    objective: str | None = None
    priority: int | None = None
    importance: Importance | None = None
    application: str | None = None
    session: str | None = None
    fairness_id: str | None = None
    timeout_s: float | None = None
    client_request_id: str | None = None
    trace: TraceContext | None = None
    idempotency_key: str | None = None
    """The client's name of the request: a repeat with the same name gets the same answer."""
    responds_async: bool = False
    """True if the client prefers to collect the answer later."""

    def limit_s(self, longest_s: Seconds) -> Seconds:
        """Time limit of the answer: the client's, at most *longest_s*."""
        return min(self.timeout_s or longest_s, longest_s)

    def needs_store(self, path: str) -> bool:
        """Return whether a request to *path* is to be found under its id again."""
        return self.idempotency_key is not None or self.is_deferred(path)

    def is_deferred(self, path: str) -> bool:
        """
        Return whether the answer to a request to *path* is collected later; where that is not
        possible, the preference is ignored.
        """
        return self.responds_async and path in ENDPOINTS


def parse_hints(headers: Mapping[str, str]) -> Hints:
    """
    Parse *headers*, whose names are in lower case; the first of several aliases is used.

    Raises:
        ContractError: A header has an invalid value; `param` is the name of the header.
    """
    return Hints(
        ttft_s=_milliseconds(headers, TTFT),
        tbt_s=_milliseconds(headers, TBT),
        ttlt_s=_milliseconds(headers, TTLT),
        deadline_at=_deadline_at(headers),
        objective=_first(headers, OBJECTIVE)[1],
        priority=_priority(headers),
        importance=_importance(headers),
        application=_label(headers, APPLICATION),
        session=session_in(headers),
        fairness_id=next((v for n in FAIRNESS_ID if (v := _label(headers, n))), None),
        timeout_s=_number(TIMEOUT, headers.get(TIMEOUT), low=0.0, high=MAX_TARGET_S),
        client_request_id=_label(headers, REQUEST_ID),
        trace=trace_of(headers),
        idempotency_key=_idempotency_key(headers),
        responds_async=_responds_async(headers),
    )


def headers_in(scope: Mapping[str, Any]) -> dict[str, str]:
    """The headers of an ASGI request, names in lower case."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def id_headers(request_id: str, client_id: str | None) -> dict[str, str]:
    """Headers of an answer with its id in the mesh, and with the client's if it sent one."""
    own = {MESH_REQUEST_ID: request_id}
    return own | {REQUEST_ID: client_id} if client_id else own


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str | None]:
    return next(((name, headers[name]) for name in names if name in headers), (names[0], None))


def _milliseconds(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    name, text = _first(headers, names)
    value = _number(name, text, low=0.0, high=MAX_TARGET_S * 1000)
    return None if value is None else value / 1000


def _deadline_at(headers: Mapping[str, str]) -> float | None:
    value = _number(DEADLINE, headers.get(DEADLINE), low=EARLIEST_DEADLINE_MS, high=1e15)
    return None if value is None else value / 1000


def _number(name: str, text: str | None, *, low: float, high: float) -> float | None:
    """Parse the number in a header; the number must be above *low* and at most *high*."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or not low < value <= high:
        raise _bad(name, f"must be a number above {low:g} and at most {high:g}")
    return value


def _priority(headers: Mapping[str, str]) -> int | None:
    """
    Parse the priority of a request; requests with higher values are served first.

    In the headers of production-stack and vLLM, lower values are served first. Headway's header
    takes precedence.
    """
    for name, sign in ((PRIORITY, 1), *((name, -1) for name in PRIORITY_LOWER_FIRST)):
        if name in headers:
            return sign * _integer(headers, name, most=MAX_PRIORITY)
    return None


def _integer(headers: Mapping[str, str], name: str, *, most: int) -> int:
    """Parse the integer in a header, which must be from -*most* to *most*."""
    try:
        value = int(headers[name])
    except ValueError:
        value = most + 1
    if abs(value) > most:
        raise _bad(name, f"must be an integer from -{most} to {most}")
    return value


def _importance(headers: Mapping[str, str]) -> Importance | None:
    if IMPORTANCE not in headers:
        return None
    try:
        return Importance(headers[IMPORTANCE].lower())
    except ValueError:
        raise _bad(IMPORTANCE, "must be low or high") from None


def _label(headers: Mapping[str, str], name: str) -> str | None:
    value = headers.get(name)
    if value is not None and not 1 <= len(value) <= MAX_LABEL_CHARS:
        raise _bad(name, f"must have 1 to {MAX_LABEL_CHARS} characters")
    return value


def _idempotency_key(headers: Mapping[str, str]) -> str | None:
    key = headers.get(IDEMPOTENCY_KEY)
    if key is not None and not (1 <= len(key) <= MAX_KEY_CHARS and key.isprintable()):
        raise _bad(IDEMPOTENCY_KEY, f"must have 1 to {MAX_KEY_CHARS} printable characters")
    return key


def _responds_async(headers: Mapping[str, str]) -> bool:
    """Whether a preference is `respond-async`; unknown preferences are ignored (RFC 7240)."""
    preferences = headers.get(PREFER, "").split(",")
    names = (each.partition(";")[0].partition("=")[0] for each in preferences)
    return any(name.strip().lower() == RESPOND_ASYNC for name in names)


def _bad(name: str, takes: str) -> ContractError:
    return ContractError(f"header {name} {takes}", code="invalid_header", param=name)
