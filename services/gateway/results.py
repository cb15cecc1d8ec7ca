"""The mesh's results in the responses of engines."""

import re
from typing import Any

import msgspec

from shared.contracts.requests import RequestCompleted

SIMULATED_ENGINE = "simulated"
"""Name of the engine whose answers are random text."""
SIMULATED = f"headway-{SIMULATED_ENGINE}"
"""OpenAI's `system_fingerprint` of its answers."""
_FINGERPRINT = re.compile(rb'"system_fingerprint":(?:null|"[^"]*")')
"""The field as vLLM writes it; in a text, its quotes would be escaped."""


def headway_of(final: RequestCompleted) -> dict[str, Any]:
    """
    Fields that the mesh adds to an answer: serving instance and SLO results.

    TTFT and TTLT are in seconds from the request's arrival at the mesh.
    """
    timings, verdict, attempts = final.timings, final.verdict, final.attempts
    return {
        "request_id": final.request_id,
        "instance": final.instance_id,
        "engine": final.engine,
        "slo_attained": verdict.attained,
        "ttft_s": round(timings.first_token_at - timings.arrived_at, 6),
        "ttlt_s": round(timings.finished_at - timings.arrived_at, 6),
        "max_tbt_s": None if verdict.max_tbt_s is None else round(verdict.max_tbt_s, 6),
        "late_tokens": verdict.late_tokens,
        "evictions": attempts.evictions,
        "hops": attempts.hop,
        "relegated": attempts.relegated,
    } | {
        name: msgspec.to_builtins(value)
        for name, value in (("history", final.history), ("clamped", final.clamped))
        if value
    }


def with_headway(body: bytes, final: RequestCompleted) -> bytes:
    """
    A JSON object with the mesh's results. If a simulated engine has answered, the fingerprint says
    so.
    """
    if final.engine == SIMULATED_ENGINE:
        body = _FINGERPRINT.sub(f'"system_fingerprint":"{SIMULATED}"'.encode(), body, count=1)
    return body[:-1] + b',"headway":' + msgspec.json.encode(headway_of(final)) + b"}"
