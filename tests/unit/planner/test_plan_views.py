"""Text views of plans for operators."""

import pytest
from msgspec.structs import replace

from services.planner import plan_views
from shared.contracts.base import InstanceId, ModelName
from shared.contracts.plans import (
    AdvisedInstances,
    OtherPlace,
    PlacedGroup,
    PlanExplained,
    PlannedLso,
    QueueHead,
)

I1, I2 = InstanceId("i1"), InstanceId("i2")


def group(number: int, instance: InstanceId | None = I1, **fields: object) -> PlacedGroup:
    known = {"lane": "lane.a", "num_requests": 8, "wait_s": 5.0 * number, "position": number}
    return PlacedGroup(number=number, instance_id=instance, **(known | fields))


def plan(*groups: PlacedGroup, epoch: int = 3, cause: str | None = None) -> PlanExplained:
    return PlanExplained(
        epoch=epoch,
        at=0.0,
        leader_id="p",
        policy="qlm",
        cause=cause,
        late_share=0.125,
        groups=groups,
    )


def test_advice_is_shown_where_more_or_fewer_instances_are_advised():
    enough = AdvisedInstances(device="vllm h200", present=2, advised=2)
    more = AdvisedInstances(device="vllm a10", present=1, advised=4, attainment=0.995)
    fewer = AdvisedInstances(device="vllm l4", present=3, advised=0)
    shown = plan_views.queues(replace(plan(), advice=(enough, more, fewer)))

    assert shown.splitlines()[1:] == [
        "vllm a10: 4 instances instead of 1, with 99.5% in time",
        "vllm l4: 0 instances instead of 3",
    ]


def test_queues_are_shown_head_first_with_forecasts():
    shown = plan_views.queues(
        plan(group(1, late_probability=0.5, time_left_s=7.0), group(0), group(0, I2), cause="drift")
    )

    assert shown.splitlines() == [
        "epoch 3  by p  qlm, replanned for drift; 3 groups, 12.5% of the weight expected late",
        "i1",
        "    1. lane.a/0  x8",
        "       turn in 0.0 s, best effort, late 0%",
        "    2. lane.a/1  x8",
        "       turn in 5.0 s, due in 7.0 s, late 50%",
        "i2",
        "    1. lane.a/0  x8",
        "       turn in 0.0 s, best effort, late 0%",
    ]


def test_turns_are_shown_with_their_90_percent_interval():
    """The wait is 10 s with a deviation of 2 s; without a deviation, only the mean is shown."""
    certain = group(1, wait_s=10.0, wait_sd_s=2.0)
    shown = plan_views.queues(plan(certain, group(0)))

    assert "turn in 10.0 s (7.1 s to 13.6 s), best effort" in shown
    assert "turn in 0.0 s, best effort" in shown
    assert "turn in 10.0 s (7.1 s to 13.6 s)" in plan_views.reasons(plan(certain))


def test_queues_fit_80_columns_with_names_of_real_lanes():
    lane = "lane.2.meta-llama%2FLlama-3%2E1-8B-Instruct.high.10.w9"
    shown = plan_views.queues(
        plan(group(12, lane=lane, wait_s=7200.0, wait_sd_s=900.0, time_left_s=86400.0))
    )
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("columns", [80, 120])
def test_chart_fits_the_terminal_and_shows_names_whole(columns: int):
    lane = "lane.2.tiny-llama.high.10.w9"
    groups = [group(number, lane=lane, wait_s=10.0 * number) for number in range(4)]
    lines = plan_views.gantt(plan(*groups), columns=columns).splitlines()

    assert max(map(len, lines)) <= columns
    bars = [line for line in lines if "#" in line]
    assert [line.split()[-1] for line in bars] == [f"{lane}/{number}" for number in range(4)]
    assert [line.index("#") for line in bars] == sorted(line.index("#") for line in bars)


def test_reasons_show_the_cost_of_alternatives():
    other = OtherPlace(instance_id=I2, position=0, extra_cost=0.0125, wait_s=900.0)
    shown = plan_views.reasons(plan(group(1, others=(other,)), group(2, None, wait_s=None)))

    assert shown.splitlines()[1:] == [
        "lane.a/1  x8: i1 #2, turn in 5.0 s, best effort, late with probability 0%",
        "    i2 #1: turn in 15 min, the plan would cost +1.25% of the weight",
        (
            "lane.a/2  x8: in no queue: no instance may serve its model, best effort, "
            "late with probability 0%"
        ),
    ]


EVICT = PlannedLso(
    lso="evict", subject="lane.a", requests=4, reason="cheaper", predicted_s=0.4, figures={"a": 1}
)
SWAP = QueueHead(
    instance_id=I1,
    active=ModelName("a"),
    model=ModelName("b"),
    lsos=(EVICT, PlannedLso(lso="dance", subject="b", reason="it must")),
)


def test_reasons_end_with_the_operations_of_each_instance():
    idle = QueueHead(instance_id=I2, active=ModelName("a"), model=ModelName("a"))
    shown = plan_views.reasons(replace(plan(), heads=(SWAP, idle)))

    assert shown.splitlines()[1:] == [
        "i1: a -> b",
        "    evict  about 4 of lane.a  0.4 s  cheaper",
        "    dance  b                      ?  it must",
        "i2: continues with a, nothing else to do",
    ]


def test_instance_without_a_model_is_shown():
    heads = (
        QueueHead(instance_id=I1),
        QueueHead(instance_id=I2, model=ModelName("b"), lsos=(EVICT,)),
    )
    shown = plan_views.reasons(replace(plan(), heads=heads)).splitlines()

    assert shown[1:3] == ["i1: has no model, nothing else to do", "i2: no model -> b"]


def test_queues_whose_head_needs_a_swap_are_marked():
    stays = QueueHead(instance_id=I2, active=ModelName("a"), model=ModelName("a"), lsos=(EVICT,))
    shown = plan_views.queues(replace(plan(group(0), group(0, I2)), heads=(SWAP, stays)))

    assert [line for line in shown.splitlines() if line.startswith("i")] == ["i1  a -> b", "i2"]


def test_only_heads_of_queues_with_explained_groups_are_shown():
    other = QueueHead(instance_id=I2)
    both = replace(plan(group(0), group(1, I2)), heads=(SWAP, other))

    assert plan_views.first(both, 1).heads == (SWAP,)
    assert plan_views.first(both, 2).heads == (SWAP, other)
    assert plan_views.first(replace(both, groups=()), 2).heads == (SWAP, other)


def test_difference_names_groups_that_were_added_removed_and_moved():
    before = plan(group(0), group(1), group(2))
    after = plan(group(1, position=0), group(2, I2, position=0), group(3), epoch=4, cause="first")

    assert plan_views.difference(before, after).splitlines() == [
        "epoch 3 -> 4, first",
        "  - lane.a/0  was i1 #1",
        "  ~ lane.a/1  i1 #2 -> i1 #1",
        "  ~ lane.a/2  i1 #3 -> i2 #1",
        "  + lane.a/3  i1 #4",
    ]


def test_epoch_without_moves_is_reported():
    assert "nothing moved" in plan_views.difference(plan(group(0)), plan(group(0), epoch=4))


def test_chart_has_one_time_axis_and_marks_late_groups():
    shown = plan_views.gantt(plan(group(0), group(2, late_probability=0.9), group(1, I2)))
    first, second, other = [line for line in shown.splitlines() if "lane.a" in line]

    assert first.index("#") < other.index("#") < second.index("!")


@pytest.mark.parametrize("groups", [(), (group(0, None, wait_s=None),)], ids=["none", "unserved"])
def test_empty_chart_is_reported(groups: tuple[PlacedGroup, ...]):
    assert plan_views.gantt(plan(*groups)) == "nothing waits"
