"""Who is let in, and when who is not may come again."""

import pytest

from services.planner.admission import RETRY_AFTER_S, check_admission
from services.planner.settings import GrouperSettings
from services.planner.state import FORECAST_MEMORY_S, GrouperState, RecentIds
from shared.contracts.base import RequestId, TenantId
from shared.contracts.errors import CapacityError
from shared.contracts.lanes import inbox_name
from shared.contracts.plans import LaneForecast, LanesForecast
from shared.contracts.requests import QueuedRequest
from solver.routing.shares import TenantShares
from tests.clocks import NOW
from tests.queued import BATCH, BEST_EFFORT, OTHER, a_request, lane_of

GREEDY = TenantId("greedy")


@pytest.fixture
def state() -> GrouperState:
    return GrouperState(
        shares=TenantShares(max_share=0.6, free_tokens=0), recent=RecentIds(capacity=8)
    )


def outstanding(state: GrouperState, tenant: TenantId, tokens: int) -> None:
    state.admit(RequestId(f"of {tenant}"), tenant, tokens, at=NOW)


def foreseen(
    state: GrouperState, request: QueuedRequest, *, wait_s: float | None, late: float
) -> None:
    lane = LaneForecast(lane=request.lane, wait_s=wait_s, late_probability=late)
    state.on_forecast(LanesForecast(epoch=1, at=NOW, lanes=(lane,)), NOW)


def refusal(
    request: QueuedRequest, state: GrouperState, *, now: float = NOW, **settings: object
) -> CapacityError:
    with pytest.raises(CapacityError) as refused:
        check_admission(request, state, GrouperSettings(**settings), now)
    return refused.value


class TestTenants:
    def test_without_limits_everybody_is_let_in(self, state: GrouperState):
        outstanding(state, GREEDY, 10**6)

        check_admission(a_request(tenant=GREEDY), state, GrouperSettings(), NOW)

    def test_a_tenant_at_its_limit_is_refused_and_told_what_it_is(self, state: GrouperState):
        outstanding(state, GREEDY, 990)
        error = refusal(a_request(tenant=GREEDY), state, max_tenant_tokens=1000)

        assert "'greedy' has 990 tokens outstanding and asks for 28; its limit is 1000" in str(
            error
        )
        assert error.retry_after_s == RETRY_AFTER_S

    def test_others_are_not_harmed(self, state: GrouperState):
        outstanding(state, GREEDY, 990)
        settings = GrouperSettings(max_tenant_tokens=1000)

        check_admission(a_request(tenant=TenantId("modest")), state, settings, NOW)

    def test_a_limit_of_its_own_goes_before_that_of_all(self, state: GrouperState):
        outstanding(state, GREEDY, 990)
        settings = GrouperSettings(max_tenant_tokens=10, tenant_tokens={"greedy": 2000})

        check_admission(a_request(tenant=GREEDY), state, settings, NOW)

    def test_the_lanes_work_says_when_to_come_again(self, state: GrouperState):
        outstanding(state, GREEDY, 990)
        request = a_request(tenant=GREEDY)
        foreseen(state, request, wait_s=42.0, late=0.0)

        assert refusal(request, state, max_tenant_tokens=1000).retry_after_s == 42.0


class TestLanes:
    def test_what_would_be_late_is_taken_by_default(self, state: GrouperState):
        request = a_request(slo=BATCH)
        foreseen(state, request, wait_s=500.0, late=1.0)

        check_admission(request, state, GrouperSettings(), NOW)

    def test_or_refused_until_the_lane_has_been_worked_off(self, state: GrouperState):
        """A hundred seconds to the deadline, five hundred to its turn."""
        request = a_request(slo=BATCH)
        foreseen(state, request, wait_s=500.0, late=0.99)
        error = refusal(request, state, refuse_late_from=0.95)

        assert error.retry_after_s == pytest.approx(400.0)
        assert request.lane in str(error)

    def test_a_lane_that_nobody_serves_is_tried_again_in_an_hour(self, state: GrouperState):
        request = a_request(slo=BATCH)
        foreseen(state, request, wait_s=None, late=1.0)

        assert refusal(request, state, refuse_late_from=0.95).retry_after_s == 3600.0

    @pytest.mark.parametrize(
        ("late", "now"), [(0.9, NOW), (0.99, NOW + FORECAST_MEMORY_S + 1)], ids=["safe", "stale"]
    )
    def test_what_may_be_in_time_is_taken(self, state: GrouperState, late: float, now: float):
        request = a_request(slo=BATCH)
        foreseen(state, request, wait_s=500.0, late=late)

        check_admission(request, state, GrouperSettings(refuse_late_from=0.95), now)

    def test_best_effort_waits_as_long_as_it_takes(self, state: GrouperState):
        request = a_request(slo=BEST_EFFORT)
        foreseen(state, request, wait_s=500.0, late=1.0)

        check_admission(request, state, GrouperSettings(refuse_late_from=0.95), NOW)


class TestSinceThePlan:
    """A lane's wait of 10 ± 1 s, known since `NOW`; each request there makes it 2 s longer."""

    @pytest.fixture
    def request_(self) -> QueuedRequest:
        return a_request(slo=BATCH)

    @pytest.fixture
    def told(self, state: GrouperState, request_: QueuedRequest) -> LaneForecast:
        lane = LaneForecast(lane=request_.lane, wait_s=10.0, wait_sd_s=1.0, request_s=2.0)
        state.on_forecast(
            LanesForecast(epoch=1, at=NOW, age_s=0.5, lanes=(lane,), groupers=2), NOW + 0.5
        )
        return lane

    @pytest.mark.usefixtures("told")
    def test_a_burst_is_let_in_only_as_far_as_it_is_in_time(
        self, state: GrouperState, request_: QueuedRequest
    ):
        """
        90 s are left above the wait, 4 s of which each one takes: another grouper has as many.
        """
        settings = GrouperSettings(refuse_late_from=0.5)
        for _ in range(23):
            check_admission(request_, state, settings, NOW)
            state.count(request_, queue=request_.lane, work_tokens=1, at=NOW + 0.25)
        error = refusal(request_, state, refuse_late_from=0.5)

        assert "is late with probability 0.5" in str(error)
        assert error.retry_after_s == pytest.approx(10.0 + 23 * 4.0 - 100.0)

    @pytest.mark.usefixtures("told")
    def test_waits_are_told_as_of_now(self, state: GrouperState, request_: QueuedRequest):
        for at in (NOW - 1.0, NOW + 1.0):
            state.count(request_, queue=request_.lane, work_tokens=1, at=at)
        wait = state.wait_forecast(request_, NOW + 3.0)

        assert wait is not None
        assert wait.mean_s == pytest.approx(3.0 + 10.0 - 3.0 + 2 * 2.0)
        assert wait.sd_s == pytest.approx(1.0 + 0.1 * 4.0)

    @pytest.mark.usefixtures("told")
    @pytest.mark.parametrize("queue", [lane_of(BATCH).overflow_name, inbox_name("i1")])
    def test_what_went_elsewhere_is_not_waited_for(
        self, state: GrouperState, request_: QueuedRequest, queue: str
    ):
        state.count(request_, queue=queue, work_tokens=1, at=NOW + 1.0)
        wait = state.wait_forecast(request_, NOW + 3.0)

        assert wait is not None
        assert wait.mean_s == pytest.approx(3.0 + 10.0 - 3.0)
        counted = state.lanes[request_.lane].total(request_.lane)
        assert (state.admitted, counted.requests) == (1, 1)
        assert counted.routed == (queue == inbox_name("i1"))

    @pytest.mark.usefixtures("told")
    def test_of_what_is_not_known_nothing_is_told(self, state: GrouperState):
        assert state.wait_forecast(a_request(slo=BATCH, base=OTHER), NOW) is None
        assert state.wait_forecast(a_request(slo=BATCH), NOW + 11.0) is None

    def test_nor_of_a_lane_that_nobody_serves(self, state: GrouperState):
        request = a_request(slo=BATCH)
        foreseen(state, request, wait_s=None, late=1.0)

        assert state.wait_forecast(request, NOW) is None

    @pytest.mark.usefixtures("told")
    def test_who_is_served_next_is_let_in_however_short_its_time(
        self, state: GrouperState, request_: QueuedRequest
    ):
        lane = LaneForecast(
            lane=request_.lane, wait_s=1.5, wait_sd_s=1.0, request_s=2.0, tail_s=500.0
        )
        state.on_forecast(LanesForecast(epoch=1, at=NOW, lanes=(lane,)), NOW)

        check_admission(request_, state, GrouperSettings(refuse_late_from=0.5), NOW)

    @pytest.mark.usefixtures("told")
    def test_what_is_on_its_way_into_the_lane_counts(
        self, state: GrouperState, request_: QueuedRequest
    ):
        with state.entry(request_.lane), state.entry(request_.lane):
            before = state.wait_forecast(request_, NOW + 0.25)
        after = state.wait_forecast(request_, NOW + 0.25)

        assert before is not None
        assert after is not None
        assert before.mean_s - after.mean_s == pytest.approx(2 * 2 * 2.0)
        assert not state.entering
