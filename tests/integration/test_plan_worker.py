"""The plan generator's process: its answers, its death and its restart."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from services.planner.leader.plan_worker import PlanWorker
from services.planner.leader.policies import FALLBACK, GENERATOR, Planner
from shared.contracts.base import InstanceId, ModelName
from solver.planning.capacity.advice import AdviceOptions
from solver.planning.problem.grouping import GroupId, RequestGroup, Spread
from solver.planning.problem.snapshot import ClusterSnapshot, InstanceView, ServiceRates
from solver.planning.review import Cause, ReviewOptions
from tests.queued import BATCH, lane_of

pytestmark = pytest.mark.slow

WEIGHT = {"high": 4.0, "low": 1.0}
MODEL = ModelName("tiny-llama")
LOAD_S = 120.0
"""Time to load the kernels, or to compile them the first time."""


@pytest.fixture
async def worker() -> AsyncIterator[PlanWorker]:
    async with PlanWorker(ReviewOptions(importance_weight=WEIGHT, budget_s=0.05)) as running:
        yield running


def a_snapshot(num_groups: int = 3) -> ClusterSnapshot:
    key = lane_of(BATCH, model=MODEL)
    groups = tuple(
        RequestGroup(
            group_id=GroupId(key.queue_name, number),
            key=key,
            num_requests=4,
            oldest_deadline_at=50.0 + number,
            youngest_deadline_at=51.0 + number,
            time_left_s=50.0,
            interactive=False,
            prompt_tokens=Spread(100.0),
            output_tokens=Spread(50.0),
        )
        for number in range(num_groups)
    )
    instances = tuple(
        InstanceView(
            instance_id=InstanceId(name), device="d", active=MODEL, activate_s={MODEL: 1.0}
        )
        for name in ("i", "j")
    )
    return ClusterSnapshot(now=0.0, groups=groups, instances=instances)


async def test_the_worker_plans_and_explains(worker: PlanWorker) -> None:
    await asyncio.wait_for(worker.ready(), LOAD_S)
    snapshot = a_snapshot()
    reviewed = await worker.review(snapshot, None)

    assert reviewed is not None
    assert reviewed.cause is Cause.FIRST
    placed = await worker.explain(snapshot, reviewed.order, most=1)
    assert sorted(each.group for each in placed) == [0, 1, 2]
    assert [bool(each.others) for each in placed] == [True, False, False]


async def test_the_worker_advises_on_scale(worker: PlanWorker) -> None:
    """Nine groups of 20 s on two instances take 90 s, but are due after 50 s."""
    await asyncio.wait_for(worker.ready(), LOAD_S)
    snapshot = a_snapshot(9)
    rates = {("d", MODEL): ServiceRates(token_rate_per_s=30.0)}
    options = AdviceOptions(target=0.95, start_s=0.0)
    (advice,) = await worker.advise(replace(snapshot, rates=rates), options, {})

    assert (advice.device, advice.present) == ("d", 2)
    assert advice.confirmed is not None
    assert advice.instances >= 4
    (enough,) = await worker.advise(a_snapshot(1), options, {})
    assert enough.instances == 2
    (fewer,) = await worker.advise(a_snapshot(1), options, {"d": 1})
    assert fewer.instances == 1


async def test_the_fallback_plans_until_the_worker_is_ready() -> None:
    async with PlanWorker(ReviewOptions(importance_weight=WEIGHT)) as loading:
        planned = await Planner(GENERATOR, WEIGHT, loading).plan(a_snapshot())

    assert (planned.policy, planned.review) == (FALLBACK, None)
    assert len(planned.places) == 3


async def test_a_dead_worker_is_replaced_and_plans_from_scratch(worker: PlanWorker) -> None:
    await asyncio.wait_for(worker.ready(), LOAD_S)
    planner = Planner(GENERATOR, WEIGHT, worker)
    assert (await planner.plan(a_snapshot())).policy == GENERATOR
    pid = worker.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    assert (await planner.plan(a_snapshot())).policy == FALLBACK
    assert worker.pid != pid
    assert planner.worker_restarts == 1
    await asyncio.wait_for(worker.ready(), LOAD_S)
    planned = await planner.plan(a_snapshot())
    assert planned.review is not None
    assert planned.review.cause is Cause.FIRST


async def test_a_stuck_worker_is_replaced() -> None:
    options = ReviewOptions(importance_weight=WEIGHT, budget_s=0.05)
    async with PlanWorker(options, patience_s=0.5) as worker:
        await asyncio.wait_for(worker.ready(), LOAD_S)
        pid = worker.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)

        assert await worker.review(a_snapshot(), None) is None
        assert worker.pid != pid


async def test_closing_ends_the_process(worker: PlanWorker) -> None:
    await asyncio.wait_for(worker.ready(), LOAD_S)
    pid = worker.pid
    assert pid is not None
    async with asyncio.timeout(60):
        await worker.__aexit__(None, None, None)

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    await worker.__aenter__()  # started again, since the fixture closes it


async def test_the_worker_still_plans_after_ctrl_c(worker: PlanWorker) -> None:
    """A terminal sends SIGINT to all processes, and the leader plans while it drains."""
    await asyncio.wait_for(worker.ready(), LOAD_S)
    pid = worker.pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)

    assert await worker.review(a_snapshot(), None) is not None
    assert worker.restarts == 0
