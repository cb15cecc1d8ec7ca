"""Work classes that are learnt: who classifies by what, and what becomes of old lanes."""

import asyncio

import pytest
from msgspec.structs import replace

from services.planner.view import lane_of
from shared.broker import topology
from shared.broker.protocol import OutMessage, PublishOutcome, QueueDepth, Settlement
from shared.contracts.base import Decoder
from shared.contracts.lanes import LaneKey, LaneLayout
from shared.contracts.telemetry import LanesObserved, LaneTotal, WorkTotal
from solver.planning.lanes import ALIVE_WORK_VERSIONS
from solver.planning.work_classes import bin_of
from tests.clocks import NOW
from tests.deliveries import UnreliableBroker
from tests.queued import MODEL, OTHER, a_request
from tests.unit.planner.leader_rig import LeaderRig, lanes_of, settled, status
from tests.unit.planner.rig import BODY, LANE, GrouperRig, listen

LEARNT = LaneLayout(work_version=1, work_edges={MODEL: 8})
LONG = "lane.1.tiny-llama.high.12.long-1"
"""Of `BODY`, which is 11 tokens of work, under `LEARNT`."""
TWO_KINDS = {bin_of(50): 300, bin_of(900): 300}
decode_layout: Decoder[LaneLayout] = Decoder(LaneLayout)


class TestGrouper:
    async def test_it_classifies_by_what_the_leader_tells(self, rig: GrouperRig):
        rig.grouper.on_layout(LEARNT)
        await rig.submit(BODY)

        assert (await rig.queued(LONG)).lane == LONG

    async def test_edges_of_another_layout_or_older_ones_are_none_of_its_business(
        self, rig: GrouperRig
    ):
        rig.grouper.on_layout(LEARNT)
        rig.grouper.on_layout(LaneLayout(version=2, work_version=7))
        rig.grouper.on_layout(LaneLayout())
        await rig.submit(BODY)

        assert (await rig.queued(LONG)).lane == LONG

    async def test_after_a_lost_connection_it_uses_its_own_lanes(self, rig: GrouperRig):
        """What it had heard may be replaced meanwhile, and its lanes deleted."""
        rig.grouper.on_layout(LEARNT)
        rig.grouper.forget_layout()
        await rig.submit(BODY)

        assert (await rig.queued()).lane == LANE

    async def test_a_request_under_way_while_its_lane_closes_is_classified_anew(
        self, rig: GrouperRig
    ):
        rig.grouper.on_layout(LEARNT)
        await rig.submit(BODY)
        await rig.queued(LONG)
        await topology.close_work_queue(rig.far, LONG)
        await rig.publish(BODY)
        rig.broker.attempts.clear()
        taken = asyncio.create_task(rig.grouper.on_request(await rig.pull()))
        while topology.LANES not in rig.broker.attempts:
            await asyncio.sleep(0)
        rig.grouper.on_layout(replace(LEARNT, work_version=2))
        await taken
        assert await rig.far.ready(LONG) == 0
        await rig.grouper.on_request(await rig.pull())

        assert await rig.far.ready(f"{LONG[:-1]}2") == 1

    async def test_it_reports_its_edges_and_the_work_that_came(self, rig: GrouperRig):
        queue = await listen(rig.far, topology.TELEMETRY, topology.LANES_KEY)
        rig.grouper.on_layout(LEARNT)
        for max_tokens in (8, 8, 500):
            await rig.submit(BODY | {"max_tokens": max_tokens})
        await rig.grouper.report()
        observed = Decoder(LanesObserved)((await rig.far.take(queue)).body)

        assert (observed.work_version, observed.work_edges) == (1, {MODEL: 8})
        assert observed.work == (WorkTotal(model=MODEL, bins=((bin_of(11), 2), (bin_of(503), 1))),)

    async def test_it_forgets_lanes_that_are_long_gone(self, rig: GrouperRig):
        await rig.submit(BODY)
        rig.grouper.on_layout(LEARNT)
        await rig.submit(BODY)
        rig.grouper.on_layout(replace(LEARNT, work_version=ALIVE_WORK_VERSIONS))
        assert set(rig.grouper.state.lanes) == {LANE, LONG}
        rig.grouper.on_layout(replace(LEARNT, work_version=ALIVE_WORK_VERSIONS + 1))

        assert set(rig.grouper.state.lanes) == {LANE}


def observed(seq: int, histogram: dict[int, int], **fields: object) -> LanesObserved:
    """A grouper's totals: so much work for `MODEL`."""
    work = (WorkTotal(model=MODEL, bins=tuple(sorted(histogram.items()))),)
    report = LanesObserved(sender="g", incarnation="i", seq=seq, at=NOW + 1e6, layout=1, work=work)
    return replace(report, **fields)


async def learning(cluster: LeaderRig, **settings: float) -> tuple[str, list[LaneLayout]]:
    """A leader that has seen two kinds of work; what it told of layouts."""
    queue = await listen(cluster.far, topology.TELEMETRY, topology.LAYOUT_KEY)
    leader = await settled(cluster, **({"classes_period_s": 10.0} | settings))
    await cluster.hear(observed(1, {}), topology.LANES_KEY)
    await leader.plan()
    cluster.clock.advance(10.0)
    await cluster.hear(status())
    await cluster.hear(observed(2, TWO_KINDS), topology.LANES_KEY)
    await leader.plan()
    return queue, await layouts(cluster, queue)


async def layouts(cluster: LeaderRig, queue: str) -> list[LaneLayout]:
    found = []
    while (delivery := await cluster.far.get(queue)) is not None:
        await delivery.settle(Settlement.ACK)
        found.append(decode_layout(delivery.body))
    return found


class TestLeader:
    async def test_it_learns_edges_and_tells_them(self, cluster: LeaderRig):
        _, (told,) = await learning(cluster)

        assert told.work_version == 1
        assert 50 < told.work_edge_of(MODEL) <= 900
        assert told.work_edge_of(OTHER) == LaneLayout().work_edge_tokens

    async def test_what_it_tells_is_repeated_and_not_replaced_for_nothing(self, cluster: LeaderRig):
        queue, (told,) = await learning(cluster)
        (leader,) = cluster.leaders
        twice = {number: 2 * count for number, count in TWO_KINDS.items()}
        await cluster.hear(observed(3, twice), topology.LANES_KEY)
        cluster.clock.advance(10.0)
        await leader.plan()

        assert await layouts(cluster, queue) == [told]

    async def test_nothing_is_learnt_from_little_work(self, cluster: LeaderRig):
        _, told = await learning(cluster, classes_least_requests=601)

        assert told == []

    async def test_a_new_leader_goes_on_from_what_groupers_report(self, cluster: LeaderRig):
        queue = await listen(cluster.far, topology.TELEMETRY, topology.LAYOUT_KEY)
        leader = await settled(cluster)
        edges = {"work_version": 7, "work_edges": {MODEL: 99}}
        await cluster.hear(observed(1, {}, **edges), topology.LANES_KEY)
        await leader.plan()

        (told,) = await layouts(cluster, queue)
        assert (told.work_version, told.work_edges) == (7, {MODEL: 99})

    async def test_lanes_of_older_edges_are_looked_for_once(self, cluster: LeaderRig):
        """They may have work that nobody tells of; later, none of them comes into being."""
        leader = await settled(cluster, scan_period_s=10.0)
        edges = {"work_version": 2, "work_edges": {MODEL: 4000}}
        await cluster.hear(observed(1, {}, **edges), topology.LANES_KEY)
        await cluster.wait_in_lane(a_request(lane=LONG))
        await leader.plan()
        assert leader.state.waiting[LONG] == 1
        assert isinstance(leader.broker, UnreliableBroker)
        leader.broker.counted.clear()
        cluster.clock.advance(11.0)
        await leader.plan()

        again = {key for queue in leader.broker.counted if (key := lane_of(queue)) is not None}
        assert {key.work for key in again - {LaneKey.parse(LONG)}} >= {"short", "long-2"}
        assert {key.queue_name for key in again if key.work.endswith("-1")} == {LONG}

    async def test_no_more_edges_while_lanes_of_old_ones_still_drain(self, cluster: LeaderRig):
        """Or they would get out of the sight of a leader that starts from nothing."""
        queue = await listen(cluster.far, topology.TELEMETRY, topology.LAYOUT_KEY)
        leader = await settled(cluster, classes_period_s=10.0)
        edges = {"work_version": ALIVE_WORK_VERSIONS, "work_edges": {MODEL: 4000}}
        await cluster.hear(observed(1, {}, **edges), topology.LANES_KEY)
        await cluster.wait_in_lane(a_request(lane=LONG))
        await leader.plan()
        cluster.clock.advance(10.0)
        await cluster.hear(status())
        await cluster.hear(observed(2, TWO_KINDS, **edges), topology.LANES_KEY)
        await leader.plan()
        assert {each.work_version for each in await layouts(cluster, queue)} == {
            ALIVE_WORK_VERSIONS
        }
        await cluster.far.take(LONG)
        await cluster.far.delete_queue(LONG)
        await leader.plan()
        await leader.plan()

        assert (await layouts(cluster, queue))[-1].work_version == ALIVE_WORK_VERSIONS + 1


class TestRetirement:
    """Of `LONG`, whose edges version 2 has replaced."""

    async def leader(self, cluster: LeaderRig, grouper_at: int = 2) -> None:
        leader = await settled(cluster, lane_retire_s=5.0)
        await cluster.hear(observed(1, {}, work_version=2), topology.LANES_KEY)
        if grouper_at != 2:
            behind = observed(1, {}, work_version=grouper_at, sender="behind")
            await cluster.hear(behind, topology.LANES_KEY)
        await cluster.wait_in_lane(a_request(lane=LONG))
        await leader.plan()

    async def rounds(self, cluster: LeaderRig, num: int = 6) -> None:
        for _ in range(num):
            cluster.clock.advance(5.0)
            await cluster.hear(status())
            await cluster.leaders[0].plan()

    async def exists(self, cluster: LeaderRig) -> bool:
        return await cluster.far.depth(LONG) is not None

    async def test_a_lane_with_work_is_planned_and_stays(self, cluster: LeaderRig):
        await self.leader(cluster)
        await self.rounds(cluster)

        assert await cluster.far.ready(LONG) == 1
        assert lanes_of((await cluster.published())[-1]) == [(MODEL, {LONG})]

    async def test_an_empty_one_is_deleted(self, cluster: LeaderRig):
        await self.leader(cluster)
        await cluster.far.take(LONG)
        await self.rounds(cluster)

        assert not await self.exists(cluster)

    async def test_not_before_it_has_been_empty_for_a_while(self, cluster: LeaderRig):
        await self.leader(cluster)
        await cluster.far.take(LONG)
        for _ in range(3):
            cluster.clock.advance(1.0)
            await cluster.leaders[0].plan()

        assert await self.exists(cluster)

    async def test_one_that_somebody_holds_a_message_of_stays(self, cluster: LeaderRig):
        """Its agent may die, and then the request is back."""
        await self.leader(cluster)
        held = await cluster.far.get(LONG)
        assert held is not None
        await self.rounds(cluster)
        await held.settle(Settlement.REQUEUE)
        await cluster.leaders[0].plan()

        assert await cluster.far.ready(LONG) == 1

    @pytest.mark.parametrize("wrong", [{3}, {3, 4}, {2, 3}, {4, 5}])
    async def test_counts_of_a_broker_that_stalls_delete_nothing(
        self, cluster: LeaderRig, monkeypatch: pytest.MonkeyPatch, wrong: set[int]
    ):
        """RabbitMQ counts a queue that does not answer it in time as without anything."""
        await self.leader(cluster)
        held = await cluster.far.get(LONG)
        broker = cluster.leaders[0].broker
        depth = broker.depth
        for number in range(1, 8):

            async def counted(queue: str, number: int = number) -> QueueDepth | None:
                nothing = QueueDepth(ready=0, consumers=0)
                return nothing if queue == LONG and number in wrong else await depth(queue)

            monkeypatch.setattr(broker, "depth", counted)
            await self.rounds(cluster, 1)

        assert held is not None
        await held.settle(Settlement.REQUEUE)
        assert await cluster.far.ready(LONG) == 1

    async def test_one_that_is_in_use_again_is_closed_again(self, cluster: LeaderRig):
        """Whoever put into it has bound it."""
        await self.leader(cluster)
        await cluster.far.take(LONG)
        await self.rounds(cluster, 3)
        await cluster.wait_in_lane(a_request(lane=LONG))
        await self.rounds(cluster, 1)
        await cluster.far.take(LONG)
        await self.rounds(cluster, 2)
        outcome = await cluster.far.publish(topology.LANES, LONG, OutMessage(body=b"", kind="x"))

        assert await self.exists(cluster)
        assert outcome is PublishOutcome.UNROUTABLE

    async def test_one_that_a_grouper_may_still_put_into_stays(self, cluster: LeaderRig):
        await self.leader(cluster, grouper_at=1)
        await cluster.far.take(LONG)
        await self.rounds(cluster)

        assert await self.exists(cluster)

    async def test_a_grouper_that_has_heard_of_no_edges_holds_nothing_up(self, cluster: LeaderRig):
        await self.leader(cluster, grouper_at=0)
        await cluster.far.take(LONG)
        await self.rounds(cluster)

        assert not await self.exists(cluster)

    async def test_the_operators_lanes_stay(self, cluster: LeaderRig):
        await self.leader(cluster)
        lasting = LaneKey.parse(LONG).lasting.queue_name
        await cluster.wait_in_lane(a_request(lane=lasting))
        await cluster.leaders[0].plan()
        await cluster.far.take(lasting)
        await self.rounds(cluster)

        assert await cluster.far.depth(lasting) is not None

    async def test_a_deleted_lane_is_not_counted_again(self, cluster: LeaderRig):
        """Though groupers go on telling its totals: counting what is absent costs a channel."""
        await self.leader(cluster)
        await cluster.far.take(LONG)
        await self.rounds(cluster)
        total = LaneTotal(lane=LONG, requests=1, prompt_tokens=1, max_tokens=1)
        told = observed(9, {}, work_version=2, lanes=(total,))
        await cluster.hear(told, topology.LANES_KEY)
        await cluster.wait_in_lane(a_request(lane=LONG))
        await self.rounds(cluster, 1)

        assert LONG not in cluster.leaders[0].state.waiting
