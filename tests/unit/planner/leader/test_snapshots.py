"""Snapshot of the leader's soft state: groups, instances, leases."""

import math

import pytest
from msgspec.structs import replace

from services.planner.lane_totals import LaneCounter
from services.planner.leader.snapshot_builder import cluster_snapshot
from services.planner.settings import LeaderSettings
from services.planner.state import LeaderState
from shared.contracts.base import ModelName
from shared.contracts.estimates import LatencyCoefficients, Moments, OutputTokens, Profile
from shared.contracts.lanes import LaneLayout
from shared.contracts.telemetry import LanesObserved
from solver.planning.problem.snapshot import ClusterSnapshot
from tests.clocks import NOW
from tests.queued import BATCH, BEST_EFFORT, CHAT, MODEL, OTHER, a_request, lane_of
from tests.unit.planner.leader_rig import status

SETTINGS = LeaderSettings(min_residency_swaps=0.0, reserved_deadline_s=5.0, reserved_lease_s=10.0)


class Cluster:
    """A leader's state, filled as messages would fill it."""

    def __init__(self) -> None:
        self.state = LeaderState()
        self.counters: dict[str, LaneCounter] = {}

    def waiting(self, num: int, **fields: object) -> str:
        """Put *num* requests into a lane; return its name."""
        for _ in range(num):
            request = a_request(**fields)
            self.counters.setdefault(request.lane, LaneCounter()).add(
                request, at=request.arrived_at
            )
            self.state.waiting[request.lane] = self.state.waiting.get(request.lane, 0) + 1
        self.state.on_lanes(
            LanesObserved(
                sender="g",
                incarnation="i",
                seq=1,
                at=NOW,
                layout=1,
                lanes=tuple(counter.total(lane) for lane, counter in self.counters.items()),
            ),
            NOW,
        )
        return request.lane

    def instance(self, name: str, active: ModelName | None = MODEL, **fields: object) -> None:
        self.state.on_status(status(name, active=active, **fields), NOW)

    def snapshot(self, *, now: float = NOW, **settings: float) -> ClusterSnapshot:
        return cluster_snapshot(
            self.state, layout=LaneLayout(), settings=replace(SETTINGS, **settings), now=now
        )


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def serving(snapshot: ClusterSnapshot) -> dict[str, set[str]]:
    return {each.instance_id: each.activate_s.keys() - each.withheld for each in snapshot.instances}


class TestGroups:
    def test_lane_is_divided_into_groups_of_four_batches(self, cluster: Cluster):
        """The instance runs 4 requests of 28 tokens together."""
        cluster.instance("i", max_running=8, kv_capacity_tokens=112)
        cluster.waiting(40, slo=BATCH)

        assert [group.num_requests for group in cluster.snapshot().groups] == [16, 16, 8]

    def test_running_slots_bound_the_batch_of_an_unknown_kv_capacity(self, cluster: Cluster):
        """Servers of others report the capacity only in vLLM's metrics."""
        cluster.instance("i", max_running=4, kv_capacity_tokens=0)
        cluster.waiting(40, slo=BATCH)

        assert [group.num_requests for group in cluster.snapshot().groups] == [16, 16, 8]

    def test_interactive_groups_are_served_in_a_quarter_of_their_time(self, cluster: Cluster):
        """
        At 500 tokens/s, 22 requests of 28 tokens fit into 1.25 s; 16 is the next lower power of 2.
        """
        cluster.instance("i", max_running=64, kv_capacity_tokens=10_000)
        cluster.waiting(40, slo=CHAT)

        assert [group.num_requests for group in cluster.snapshot().groups] == [16, 16, 8]

    def test_deadlines_are_set_at_arrival(self, cluster: Cluster):
        cluster.instance("i")
        cluster.waiting(1, slo=BATCH, arrived_at=NOW - 30)
        (group,) = cluster.snapshot().groups

        assert group.oldest_deadline_at == pytest.approx(NOW + 70)
        assert not group.interactive

    def test_expected_answers_have_the_observed_lengths(self, cluster: Cluster):
        cluster.instance("i")
        cluster.waiting(1, slo=BATCH)
        cluster.state.on_profile(
            Profile(
                model=MODEL,
                engine="simulated",
                device="simulated",
                version=1,
                at=NOW,
                output_tokens={"*": OutputTokens(mean=9.0, sd=3.0, count=50)},
            )
        )
        (group,) = cluster.snapshot().groups

        assert group.output_tokens == (9.0, 3.0)

    def test_best_effort_has_no_deadline(self, cluster: Cluster):
        cluster.instance("i")
        cluster.waiting(1, slo=BEST_EFFORT)
        (group,) = cluster.snapshot().groups

        assert (group.oldest_deadline_at, group.time_left_s) == (math.inf, math.inf)

    def test_lane_without_reports_is_planned_with_priors(self, cluster: Cluster):
        cluster.instance("i")
        cluster.state.waiting[lane_of(BATCH).queue_name] = 3
        (group,) = cluster.snapshot().groups

        assert group.num_requests <= 3
        assert math.isfinite(group.oldest_deadline_at)


class TestInstances:
    def test_model_with_waiting_work_stays_for_three_swap_times(self, cluster: Cluster):
        """A swap takes 1 s."""
        cluster.instance("i")
        cluster.waiting(1, slo=BATCH)
        cluster.waiting(1, slo=BATCH, base=OTHER)
        fresh, later = (
            serving(cluster.snapshot(now=NOW + after_s, min_residency_swaps=3.0))
            for after_s in (2.9, 3.0)
        )

        assert (fresh, later) == ({"i": {MODEL}}, {"i": {MODEL, OTHER}})

    def test_work_with_deadlines_does_not_wait_for_work_without(self, cluster: Cluster):
        cluster.instance("i")
        cluster.instance("j", active=OTHER)
        cluster.waiting(1, slo=BEST_EFFORT)
        cluster.waiting(1, slo=BATCH, base=OTHER)

        assert serving(cluster.snapshot(now=NOW + 1, min_residency_swaps=3.0)) == {
            "i": {MODEL, OTHER},
            "j": {OTHER},
        }

    def test_model_without_waiting_work_may_be_replaced_at_once(self, cluster: Cluster):
        cluster.instance("i")
        cluster.waiting(1, slo=BATCH, base=OTHER)

        assert serving(cluster.snapshot(now=NOW + 1, min_residency_swaps=3.0)) == {
            "i": {MODEL, OTHER}
        }

    def test_return_to_the_active_model_costs_as_much_as_other_swaps(self, cluster: Cluster):
        cluster.instance("i")
        (instance,) = cluster.snapshot().instances

        assert instance.activate_s[MODEL] == 1.0

    def test_model_that_is_being_activated_counts_as_active(self, cluster: Cluster):
        """The leader would otherwise plan the swap's end and the next swap at the same time."""
        cluster.instance("i", seq=1)
        cluster.instance("i", seq=2, activating=OTHER)
        (instance,) = cluster.snapshot(now=NOW + 1).instances

        assert instance.active == OTHER
        assert instance.backlog_s.mean == 1.0
        assert instance.activate_s == {OTHER: 1.0, MODEL: 1.0}

    def test_draining_instance_gets_no_work(self, cluster: Cluster):
        cluster.instance("i", draining=True)

        assert cluster.snapshot().instances == ()

    def test_profiles_determine_the_rate_of_a_device(self, cluster: Cluster):
        """
        Ten requests of 192 prompt and 64 answer tokens run together. An iteration of 10 decodes and
        30 prompt tokens takes 50 ms: 800 tokens/s. Recent work has no effect.
        """
        cluster.instance("i", max_running=10, kv_capacity_tokens=100_000)
        cluster.state.on_profile(
            Profile(
                model=MODEL,
                engine="simulated",
                device="simulated",
                version=1,
                at=NOW,
                latency=LatencyCoefficients(constant_s=0.01, linear_s=0.001),
                latency_error=0.2,
                token_rate_per_s=20.0,
                prefill_s=Moments(mean=0.2, sd=0.1, count=9),
            )
        )
        rates = cluster.snapshot().rates["simulated simulated", MODEL]

        assert rates.token_rate_per_s == pytest.approx(800.0)
        assert (rates.rate_error, rates.prefill_s) == (0.2, (0.2, 0.1))
        assert rates.decode_s_per_token == pytest.approx(0.05)

    def test_without_a_latency_model_the_measured_throughput_is_used(self, cluster: Cluster):
        cluster.instance("i")
        cluster.state.on_profile(
            Profile(
                model=MODEL,
                engine="simulated",
                device="simulated",
                version=1,
                at=NOW,
                token_rate_per_s=2000.0,
            )
        )

        assert cluster.snapshot().rates["simulated simulated", MODEL].token_rate_per_s == 2000.0

    def test_rate_follows_the_mix_of_arrived_requests(self, cluster: Cluster):
        """Requests of 4 + 24 tokens: an iteration has 10 decodes and 10/6 prompt tokens."""
        cluster.instance("i", max_running=10, kv_capacity_tokens=100_000)
        cluster.state.on_profile(
            Profile(
                model=MODEL,
                engine="simulated",
                device="simulated",
                version=1,
                at=NOW,
                latency=LatencyCoefficients(constant_s=0.01, linear_s=0.001),
            )
        )
        cluster.waiting(3, slo=BATCH)
        rates = cluster.snapshot().rates["simulated simulated", MODEL]

        assert rates.token_rate_per_s == pytest.approx((70 / 6) / (0.01 + 0.07 / 6))


class TestExpressLoad:
    """Instances serve 500 tokens per second; each request has 28 tokens."""

    def shares(self, cluster: Cluster, now: float = NOW) -> dict[str, float]:
        return {
            each.instance_id: each.reserved_share for each in cluster.snapshot(now=now).instances
        }

    def test_recent_short_deadline_arrivals_reduce_throughput(self, cluster: Cluster):
        """36 requests in ten seconds are about 100 tokens per second."""
        cluster.instance("i")
        cluster.waiting(36, slo=CHAT)

        assert self.shares(cluster) == {"i": pytest.approx(0.2)}

    def test_reserved_load_is_shared_by_instances_of_the_model(self, cluster: Cluster):
        cluster.instance("i")
        cluster.instance("j")
        cluster.instance("k", active=OTHER)
        cluster.waiting(36, slo=CHAT)

        assert self.shares(cluster) == {"i": pytest.approx(0.1), "j": pytest.approx(0.1), "k": 0.0}

    def test_reservation_leaves_some_throughput(self, cluster: Cluster):
        cluster.instance("i")
        cluster.waiting(400, slo=CHAT)

        assert self.shares(cluster) == {"i": pytest.approx(0.9)}

    def test_batch_work_and_old_arrivals_reserve_nothing(self, cluster: Cluster):
        cluster.instance("i")
        cluster.waiting(36, slo=BATCH)
        cluster.waiting(36, slo=CHAT, arrived_at=NOW - 11)

        assert self.shares(cluster) == {"i": 0.0}


class TestLeases:
    def test_best_effort_does_not_take_the_last_leased_instance(self, cluster: Cluster):
        cluster.instance("i")
        cluster.waiting(1, slo=CHAT)
        cluster.waiting(1, slo=BEST_EFFORT, base=OTHER)

        assert serving(cluster.snapshot()) == {"i": {MODEL}}

    def test_best_effort_takes_it_after_a_wait_by_the_chance_of_an_express_arrival(
        self, cluster: Cluster
    ):
        """An arrival in 10 s, and swaps of 1 s there and back: a chance of 18 % in 2 s."""
        cluster.instance("i")
        cluster.waiting(1, slo=CHAT)
        lane = cluster.waiting(1, slo=BEST_EFFORT, base=OTHER)
        served = {}
        for waited_s in (17.0, 19.0):
            cluster.state.unserved_s = {lane: waited_s}
            served[waited_s] = serving(cluster.snapshot(reserved_longest_wait_s=100.0))["i"]

        assert served == {17.0: {MODEL}, 19.0: {MODEL, OTHER}}

    def test_work_with_a_deadline_may_take_any_instance_at_a_price(self, cluster: Cluster):
        cluster.instance("i")
        cluster.instance("j")
        cluster.waiting(2, slo=CHAT)
        cluster.waiting(1, slo=BATCH, base=OTHER)
        instances = cluster.snapshot().instances

        assert serving(cluster.snapshot()) == {"i": {MODEL, OTHER}, "j": {MODEL, OTHER}}
        assert [dict(each.express_per_s) for each in instances] == [{"high": 0.2}, {}]

    def test_lease_ends_without_further_requests(self, cluster: Cluster):
        cluster.instance("i")
        cluster.waiting(1, slo=CHAT)
        cluster.waiting(1, slo=BEST_EFFORT, base=OTHER)

        assert serving(cluster.snapshot(now=NOW + 11)) == {"i": {MODEL, OTHER}}


def test_requests_that_the_broker_drops_at_their_ends_do_not_wait():
    state, lane = LeaderState(), "lane.2.m.high.3.w0"
    reports = (({}, {}), ({lane: 5}, {}), ({lane: 5}, {lane: 2}), ({lane: 5}, {lane: 2}))
    for number, (put, expired) in enumerate(reports):
        at = NOW + number
        state.on_lanes(
            LanesObserved(
                sender="g",
                incarnation="i",
                seq=number,
                at=at,
                layout=1,
                put=put,
                expired=expired,
            ),
            at,
        )

    assert state.counts.waiting() == {lane: 3}
