"""Admission, refusals, and their retry delays."""

import pytest
from cachetools import FIFOCache

from services.planner.grouper.admission import RETRY_AFTER_S, check_admission
from services.planner.settings import GrouperSettings
from services.planner.state import FORECAST_MEMORY_S, GrouperState
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
    return GrouperState(shares=TenantShares(max_share=0.6, free_tokens=0), recent=FIFOCache(8))


def outstanding(state: GrouperState, tenant: TenantId, tokens: int) -> None:
    state.admit(RequestId(f"of {tenant}"), tenant, tokens, at=NOW)


def forecasted(
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
    def test_without_limits_every_request_is_admitted(self, state: GrouperState):
        outstanding(state, GREEDY, 10**6)

        check_admission(a_request(tenant=GREEDY), state, GrouperSettings(), NOW)

    def test_tenant_at_its_limit_is_refused_with_the_limit(self, state: GrouperState):
        outstanding(state, GREEDY, 990)
        error = refusal(a_request(tenant=GREEDY), state, max_tenant_tokens=1000)

        assert "'greedy' has 990 tokens outstanding and requests 28 more; its limit is 1000" in str(
            error
        )
        assert error.retry_after_s == RETRY_AFTER_S

    def test_other_tenants_are_not_affected(self, state: GrouperState):
        outstanding(state, GREEDY, 990)
        settings = GrouperSettings(max_tenant_tokens=1000)

        check_admission(a_request(tenant=TenantId("modest")), state, settings, NOW)

    def test_limit_of_one_tenant_overrides_the_general_limit(self, state: GrouperState):
        outstanding(state, GREEDY, 990)
        settings = GrouperSettings(max_tenant_tokens=10, tenant_tokens={"greedy": 2000})

        check_admission(a_request(tenant=GREEDY), state, settings, NOW)

    def test_retry_delay_follows_the_work_of_the_lane(self, state: GrouperState):
        outstanding(state, GREEDY, 990)
        request = a_request(tenant=GREEDY)
        forecasted(state, request, wait_s=42.0, late=0.0)

        assert refusal(request, state, max_tenant_tokens=1000).retry_after_s == 42.0


class TestLanes:
    def test_late_request_is_admitted_by_default(self, state: GrouperState):
        request = a_request(slo=BATCH)
        forecasted(state, request, wait_s=500.0, late=1.0)

        check_admission(request, state, GrouperSettings(), NOW)

    def test_late_request_is_refused_until_the_lane_has_drained(self, state: GrouperState):
        """The deadline is in 100 s, but the forecast wait is 500 s."""
        request = a_request(slo=BATCH)
        forecasted(state, request, wait_s=500.0, late=0.99)
        error = refusal(request, state, refuse_late_from=0.95)

        assert error.retry_after_s == pytest.approx(400.0)
        assert request.lane in str(error)

    def test_retry_delay_of_an_unserved_lane_is_an_hour(self, state: GrouperState):
        request = a_request(slo=BATCH)
        forecasted(state, request, wait_s=None, late=1.0)

        assert refusal(request, state, refuse_late_from=0.95).retry_after_s == 3600.0

    @pytest.mark.parametrize(
        ("late", "now"), [(0.9, NOW), (0.99, NOW + FORECAST_MEMORY_S + 1)], ids=["safe", "stale"]
    )
    def test_request_that_may_be_in_time_is_admitted(
        self, state: GrouperState, late: float, now: float
    ):
        request = a_request(slo=BATCH)
        forecasted(state, request, wait_s=500.0, late=late)

        check_admission(request, state, GrouperSettings(refuse_late_from=0.95), now)

    def test_best_effort_is_admitted_regardless_of_its_wait(self, state: GrouperState):
        request = a_request(slo=BEST_EFFORT)
        forecasted(state, request, wait_s=500.0, late=1.0)

        check_admission(request, state, GrouperSettings(refuse_late_from=0.95), NOW)


class TestSinceThePlan:
    """Requests since a forecast at `NOW`: a wait of 10 ± 1 s, to which each request adds 2 s."""

    @pytest.fixture
    def request_(self) -> QueuedRequest:
        return a_request(slo=BATCH)

    @pytest.fixture
    def reported(self, state: GrouperState, request_: QueuedRequest) -> LaneForecast:
        lane = LaneForecast(lane=request_.lane, wait_s=10.0, wait_sd_s=1.0, request_s=2.0)
        state.on_forecast(
            LanesForecast(epoch=1, at=NOW, age_s=0.5, lanes=(lane,), groupers=2), NOW + 0.5
        )
        return lane

    @pytest.mark.usefixtures("reported")
    def test_burst_is_admitted_only_while_in_time(
        self, state: GrouperState, request_: QueuedRequest
    ):
        """90 s are left; each request adds 4 s, because the other grouper gets as many requests."""
        settings = GrouperSettings(refuse_late_from=0.5)
        for _ in range(23):
            check_admission(request_, state, settings, NOW)
            state.count(request_, queue=request_.lane, at=NOW + 0.25)
        error = refusal(request_, state, refuse_late_from=0.5)

        assert "is late with probability 0.5" in str(error)
        assert error.retry_after_s == pytest.approx(10.0 + 23 * 4.0 - 100.0)

    @pytest.mark.usefixtures("reported")
    def test_forecasts_are_updated_to_now(self, state: GrouperState, request_: QueuedRequest):
        for at in (NOW - 1.0, NOW + 1.0):
            state.count(request_, queue=request_.lane, at=at)
        wait = state.wait_forecast(request_, NOW + 3.0)

        assert wait is not None
        assert wait.mean_s == pytest.approx(3.0 + 10.0 - 3.0 + 2 * 2.0)
        assert wait.sd_s == pytest.approx(1.0 + 0.1 * 4.0)

    @pytest.mark.usefixtures("reported")
    @pytest.mark.parametrize("queue", [lane_of(BATCH).overflow_name, inbox_name("i1")])
    def test_requests_that_went_elsewhere_are_not_waited_for(
        self, state: GrouperState, request_: QueuedRequest, queue: str
    ):
        state.count(request_, queue=queue, at=NOW + 1.0)
        wait = state.wait_forecast(request_, NOW + 3.0)

        assert wait is not None
        assert wait.mean_s == pytest.approx(3.0 + 10.0 - 3.0)
        counted = state.lanes[request_.lane].total(request_.lane)
        assert (state.admitted, counted.requests) == (1, 1)
        assert counted.routed == (queue == inbox_name("i1"))

    @pytest.mark.usefixtures("reported")
    def test_unknown_lane_has_no_forecast(self, state: GrouperState):
        assert state.wait_forecast(a_request(slo=BATCH, base=OTHER), NOW) is None
        assert state.wait_forecast(a_request(slo=BATCH), NOW + 11.0) is None

    def test_unserved_lane_has_no_wait_forecast(self, state: GrouperState):
        request = a_request(slo=BATCH)
        forecasted(state, request, wait_s=None, late=1.0)

        assert state.wait_forecast(request, NOW) is None

    @pytest.mark.usefixtures("reported")
    def test_next_request_is_admitted_however_short_its_time(
        self, state: GrouperState, request_: QueuedRequest
    ):
        lane = LaneForecast(
            lane=request_.lane, wait_s=1.5, wait_sd_s=1.0, request_s=2.0, tail_s=500.0
        )
        state.on_forecast(LanesForecast(epoch=1, at=NOW, lanes=(lane,)), NOW)

        check_admission(request_, state, GrouperSettings(refuse_late_from=0.5), NOW)

    @pytest.mark.usefixtures("reported")
    def test_requests_being_published_to_the_lane_count(
        self, state: GrouperState, request_: QueuedRequest
    ):
        with state.entry(request_.lane), state.entry(request_.lane):
            before = state.wait_forecast(request_, NOW + 0.25)
        after = state.wait_forecast(request_, NOW + 0.25)

        assert before is not None
        assert after is not None
        assert before.mean_s - after.mean_s == pytest.approx(2 * 2 * 2.0)
        assert not state.entering
