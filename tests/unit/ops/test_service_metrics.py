"""Metrics of services match events, and are read at scrape time."""

import msgspec
import pytest
from cachetools import FIFOCache
from prometheus_client import CollectorRegistry

from ops.engine_runs import generate
from services.agent.backends.base import EngineRequest, EngineSnapshot
from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.backend import SimulatedEngine
from services.agent.metrics import AgentMetrics
from services.estimator.metrics import estimator_metrics
from services.estimator.state import EstimatorState
from services.planner.grouper.dead_letter_replies import DEAD_LETTER_REASONS
from services.planner.metrics import MAX_LANES, LeaderMetrics, grouper_metrics
from services.planner.state import GrouperState, LeaderState
from shared.contracts.base import InstanceId, ModelName, RequestId, TenantId
from shared.contracts.lanes import LaneLayout
from shared.contracts.models import ModelEntry
from shared.contracts.plans import PlanPublished, VirtualQueue
from shared.contracts.qos import QosClass
from shared.contracts.requests import PromptText, Sampling, WaitForecast
from shared.contracts.telemetry import Iteration, IterationsObserved, RequestObserved
from shared.runtime.clock import SystemClock
from solver.instance.instance import Instance
from solver.instance.state import InstanceSettings
from solver.prediction.lengths.prompt_lengths import PromptLengths
from solver.routing.shares import TenantShares

MODELS = tuple(
    ModelEntry(name=ModelName(name), path=name, architecture="x", max_model_len=64)
    for name in ("m1", "m2")
)
OBSERVED = RequestObserved(
    request_id=RequestId("r"),
    instance_id=InstanceId("a1"),
    model=ModelName("m1"),
    engine="simulated",
    device="cpu",
    application="default",
    tenant=TenantId("t"),
    qos_class=QosClass.INTERACTIVE,
    prompt_tokens=3,
    output_tokens=2,
    arrived_at=100.0,
    pulled_at=100.1,
    submitted_at=100.2,
    first_token_at=100.5,
    finished_at=101.5,
    attained=True,
)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def plan(instance: str, *, issued_at: float, solve_s: float = 0.02) -> PlanPublished:
    return PlanPublished(
        epoch=1,
        issued_at=issued_at,
        leader_id="l",
        queue=VirtualQueue(instance_id=InstanceId(instance)),
        policy="edf-batching",
        solve_s=solve_s,
    )


class CountedEngine(SimulatedEngine):
    """An engine that counts its snapshots."""

    num_snapshots = 0

    def snapshot(self) -> EngineSnapshot:
        self.num_snapshots += 1
        return super().snapshot()


class TestAgent:
    @pytest.fixture
    async def engine(self):
        engine = CountedEngine(MODELS, SimulatedSettings(time_scale=0), SystemClock())
        await engine.start()
        yield engine
        await engine.close()

    @pytest.fixture
    def instance(self) -> Instance:
        return Instance(
            InstanceSettings(
                instance_id=InstanceId("a1"),
                incarnation="i",
                engine="simulated",
                device="simulated",
                capabilities=frozenset(),
                layout=LaneLayout(),
            ),
            {},
            0.0,
        )

    @pytest.fixture
    def metrics(self, registry, instance, engine) -> AgentMetrics:
        return AgentMetrics(registry, instance=instance, engine=engine)

    async def test_totals_equal_those_of_the_instance(self, registry, instance, metrics):
        instance.totals.pulled = 7
        instance.totals.relegated = 2
        instance.draining = True

        assert value(registry, "headway_agent_requests_pulled_total") == 7
        assert value(registry, "headway_agent_requests_relegated_total") == 2
        assert value(registry, "headway_agent_draining") == 1

    async def test_all_series_of_a_scrape_are_read_from_one_snapshot(
        self, registry, engine, metrics
    ):
        before = engine.num_snapshots
        exported = {family.name for family in registry.collect()}

        assert engine.num_snapshots == before + 1
        assert {"headway_agent_kv_utilization_ratio", "headway_agent_kv_saved_bytes"} <= exported

    async def test_copies_of_kv_are_those_of_the_engine(self, registry, engine, metrics):
        await engine.activate(ModelName("m1"))
        request = EngineRequest(
            request_id=RequestId("r"),
            model=ModelName("m1"),
            prompt=tuple(range(10, 50)),
            sampling=Sampling(max_tokens=20, temperature=0, ignore_eos=True),
            checkpointed=True,
        )
        async for _ in generate(engine, request):
            break
        engine.abort(request.request_id)
        copied = engine.snapshot().checkpoints

        assert copied.saved_blocks >= 2
        assert value(registry, "headway_agent_kv_saved_blocks_total") == copied.saved_blocks
        assert value(registry, "headway_agent_kv_saved_bytes_total") == copied.saved_bytes
        assert value(registry, "headway_agent_kv_restored_blocks_total") == 0
        assert value(registry, "headway_agent_host_kv_bytes") == copied.saved_bytes

    async def test_one_model_is_active(self, registry, engine, metrics):
        await engine.activate(ModelName("m2"))
        active = {
            name: value(registry, "headway_agent_model_active", model=name) for name in ("m1", "m2")
        }

        assert active == {"m1": 0, "m2": 1}

    async def test_a_finished_request_is_counted(self, registry, metrics):
        metrics.finished(OBSERVED)

        labels = {"qos_class": "interactive"}
        assert value(registry, "headway_agent_request_ttft_seconds_sum", **labels) == 0.5
        assert value(registry, "headway_agent_request_e2e_seconds_sum", **labels) == 1.5
        assert value(registry, "headway_agent_request_slo_attained_total", **labels) == 1
        assert value(registry, "headway_agent_request_slo_violated_total", **labels) == 0

    @pytest.mark.parametrize(
        ("outcome", "violated"), [("poison_request", 1), ("cancelled", 0)], ids=str
    )
    async def test_requests_without_an_answer_have_no_times(
        self, registry, metrics, outcome, violated
    ):
        failed = msgspec.structs.replace(
            OBSERVED, outcome=outcome, attained=False, first_token_at=0.0
        )
        metrics.finished(failed)

        labels = {"qos_class": "interactive"}
        assert value(registry, "headway_agent_request_ttft_seconds_count", **labels) == 0
        assert value(registry, "headway_agent_request_slo_violated_total", **labels) == violated

    def test_verdicts_are_counted_by_tenant_and_class(self, registry, metrics):
        metrics.finished(OBSERVED)
        metrics.finished(msgspec.structs.replace(OBSERVED, attained=False))
        cancelled = msgspec.structs.replace(OBSERVED, outcome="cancelled", attained=False)
        metrics.finished(cancelled)
        metrics.finished(msgspec.structs.replace(OBSERVED, tenant=TenantId("u")))

        for tenant, attained, violated in (("t", 1, 1), ("u", 1, 0)):
            labels = {"tenant": tenant, "qos_class": "interactive"}
            counted = [
                value(registry, f"headway_agent_tenant_slo_{verdict}_total", **labels)
                for verdict in ("attained", "violated")
            ]
            assert counted == [attained, violated]


class TestGrouper:
    def test_counts_of_admitted_and_rejected_requests_equal_the_state(self, registry):
        state = GrouperState(shares=TenantShares(max_share=1.0, free_tokens=0), recent=FIFOCache(1))
        lengths = PromptLengths()
        grouper_metrics(registry, state, lengths)
        state.admitted, state.refused, state.limited = 5, 3, 2
        state.shares.admit("r", TenantId("t"), 40)

        assert value(registry, "headway_planner_requests_admitted_total") == 5
        assert value(registry, "headway_planner_requests_refused_total") == 3
        assert value(registry, "headway_planner_requests_limited_total") == 2
        assert value(registry, "headway_planner_outstanding_tokens") == 40

        for _ in range(500):
            lengths.observe(ModelName("m"), PromptText(num_bytes=300), 100, bytes_per_token=4.0)
        learnt = value(registry, "headway_planner_prompt_bytes_per_token", model="m")
        assert learnt == pytest.approx(3.0, rel=0.01)

    def test_every_reason_and_class_is_exported_before_its_first_event(self, registry):
        state = GrouperState(shares=TenantShares(max_share=1.0, free_tokens=0), recent=FIFOCache(1))
        grouper_metrics(registry, state, PromptLengths())
        letters = "headway_planner_dead_letters_total"

        assert {value(registry, letters, reason=each) for each in DEAD_LETTER_REASONS} == {0}
        state.dead_letters["poison_request"] += 1
        state.missed(QosClass.BEST_EFFORT, TenantId("t"))
        assert value(registry, letters, reason="poison_request") == 1
        missed = [
            value(registry, "headway_planner_request_slo_violated_total", qos_class=each.value)
            for each in QosClass
        ]
        assert missed == [0, 0, 1]
        labels = {"tenant": "t", "qos_class": "best_effort"}
        assert value(registry, "headway_planner_tenant_slo_violated_total", **labels) == 1


class TestLeader:
    @pytest.fixture
    def state(self) -> LeaderState:
        return LeaderState(active_since=1.0, epoch=3)

    def test_only_the_active_leader_describes_the_cluster(self, registry, state):
        LeaderMetrics(registry, state)
        state.waiting = {"lane.x": 4}
        names = ("headway_planner_leader_active", "headway_planner_plan_epoch")

        assert [value(registry, name) for name in names] == [1, 3]
        assert value(registry, "headway_planner_lane_requests", lane="lane.x") == 4
        state.active_since = None
        assert [value(registry, name) for name in names] == [0, None]
        assert value(registry, "headway_planner_lane_requests", lane="lane.x") is None

    def test_lanes_beyond_the_bound_are_summed(self, registry, state):
        LeaderMetrics(registry, state)
        state.waiting = {f"lane.{n}": n for n in range(MAX_LANES + 3)}
        (family,) = [f for f in registry.collect() if f.name == "headway_planner_lane_requests"]

        assert len(family.samples) == MAX_LANES + 1
        assert value(registry, "headway_planner_lane_requests", lane="other") == 1 + 2

    def test_unserved_lanes_are_shown_with_their_deadlines(self, registry, state):
        LeaderMetrics(registry, state)
        state.unserved_s = {"lane.x": 70.0, "relegated.m": 3.0}
        state.deadline_s = {"lane.x": 7.8}
        unserved = "headway_planner_lane_unserved_seconds"
        deadline = "headway_planner_lane_deadline_seconds"

        assert value(registry, unserved, lane="lane.x") == 70
        assert value(registry, unserved, lane="relegated.m") == 3
        assert value(registry, deadline, lane="lane.x") == 7.8
        assert value(registry, deadline, lane="relegated.m") is None

    def test_the_longest_unserved_lanes_have_series_of_their_own(self, registry, state):
        LeaderMetrics(registry, state)
        state.unserved_s = {f"lane.{n}": float(n) for n in range(MAX_LANES + 3)}
        unserved = "headway_planner_lane_unserved_seconds"
        (family,) = [f for f in registry.collect() if f.name == unserved]

        assert len(family.samples) == MAX_LANES + 1
        assert value(registry, unserved, lane=f"lane.{MAX_LANES + 2}") == MAX_LANES + 2
        assert value(registry, unserved, lane="other") == 2

    async def test_a_publication_counts_once_for_each_instance(self, registry, state):
        rounds = iter(
            [
                {"a": plan("a", issued_at=10.0), "b": plan("b", issued_at=10.0)},
                {"a": plan("a", issued_at=10.0), "b": plan("b", issued_at=10.0)},
                {"a": plan("a", issued_at=11.0)},
                {},
            ]
        )

        async def round_() -> None:
            state.plans = next(rounds)

        counted = LeaderMetrics(registry, state).counting(round_)
        for _ in range(4):
            await counted()

        assert value(registry, "headway_planner_plans_published_total") == 2 + 1
        assert value(registry, "headway_planner_plan_solve_seconds_count") == 2


class TestEstimator:
    def test_a_profile_shows_its_sample_counts(self, registry):
        state = EstimatorState(iteration_memory=100, request_memory=100, max_applications=1)
        estimator_metrics(registry, state)
        assert value(registry, "headway_estimator_profiles") == 0

        learner = state.learner("m1", "simulated", "cpu")
        learner.on_request(OBSERVED)
        learner.on_iterations(
            IterationsObserved(
                instance_id=InstanceId("a1"),
                model=ModelName("m1"),
                engine="simulated",
                device="cpu",
                at=1.0,
                iterations=(
                    Iteration(compute_tokens=8, context_tokens=0, num_decodes=0, duration_s=0.01),
                ),
            )
        )

        labels = {"model": "m1", "engine": "simulated", "device": "cpu"}
        assert value(registry, "headway_estimator_profiles") == 1
        assert value(registry, "headway_estimator_iterations_total", **labels) == 1
        for series in ("latency_error_ratio", "latency_error_p95_ratio", "latency_bias_ratio"):
            assert value(registry, f"headway_estimator_{series}", **labels) is None
        prefill_s = value(registry, "headway_estimator_prefill_seconds", **labels)
        assert prefill_s == pytest.approx(0.3)

    def test_residuals_equal_the_published_residuals(self, registry):
        state = EstimatorState(iteration_memory=100, request_memory=100, max_applications=1)
        estimator_metrics(registry, state)
        learner = state.learner("m1", "simulated", "cpu")
        labels = {"model": "m1", "engine": "simulated", "device": "cpu"}
        residual = "headway_estimator_latency_residual_ratio"
        assert value(registry, residual, **labels) is None

        learner.judge_latency([2.0, 2.0], at=1.0)

        assert value(registry, residual, **labels) == -0.5
        assert value(registry, "headway_estimator_latency_residual_sd_ratio", **labels) == 0

    def test_predicted_and_actual_waits_are_shown(self, registry):
        state = EstimatorState(iteration_memory=100, request_memory=100, max_applications=1)
        estimator_metrics(registry, state)
        learner = state.learner("m1", "simulated", "cpu")
        labels = {"model": "m1", "engine": "simulated", "device": "cpu"}
        residual = "headway_estimator_wait_residual_seconds"
        assert value(registry, residual, **labels) is None

        reported = WaitForecast(mean_s=3.2, sd_s=1.0)
        for _ in range(20):
            learner.on_request(
                msgspec.structs.replace(OBSERVED, grouped_at=99.2, predicted_wait=reported)
            )

        assert value(registry, residual, **labels) == pytest.approx(2.2)
        assert value(registry, "headway_estimator_wait_residual_sd_seconds", **labels) == 0
        coverage = "headway_estimator_wait_coverage_ratio"
        assert value(registry, coverage, **labels, level="0.9") == 1

    def test_lengths_of_all_applications_are_shown_by_model(self, registry):
        state = EstimatorState(iteration_memory=100, request_memory=100, max_applications=1)
        estimator_metrics(registry, state)
        learner = state.learner("m1", "simulated", "cpu")
        mean = "headway_estimator_output_tokens"
        assert value(registry, mean, model="m1") is None

        for _ in range(60):
            learner.on_request(OBSERVED)

        assert value(registry, "headway_estimator_applications", model="m1") == 1
        assert 2 < value(registry, mean, model="m1") < 128
        assert value(registry, "headway_estimator_output_residual_tokens", model="m1") > 0
        assert value(registry, "headway_estimator_output_residual_sd_tokens", model="m1") > 0
        coverage = "headway_estimator_output_coverage_ratio"
        assert value(registry, coverage, model="m1", level="0.9") == 1
