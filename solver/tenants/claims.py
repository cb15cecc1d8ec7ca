"""What a request is granted of what it claims: class, targets, importance and priority."""

from dataclasses import dataclass

from shared.contracts.base import TenantId, UnixTime
from shared.contracts.errors import ContractError
from shared.contracts.qos import Clamp, Importance, QosClass, Slo
from shared.contracts.tenants.policies import TenantPolicy

LOWERED_TTLT_S = 300.0
"""
Target of an interactive request that is granted the class `non_interactive` and has no target for
the whole answer.
"""
_BEST_FIRST = (QosClass.INTERACTIVE, QosClass.NON_INTERACTIVE, QosClass.BEST_EFFORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a request asks for."""

    slo: Slo
    importance: Importance
    priority: int
    arrived_at: UnixTime
    sets_slo: bool = True
    """False if the SLO is a default of the mesh, which may be lowered without a word."""
    sets_importance: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """What a request gets."""

    slo: Slo
    importance: Importance
    priority: int
    clamps: tuple[Clamp, ...] = ()
    """What the request asked for and does not get."""


def granted(claim: Claim, policy: TenantPolicy) -> Granted | None:
    """
    What *policy* grants of *claim*; None if it grants no class that is at most as good as the
    claimed one. Granting what was granted before changes nothing.
    """
    qos_class = best_class(claim.slo.qos_class, policy)
    if qos_class is None:
        return None
    slo, of_slo = _granted_slo(claim, qos_class, policy)
    clamps = of_slo if claim.sets_slo else []
    importance = claim.importance
    if importance is Importance.HIGH and not policy.high_importance:
        importance = Importance.LOW
        if claim.sets_importance:
            clamps.append(Clamp(field="importance", asked="high", given="low"))
    priority = max(policy.min_priority, min(policy.max_priority, claim.priority))
    if claim.priority not in (priority, 0):
        clamps.append(Clamp(field="priority", asked=str(claim.priority), given=str(priority)))
    return Granted(slo=slo, importance=importance, priority=priority, clamps=tuple(clamps))


def best_class(asked: QosClass, policy: TenantPolicy) -> QosClass | None:
    """The best class that *policy* grants and that is not better than *asked*."""
    if policy.classes is None:
        return asked
    candidates = _BEST_FIRST[_BEST_FIRST.index(asked) :]
    return next((each for each in candidates if each in policy.classes), None)


def _granted_slo(
    claim: Claim, qos_class: QosClass, policy: TenantPolicy
) -> tuple[Slo, list[Clamp]]:
    clamps: list[Clamp] = []
    slo = claim.slo
    if qos_class is not slo.qos_class:
        clamps.append(Clamp(field="class", asked=slo.qos_class.value, given=qos_class.value))
        slo = _lowered(slo, qos_class)

    def at_least(field: str, value: float | None, least: float | None) -> float | None:
        if value is None or least is None or value >= least:
            return value
        clamps.append(Clamp(field=field, asked=f"{value:g}", given=f"{least:g}"))
        return least

    ttft_s = at_least("ttft_s", slo.ttft_s, policy.min_ttft_s)
    tbt_s = at_least("tbt_s", slo.tbt_s, policy.min_tbt_s)
    ttlt_s = at_least("ttlt_s", slo.ttlt_s, policy.min_ttlt_s)
    if ttlt_s is not None and ttft_s is not None and ttlt_s < ttft_s:
        ttlt_s = at_least("ttlt_s", ttlt_s, ttft_s)
    deadline_at = slo.deadline_at
    if deadline_at is not None and policy.min_ttlt_s is not None:
        soonest = claim.arrived_at + policy.min_ttlt_s
        if deadline_at < soonest:
            asked = f"{deadline_at:.3f}"
            clamps.append(Clamp(field="deadline_at", asked=asked, given=f"{soonest:.3f}"))
            deadline_at = soonest
    return Slo(ttft_s=ttft_s, tbt_s=tbt_s, ttlt_s=ttlt_s, deadline_at=deadline_at), clamps


def _lowered(slo: Slo, qos_class: QosClass) -> Slo:
    """*slo* without the targets that a lower class does not have."""
    if qos_class is QosClass.BEST_EFFORT:
        return Slo()
    if slo.ttlt_s is None and slo.deadline_at is None:
        return Slo(ttlt_s=max(LOWERED_TTLT_S, slo.ttft_s or 0.0))
    return Slo(ttlt_s=slo.ttlt_s, deadline_at=slo.deadline_at)


def grant(claim: Claim, policy: TenantPolicy, tenant: TenantId) -> Granted:
    """
    What *policy* grants of *claim*.

    Raises:
        ContractError: The policy grants no class for the claim, or is strict and grants less than
            what was claimed (status 403, code `target_not_allowed`).
    """
    result = granted(claim, policy)
    if result is None:
        allowed = ", ".join(each.value for each in policy.classes or ())
        raise ContractError(
            f"tenant {tenant!r} may not use the class {claim.slo.qos_class.value}, only {allowed}",
            code="target_not_allowed",
            param="slo",
            status=403,
        )
    if policy.strict and result.clamps:
        clamp = result.clamps[0]
        raise ContractError(
            f"{clamp.field} is {clamp.asked}; the policy of tenant {tenant!r} grants {clamp.given}",
            code="target_not_allowed",
            param=_param(clamp.field),
            status=403,
        )
    return result


def _param(field: str) -> str:
    if field in ("importance", "priority"):
        return field
    return "slo" if field == "class" else f"slo.{field}"
