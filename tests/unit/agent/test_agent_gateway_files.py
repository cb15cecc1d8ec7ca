"""A model whose files differ from every gateway's is not served on the instance."""

import pytest

from services.agent.gateway_files import MEMORY_S
from services.agent.holding import may_pull
from shared.contracts.base import ModelName
from shared.contracts.control import GatewayModels
from shared.contracts.requests import EnginePayload
from tests.queued import MODEL, OTHER, a_request, lane_of
from tests.unit.agent.parts import DIGEST
from tests.unit.agent.plans import a_plan
from tests.unit.agent.rig import REPLY, AgentRig

pytestmark = pytest.mark.virtual_time

STRANGE = "fedcba9876543210"


def differs(gateway: str = "one") -> GatewayModels:
    return GatewayModels(gateway=gateway, digests={MODEL: STRANGE, OTHER: DIGEST})


def agrees(gateway: str = "one") -> GatewayModels:
    return GatewayModels(gateway=gateway, digests={MODEL: DIGEST, OTHER: DIGEST})


def served(rig: AgentRig) -> set[ModelName]:
    return {each.model for each in rig.reporter.status().models}


async def test_equal_files_change_nothing(rig: AgentRig):
    await rig.deliver(agrees())
    status = rig.reporter.status()
    assert status.differing == ()
    assert status.takes_in
    assert served(rig) == {MODEL, OTHER}


async def test_a_model_of_no_gateway_is_served(rig: AgentRig):
    """A gateway whose registry lacks a model sends no requests for it."""
    await rig.deliver(GatewayModels(gateway="one", digests={ModelName("third"): STRANGE}))
    assert served(rig) == {MODEL, OTHER}


async def test_the_active_model_with_other_files_is_out_of_service(rig: AgentRig):
    await rig.hold(a_request("held"))
    await rig.deliver(differs())

    status = rig.reporter.status()
    assert status.differing == (MODEL,)
    assert not status.takes_in
    assert served(rig) == {OTHER}
    assert not may_pull(rig.state)
    assert (await rig.requeued(lane_of().resume_name)).request_id == "held"


async def test_plans_for_other_models_are_followed(rig: AgentRig):
    await rig.deliver(differs())
    await rig.deliver(a_plan(MODEL, OTHER))
    assert [segment.model for segment in rig.residency._segments()] == [OTHER]


async def test_one_gateway_with_equal_files_suffices(rig: AgentRig):
    await rig.deliver(differs("one"))
    await rig.deliver(agrees("two"))
    assert served(rig) == {MODEL, OTHER}


async def test_a_model_returns_when_the_gateways_files_are_equal(rig: AgentRig):
    await rig.deliver(differs())
    await rig.deliver(agrees())
    assert served(rig) == {MODEL, OTHER}


async def test_a_model_returns_when_the_gateway_has_stopped(rig: AgentRig):
    await rig.deliver(differs())
    rig.clock.advance(MEMORY_S + 1)
    await rig.gateway_files.compare()
    assert rig.state.differing == frozenset()


@pytest.mark.parametrize(("digest", "code"), [(STRANGE, "engine_refused"), (DIGEST, None)])
async def test_requests_of_gateways_with_other_files_are_refused(
    rig: AgentRig, digest: str, code: str | None
):
    """A request that arrives before the gateway's report."""
    payload = EnginePayload(version="0", parts=(b"",), digest=digest)
    request = a_request(payload=payload, reply_to=REPLY)
    if code is None:
        await rig.running(request)
        return
    run = rig.runner.begin(await rig.pulled(request))
    await rig.runner.run(run)
    error = (await rig.failed()).error
    assert error.code == code
    assert "different files or parsers of tiny-llama" in error.message
