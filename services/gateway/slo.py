"""Which SLO a request gets: headers over body over tier over default."""

import msgspec

from services.gateway.headers import OBJECTIVE, Hints
from services.gateway.openai import Body
from services.gateway.settings import Settings
from shared.contracts.errors import ContractError
from shared.contracts.qos import Slo


def requested_slo(body: Body, hints: Hints, settings: Settings) -> Slo:
    """
    The SLO that a request asks for, not judged yet.

    The body's `slo`, or else the tier's, with the headers' targets, and the body's `deadline`,
    laid over it field by field.
    A request that names none of these gets the default; an empty `slo` object is best effort.

    Raises:
        ContractError: Unknown tier.
    """
    tier = None if hints.tier is None else _tier(hints.tier, settings)
    base = body.slo if body.slo is not None else tier
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


def _tier(name: str, settings: Settings) -> Slo:
    if name not in settings.tiers:
        raise ContractError(
            f"objective {name[:80]!r} is none of {', '.join(settings.tiers)}",
            code="invalid_header",
            param=OBJECTIVE[0],
        )
    return settings.tiers[name]
