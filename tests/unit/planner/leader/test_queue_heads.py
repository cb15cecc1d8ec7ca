"""Operations of instances that the leader predicts to explain its plan."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from services.planner.leader.leader import Leader
from shared.broker import topology
from shared.contracts.base import Decoder, ModelName
from shared.contracts.estimates import LatencyCoefficients, Profile
from shared.contracts.lanes import inbox_name
from shared.contracts.plans import PlanExplained, PlanRequested, QueueHead
from shared.contracts.situations import LsoFacts, RunningFacts
from shared.contracts.telemetry import ModelState, Residency
from solver.planning.lso.actions import RULES
from solver.planning.lso.operations import Lso
from solver.planning.lso.situation import HeadChange, Situation
from tests.queued import BEST_EFFORT, CHAT, MODEL, OTHER, a_request, lane_of
from tests.unit.planner.leader_rig import LeaderRig, settled, status
from tests.unit.planner.rig import listen

LATENCY = LatencyCoefficients(constant_s=0.0, linear_s=1e-3)
DUMP = lane_of(BEST_EFFORT).queue_name
BUSY = RunningFacts(
    lane=DUMP,
    requests=4,
    context_tokens=400,
    held_tokens=400,
    gives_way=True,
    remaining_s=20.0,
)
FULL = LsoFacts(
    running=(BUSY,),
    kv_bytes_per_token=1000,
    transfer_bytes_per_s=1e9,
    drain_limit_s=5.0,
    pull_room=2,
)


def profile_of(model: ModelName) -> Profile:
    return Profile(
        model=model, engine="simulated", device="simulated", version=1, at=0.0, latency=LATENCY
    )


async def leading(cluster: LeaderRig, **fields: Any) -> Leader:
    """A leader with a profile of the active model and one matching instance."""
    leader = await settled(cluster)
    await cluster.hear(status(**fields))
    leader.state.on_profile(profile_of(MODEL))
    return leader


async def reported(cluster: LeaderRig) -> PlanExplained:
    (leader,) = cluster.leaders
    await leader.plan()
    queue = await listen(cluster.far, topology.REPLIES, "answer")
    await leader.explain(PlanRequested(reply_to="answer"))
    return Decoder(PlanExplained)((await cluster.far.take(queue)).body)


async def explained(cluster: LeaderRig) -> tuple[QueueHead, ...]:
    return (await reported(cluster)).heads


async def test_instances_with_an_inbox_are_listed(cluster: LeaderRig):
    """The list includes draining instances, and lost instances until their inbox is deleted."""
    await settled(cluster)
    await topology.declare_work_queue(cluster.far, inbox_name("i1"))
    cluster.clock.advance(4.0)
    await cluster.hear(status("i2"))
    await cluster.hear(status("i3", draining=True))
    cluster.clock.advance(1.0)
    answer = await reported(cluster)

    assert [head.instance_id for head in answer.heads] == ["i2"]
    assert answer.instances == ("i1", "i2", "i3")


async def test_swap_preview_has_the_cheaper_of_draining_and_evicting(cluster: LeaderRig):
    await leading(cluster, lso=FULL, running=4)
    await cluster.wait_in_lane(a_request(base=OTHER))
    (head,) = await explained(cluster)
    evict, activate, pull = head.lsos

    assert (head.active, head.model, head.swaps_model) == (MODEL, OTHER, True)
    assert (evict.lso, evict.requests, evict.subject) == ("evict", 4, DUMP)
    assert evict.predicted_s == pytest.approx(0.4)
    assert (activate.lso, activate.subject) == ("activate", OTHER)
    assert activate.predicted_s == pytest.approx(1.0)
    assert activate.figures["drain_all_s"] == 5.0
    assert (pull.lso, pull.subject) == ("pull", "count 2")


@pytest.mark.parametrize(
    ("checkpoints", "kind"), [(False, "evict"), (True, "swap_out")], ids=["evict", "swap out"]
)
async def test_preview_makes_room_for_the_head_in_the_cheaper_way(
    cluster: LeaderRig, *, checkpoints: bool, kind: str
):
    facts = LsoFacts(
        running=FULL.running,
        kv_bytes_per_token=1000,
        transfer_bytes_per_s=1e9,
        host_checkpoints=checkpoints,
        host_kv_free_bytes=1 << 30,
        free_tokens=1000,
        pull_room=1,
    )
    await leading(cluster, lso=facts, running=4)
    await cluster.wait_in_lane(a_request(slo=CHAT))
    (head,) = await explained(cluster)
    room, _ = head.lsos

    assert not head.swaps_model
    assert (room.lso, room.requests, room.subject) == (kind, 1, DUMP)
    assert room.figures["recompute_s"] == pytest.approx(0.1)
    assert room.figures["transfer_s"] == pytest.approx(1e-4)


async def test_best_effort_head_displaces_no_run(cluster: LeaderRig):
    await leading(cluster, lso=FULL, running=4)
    await cluster.wait_in_lane(a_request(slo=BEST_EFFORT))
    (head,) = await explained(cluster)

    assert [lso.lso for lso in head.lsos] == ["pull"]


async def test_models_behind_the_head_are_warmed(cluster: LeaderRig):
    models = (
        ModelState(model=MODEL, residency=Residency.ACTIVE),
        ModelState(model=OTHER, residency=Residency.COLD, activate_s=1.0, warm_bytes=10),
    )
    await leading(cluster, lso=LsoFacts(warm_budget_bytes=20), models=models)
    await cluster.wait_in_lane(a_request(slo=CHAT), a_request(base=OTHER, slo=BEST_EFFORT))
    (head,) = await explained(cluster)

    assert [(lso.lso, lso.subject) for lso in head.lsos] == [("warm", OTHER)]


async def test_instance_without_work_keeps_its_model(cluster: LeaderRig):
    await leading(cluster, lso=FULL, running=4)

    assert await explained(cluster) == (QueueHead(instance_id="i1", active=MODEL),)


async def test_preview_without_reported_facts_is_partial(cluster: LeaderRig):
    await leading(cluster, running=2)
    await cluster.wait_in_lane(a_request(base=OTHER))
    (head,) = await explained(cluster)

    assert [(lso.lso, lso.predicted_s) for lso in head.lsos] == [("activate", None)]


async def test_new_row_of_the_operation_table_is_previewed(
    cluster: LeaderRig, monkeypatch: pytest.MonkeyPatch
):
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Dance(Lso):
        kind: ClassVar[str] = "dance"
        model: ModelName

    def dance(change: HeadChange, _situation: Situation) -> Iterator[Lso]:
        assert change.head is not None
        yield Dance(model=change.head.model)

    # The table gets an additional row, which no other code mentions.
    monkeypatch.setattr("solver.planning.lso.actions.RULES", (*RULES, dance))
    await leading(cluster, lso=FULL)
    await cluster.wait_in_lane(a_request(base=OTHER))
    (head,) = await explained(cluster)

    assert (head.lsos[-1].lso, head.lsos[-1].subject) == ("dance", OTHER)


async def test_instance_without_a_status_is_left_out(cluster: LeaderRig):
    leader = await leading(cluster, lso=FULL)
    await leader.plan()
    leader.state.instances.clear()
    queue = await listen(cluster.far, topology.REPLIES, "answer")
    await leader.explain(PlanRequested(reply_to="answer"))

    assert Decoder(PlanExplained)((await cluster.far.take(queue)).body).heads == ()
