"""A policy applies to logins over AMQP as to keys over HTTP."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from services.planner.settings import GrouperSettings
from shared.contracts.base import TenantId
from shared.contracts.qos import Clamp, Importance, QosClass, Slo
from shared.contracts.tenants.policies import TenantPolicy
from shared.models.registry import ModelRegistry
from shared.tenants.policies import Policies
from solver.routing.shares import TenantShares
from tests.unit.planner.rig import BODY, GrouperRig, open_grouper

LOGIN = "guest"
"""User of the test's connection."""
LOW_LANE = "lane.2.tiny-llama.low.12.w0"
BATCH = TenantPolicy(classes=(QosClass.BEST_EFFORT,), high_importance=False, max_priority=0)
CLAMPED = {"clamped": [{"field": "ttft_s", "asked": "0.05", "given": "1"}]}


@pytest.fixture
async def untrusting(registry: ModelRegistry) -> AsyncIterator[GrouperRig]:
    """A grouper for which the login is the tenant."""
    async with open_grouper(registry, GrouperSettings(trusted_users=())) as rig:
        yield rig


def with_policy(rig: GrouperRig, policy: TenantPolicy) -> None:
    policies = Policies(tenants={TenantId(LOGIN): policy})
    object.__setattr__(rig.grouper._intake, "policies", policies)


async def test_a_login_is_clamped_and_the_request_says_so(untrusting: GrouperRig):
    with_policy(untrusting, BATCH)
    body = BODY | {"slo": {"ttft_s": 0.05}, "importance": "high", "priority": 9}
    await untrusting.submit(body, user_id=LOGIN)
    request = await untrusting.queued(LOW_LANE)

    assert (request.slo, request.importance, request.priority) == (Slo(), Importance.LOW, 0)
    assert request.clamped == (
        Clamp(field="class", asked="interactive", given="best_effort"),
        Clamp(field="importance", asked="high", given="low"),
        Clamp(field="priority", asked="9", given="0"),
    )


async def test_clamps_of_an_untrusted_publisher_are_ignored(untrusting: GrouperRig):
    await untrusting.submit(BODY | CLAMPED, user_id=LOGIN)

    assert (await untrusting.queued()).clamped == ()


async def test_what_the_gateway_clamped_stays_in_the_request(rig: GrouperRig):
    await rig.submit(BODY | {"tenant": "acme"} | CLAMPED, user_id=LOGIN)
    request = await rig.queued()

    assert msgspec.to_builtins(request.clamped) == tuple(CLAMPED["clamped"])


async def test_a_strict_policy_refuses_over_amqp(untrusting: GrouperRig):
    with_policy(untrusting, TenantPolicy(min_ttft_s=1.0, strict=True))
    await untrusting.submit(BODY | {"slo": {"ttft_s": 0.05}}, user_id=LOGIN)
    error = (await untrusting.failure()).error

    assert (error.status, error.code, error.param) == (403, "target_not_allowed", "slo.ttft_s")


def test_weights_divide_shares():
    """With three times the weight, three times the tokens are the same share."""
    heavy, light = TenantId("heavy"), TenantId("light")
    weights = {heavy: 3.0}
    shares = TenantShares(
        max_share=0.5, free_tokens=0, weight=lambda tenant: weights.get(tenant, 1.0)
    )
    shares.admit("r1", light, 100)

    assert not shares.above_share(heavy, 300)
    assert shares.above_share(heavy, 303)
    shares.finish("r1")
    assert not shares.above_share(heavy, 10_000)
