"""Preview of the operations that a virtual queue will require, without request names."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import groupby

from shared.contracts.base import RequestId
from shared.contracts.plans import PlannedLso
from solver.planning.lso.actions import ActionRule, lso_actions
from solver.planning.lso.operations import Lso
from solver.planning.lso.situation import HeadChange, Situation

_OF_ALL = {field.name for field in fields(Lso)}
_REQUESTS = ("request_id", "request_ids")
_SWAPPED_OUT = "swapped-out requests"
_Lanes = Mapping[RequestId, str]


def preview_operations(
    change: HeadChange, situation: Situation, rules: Sequence[ActionRule] | None = None
) -> tuple[PlannedLso, ...]:
    """
    The operations that `solver.planning.lso.actions.lso_actions` requires, in order.

    Operations of one kind, for one reason, on requests of one lane are merged into one operation.
    For a kind that this module does not handle, all fields of the operation are listed.

    Args:
        situation: Situation of the instance, or a typical situation with the same totals.
        rules: As for `lso_actions`.
    """
    lanes = {work.request_id: work.lane for work in situation.running}
    previewed = [
        (_planned_lso(lso, lanes), lso.reason.rule) for lso in lso_actions(change, situation, rules)
    ]

    def alike(each: tuple[PlannedLso, object]) -> tuple[str, str, object, bool]:
        lso, rule = each
        return lso.lso, lso.subject, rule, lso.requests > 0

    return tuple(
        merged
        for _, members in groupby(previewed, key=alike)
        for merged in _merged([lso for lso, _ in members])
    )


def _planned_lso(lso: Lso, lanes: _Lanes) -> PlannedLso:
    counted = _requests(lso, lanes)
    values = {field.name: getattr(lso, field.name) for field in fields(lso)}
    others = [
        str(value) if name == "model" else f"{name} {_short(value)}"
        for name, value in values.items()
        if value and name not in _OF_ALL and name not in _REQUESTS
    ]
    return PlannedLso(
        lso=lso.kind,
        subject=", ".join([*sorted(counted), *others]),
        requests=counted.total(),
        reason=lso.reason.text,
        predicted_s=lso.predicted_s,
        figures={
            name: float(value) for name, value in lso.reason.facts if not isinstance(value, str)
        },
    )


def _requests(lso: Lso, lanes: _Lanes) -> Counter[str]:
    """Number of requests to which the operation applies, by lane."""
    one: RequestId | None = getattr(lso, "request_id", None)
    several: Iterable[RequestId] = getattr(lso, "request_ids", () if one is None else (one,))
    return Counter(lanes.get(request_id, _SWAPPED_OUT) for request_id in several)


def _merged(alike: Sequence[PlannedLso]) -> Sequence[PlannedLso]:
    first = alike[0]
    if not first.requests or len(alike) == 1:
        return alike
    known = [each.predicted_s for each in alike if each.predicted_s is not None]
    return (
        PlannedLso(
            lso=first.lso,
            subject=first.subject,
            requests=sum(each.requests for each in alike),
            reason=first.reason,
            predicted_s=sum(known) if len(known) == len(alike) else None,
            figures=first.figures,
        ),
    )


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
