"""Data of a request that the engine receives."""

import pytest

from services.agent.runner import engine_slo
from shared.contracts.base import TenantId
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import Attempts, Progress, QueuedRequest
from tests.clocks import NOW
from tests.queued import a_request
from tests.unit.agent.rig import AgentRig


async def test_relegated_work_has_no_priority_in_the_engine(rig: AgentRig):
    _, task = await rig.running(
        a_request("r", slo=Slo(ttft_s=1.0), attempts=Attempts(relegated=True))
    )
    seen = await rig.engine.began("r")
    task.cancel()

    assert seen.slo == Slo()


async def test_engine_request_has_all_inputs_of_scheduling_policies(rig: AgentRig):
    slo = Slo(ttft_s=1.0, tbt_s=0.05)
    request = a_request(
        "r", tenant=TenantId("acme"), application="chat", importance=Importance.LOW, slo=slo
    )
    _, task = await rig.running(request)
    seen = await rig.engine.began("r")
    task.cancel()

    assert (seen.tenant, seen.application) == ("acme", "chat")
    assert (seen.slo, seen.importance) == (slo, Importance.LOW)
    assert seen.arrived_at == request.arrived_at


@pytest.mark.parametrize(
    ("slo", "relegated", "checkpointed"),
    [
        (Slo(ttft_s=1.0), False, False),
        (Slo(ttft_s=1.0), True, True),
        (Slo(ttlt_s=60.0), False, True),
        (Slo(), False, True),
    ],
    ids=["interactive", "relegated", "non-interactive", "best effort"],
)
async def test_request_that_may_be_displaced_is_checkpointed(
    rig: AgentRig, slo: Slo, *, relegated: bool, checkpointed: bool
):
    _, task = await rig.running(a_request("r", slo=slo, attempts=Attempts(relegated=relegated)))
    seen = await rig.engine.began("r")
    task.cancel()

    assert seen.checkpointed is checkpointed


async def test_inputs_reach_the_engine_and_are_not_checkpointed(rig: AgentRig):
    _, task = await rig.running(
        a_request("r", slo=Slo(), prompt=(10, 11, 12), input_lengths=(1, 2))
    )
    seen = await rig.engine.began("r")
    task.cancel()

    assert (seen.prompt, seen.input_lengths) == ((10, 11, 12), (1, 2))
    assert not seen.checkpointed


def resumed(slo: Slo, *, tokens: int) -> QueuedRequest:
    progress = Progress(token_ids=(7,) * tokens, first_token_at=NOW + 0.5)
    return a_request("r", slo=slo, arrived_at=NOW, progress=progress)


def test_resumed_run_has_the_deadline_of_its_next_token():
    """Eq. 2: the 21st token is due after 1 s and 20 gaps of 0.1 s."""
    slo = engine_slo(resumed(Slo(ttft_s=1.0, tbt_s=0.1), tokens=20), NOW + 1.0)

    assert (slo.ttft_s, slo.tbt_s) == (pytest.approx(3.0), 0.1)


def test_run_lost_for_long_is_urgent_and_not_late():
    slo = engine_slo(resumed(Slo(ttft_s=1.0, tbt_s=0.1), tokens=20), NOW + 60.0)

    assert slo.ttft_s == pytest.approx(61.0)


def test_completion_deadline_is_kept_when_resumed():
    slo = Slo(ttlt_s=30.0)

    assert engine_slo(resumed(slo, tokens=20), NOW + 60.0) == slo
