"""One example of every message of `shared.contracts.plans`."""

from shared.contracts.base import Message
from shared.contracts.plans import (
    AdvisedInstances,
    LaneForecast,
    LaneQuota,
    LanesForecast,
    OtherPlace,
    PlacedGroup,
    PlanExplained,
    PlannedLso,
    PlanPublished,
    PlanRequested,
    QueueHead,
    Segment,
    VirtualQueue,
)
from tests.contract.messages.examples.lanes import LANE

EXAMPLES: tuple[Message, ...] = (
    PlanPublished(
        epoch=12,
        issued_at=1000.5,
        leader_id="planner-1",
        queue=VirtualQueue(
            instance_id="i1",
            segments=(Segment(model="tiny", lanes=(LaneQuota(lane=LANE, quota=16),)),),
        ),
        policy="qlm",
        expected_late=1.5,
        solve_s=0.25,
    ),
    LanesForecast(
        epoch=7,
        at=1000.5,
        lanes=(
            LaneForecast(lane=LANE, wait_s=12.5, late_probability=0.25),
            LaneForecast(lane="lane.2.other.low.3.w9", late_probability=1.0),
        ),
    ),
    PlanRequested(reply_to="answers-1", others=5),
    PlanExplained(
        epoch=7,
        at=1000.5,
        leader_id="planner-1",
        policy="qlm",
        cause="arrivals",
        late_share=0.125,
        groups=(
            PlacedGroup(
                lane=LANE,
                number=3,
                num_requests=64,
                instance_id="i1",
                position=1,
                wait_s=12.5,
                time_left_s=30.0,
                late_probability=0.25,
                others=(OtherPlace(instance_id="i2", position=0, extra_cost=-0.01, wait_s=4.0),),
            ),
            PlacedGroup(lane="lane.2.other.low.12.w9", number=0, num_requests=1),
        ),
        heads=(
            QueueHead(
                instance_id="i1",
                active="other",
                model="tiny",
                lsos=(
                    PlannedLso(
                        lso="evict",
                        subject=LANE,
                        requests=2,
                        reason="cheaper than to wait",
                        predicted_s=0.25,
                        figures={"recompute_s": 0.25},
                    ),
                ),
            ),
        ),
        advice=(
            AdvisedInstances(device="vllm cpu", present=2, advised=4, bound=1, attainment=0.995),
        ),
    ),
)
