"""Selects a request's SLO in the order of precedence: headers, body, objective, default."""

from typing import Protocol

import msgspec

from services.gateway.headers import OBJECTIVE, Hints
from services.gateway.settings import Settings
from shared.contracts.errors import ContractError
from shared.contracts.qos import Slo

OBJECTIVE_ALIASES = {"async": "non_interactive", "batch": "best_effort"}
"""Aliases of objectives that the settings do not name: llm-d's names of QoS classes."""


class Targeted(Protocol):
    """Fields of a request body from which its SLO is selected."""

    @property
    def stream(self) -> bool | None: ...

    @property
    def slo(self) -> Slo | None: ...

    @property
    def deadline(self) -> float | None: ...


def requested_slo(body: Targeted, hints: Hints, settings: Settings) -> Slo:
    """
    The SLO that a request specifies, before validation.

    The body's `slo` is used; without it, the SLO of the request's objective. Targets in headers and
    the body's `deadline` override single fields. A request without any of these fields and headers
    gets the default; an empty `slo` object means best effort.

    Raises:
        ContractError: The objective is unknown.
    """
    objective = None if hints.objective is None else _objective(hints.objective, settings)
    base = body.slo if body.slo is not None else objective
    deadline_at = body.deadline if hints.deadline_at is None else hints.deadline_at
    targets = {
        name: value
        for name, value in (
            ("ttft_s", hints.ttft_s),
            ("tbt_s", hints.tbt_s),
            ("ttlt_s", hints.ttlt_s),
            ("deadline_at", deadline_at),
        )
        if value is not None
    }
    if base is None and not targets:
        return settings.default_stream_slo if body.stream else settings.default_slo
    return Slo(**(msgspec.structs.asdict(base or Slo()) | targets))


def _objective(name: str, settings: Settings) -> Slo:
    known = name if name in settings.objectives else OBJECTIVE_ALIASES.get(name, name)
    if known not in settings.objectives:
        raise ContractError(
            f"objective {name[:80]!r} is unknown: must be one of {', '.join(settings.objectives)}",
            code="invalid_header",
            param=OBJECTIVE[0],
        )
    return settings.objectives[known]


def sets_slo(body: Targeted, hints: Hints) -> bool:
    """Return whether a request sets a target or names an objective; otherwise it gets a default."""
    of_headers = (hints.ttft_s, hints.tbt_s, hints.ttlt_s, hints.deadline_at, hints.objective)
    return (
        body.slo is not None
        or body.deadline is not None
        or any(each is not None for each in of_headers)
    )
