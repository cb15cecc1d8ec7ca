"""Targets, class, importance and priority are granted by the policy of a tenant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import TenantId
from shared.contracts.errors import ContractError
from shared.contracts.qos import Clamp, Importance, QosClass, Slo
from shared.contracts.tenants.policies import TenantPolicy
from solver.tenants.claims import LOWERED_TTLT_S, Claim, grant, granted

TENANT = TenantId("acme")
BATCH_ONLY = TenantPolicy(classes=(QosClass.NON_INTERACTIVE, QosClass.BEST_EFFORT))


def claim(slo: Slo, importance: Importance = Importance.LOW, priority: int = 0) -> Claim:
    return Claim(slo=slo, importance=importance, priority=priority, arrived_at=1000.0)


def test_without_a_policy_every_claim_is_granted() -> None:
    """A policy without fields changes nothing."""
    asked = claim(Slo(ttft_s=0.05, tbt_s=0.01), Importance.HIGH, 7)

    result = grant(asked, TenantPolicy(), TENANT)

    assert (asked.slo, Importance.HIGH, 7) == (result.slo, result.importance, result.priority)
    assert result.clamps == ()


def test_targets_are_clamped_to_the_tightest_allowed() -> None:
    """Each target that is too tight becomes the policy's; the others stay."""
    policy = TenantPolicy(min_ttft_s=1.0, min_tbt_s=0.1)

    result = grant(claim(Slo(ttft_s=0.05, tbt_s=0.2)), policy, TENANT)

    assert Slo(ttft_s=1.0, tbt_s=0.2) == result.slo
    assert (Clamp(field="ttft_s", asked="0.05", given="1"),) == result.clamps
    assert str(result.clamps[0]) == "ttft_s=0.05->1"


def test_a_target_of_the_whole_answer_is_not_below_that_of_the_first_token() -> None:
    """Clamping the first token's target does not make targets that contradict each other."""
    result = grant(claim(Slo(ttft_s=0.05, ttlt_s=0.5)), TenantPolicy(min_ttft_s=1.0), TENANT)

    assert Slo(ttft_s=1.0, ttlt_s=1.0) == result.slo


def test_a_deadline_is_not_sooner_than_the_tightest_target_of_the_answer() -> None:
    """An absolute deadline counts from the arrival."""
    result = grant(claim(Slo(deadline_at=1001.0)), TenantPolicy(min_ttlt_s=30.0), TENANT)

    assert Slo(deadline_at=1030.0) == result.slo


def test_a_class_that_is_not_granted_becomes_the_best_one_that_is() -> None:
    """An interactive request of a batch tenant gets a target for its whole answer."""
    result = grant(claim(Slo(ttft_s=0.05, tbt_s=0.01)), BATCH_ONLY, TENANT)

    assert Slo(ttlt_s=LOWERED_TTLT_S) == result.slo
    assert (Clamp(field="class", asked="interactive", given="non_interactive"),) == result.clamps


def test_a_class_is_never_raised() -> None:
    """Best effort stays best effort; if it is not granted, the request is refused."""
    policy = TenantPolicy(classes=(QosClass.INTERACTIVE,))

    with pytest.raises(ContractError, match="best_effort") as refused:
        grant(claim(Slo()), policy, TENANT)

    assert (refused.value.status, refused.value.code) == (403, "target_not_allowed")


def test_importance_and_priority_are_granted_not_claimed() -> None:
    """Without the right, `high` becomes `low`, and a priority is moved into the range."""
    policy = TenantPolicy(high_importance=False, min_priority=-5, max_priority=0)

    result = grant(claim(Slo(), Importance.HIGH, 100), policy, TENANT)

    assert (result.importance, result.priority) == (Importance.LOW, 0)
    assert [each.field for each in result.clamps] == ["importance", "priority"]


def test_a_default_of_the_mesh_is_lowered_without_a_word() -> None:
    """A request that sets no target and no importance has claimed nothing, also if strict."""
    policy = TenantPolicy(
        classes=BATCH_ONLY.classes, high_importance=False, max_priority=-1, strict=True
    )
    asked = Claim(
        slo=Slo(ttft_s=2.0),
        importance=Importance.HIGH,
        priority=0,
        arrived_at=0.0,
        sets_slo=False,
        sets_importance=False,
    )

    result = grant(asked, policy, TENANT)

    assert QosClass.NON_INTERACTIVE is result.slo.qos_class
    assert (result.importance, result.priority, result.clamps) == (Importance.LOW, -1, ())


def test_a_strict_policy_refuses_and_names_field_and_limit() -> None:
    """With `strict`, a claim beyond the policy gets 403."""
    policy = TenantPolicy(min_ttft_s=1.0, strict=True)

    with pytest.raises(ContractError, match=r"ttft_s is 0\.05.*grants 1") as refused:
        grant(claim(Slo(ttft_s=0.05)), policy, TENANT)

    assert (refused.value.status, refused.value.param) == (403, "slo.ttft_s")


targets = st.one_of(st.none(), st.floats(0.01, 1000.0))
policies = st.builds(
    TenantPolicy,
    classes=st.one_of(st.none(), st.lists(st.sampled_from(QosClass), min_size=1).map(tuple)),
    min_ttft_s=targets,
    min_tbt_s=targets,
    min_ttlt_s=targets,
    high_importance=st.booleans(),
    min_priority=st.integers(-1000, 0),
    max_priority=st.integers(0, 1000),
)
claims = st.builds(
    Claim,
    slo=st.builds(Slo, ttft_s=targets, tbt_s=targets, ttlt_s=targets),
    importance=st.sampled_from(Importance),
    priority=st.integers(-1000, 1000),
    arrived_at=st.just(1000.0),
)


@given(claims, policies)
def test_what_was_granted_is_granted_again(asked: Claim, policy: TenantPolicy) -> None:
    """Gateway and grouper both apply the policy: the second time changes nothing."""
    first = granted(asked, policy)
    if first is None:
        return
    again = granted(
        Claim(
            slo=first.slo,
            importance=first.importance,
            priority=first.priority,
            arrived_at=asked.arrived_at,
        ),
        policy,
    )

    assert again is not None
    assert (first.slo, first.importance, first.priority) == (
        again.slo,
        again.importance,
        again.priority,
    )
    assert again.clamps == ()


@given(claims, policies)
def test_nothing_beyond_the_policy_is_granted(asked: Claim, policy: TenantPolicy) -> None:
    """The class is one of the policy's, and no target is tighter than allowed."""
    result = granted(asked, policy)
    if result is None:
        return

    assert policy.classes is None or result.slo.qos_class in policy.classes
    for name in ("ttft_s", "tbt_s", "ttlt_s"):
        value, least = getattr(result.slo, name), getattr(policy, f"min_{name}")
        assert value is None or least is None or value >= least
    assert policy.min_priority <= result.priority <= policy.max_priority
