"""Who is let in, and when who is not may come again."""

import pytest

from services.planner.admission import FORECAST_MEMORY_S, RETRY_AFTER_S, check_admission
from services.planner.settings import GrouperSettings
from services.planner.state import GrouperState, RecentIds
from shared.contracts.base import RequestId, TenantId
from shared.contracts.errors import CapacityError
from shared.contracts.plans import LaneForecast, LanesForecast
from shared.contracts.requests import QueuedRequest
from solver.routing.shares import TenantShares
from tests.clocks import NOW
from tests.queued import BATCH, BEST_EFFORT, a_request

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
