"""Attainment by class and tenant."""

from services.gateway.console.attainment import WINDOW_S, Attainment
from shared.contracts.base import InstanceId, RequestId, TenantId
from shared.contracts.qos import QosClass
from shared.contracts.telemetry import RequestObserved
from tests.clocks import NOW
from tests.queued import MODEL


def ended(
    tenant: str = "acme",
    *,
    first_s: float = 0.5,
    whole_s: float = 2.0,
    at: float = NOW,
    attained: bool = True,
    outcome: str = "completed",
) -> RequestObserved:
    """A request that ended at *at*."""
    arrived_at = at - whole_s
    return RequestObserved(
        request_id=RequestId("r"),
        instance_id=InstanceId("i"),
        model=MODEL,
        engine="e",
        device="d",
        application="",
        tenant=TenantId(tenant),
        qos_class=QosClass.INTERACTIVE,
        prompt_tokens=1,
        output_tokens=1,
        arrived_at=arrived_at,
        pulled_at=arrived_at,
        submitted_at=arrived_at,
        first_token_at=arrived_at + first_s if outcome == "completed" else 0.0,
        finished_at=at,
        attained=attained,
        outcome=outcome,
    )


def attainment_of(*requests: RequestObserved) -> Attainment:
    attainment = Attainment()
    for request in requests:
        attainment.add(request)
    return attainment


def test_a_row_has_the_share_in_time_and_the_times_of_completed_requests():
    attainment = attainment_of(
        ended(first_s=0.5),
        ended(first_s=1.5, attained=False),
        ended(attained=False, outcome="engine_error"),
    )

    (row,) = attainment.rows(NOW)

    assert (row.requests, row.attained, row.failed) == (3, 1 / 3, 1)
    assert row.first_token_s is not None
    assert row.first_token_s[0] == 1.0
    assert row.whole_s == (2.0, 2.0)


def test_the_busiest_tenant_comes_first():
    attainment = attainment_of(ended("small"), ended("large"), ended("large"))
    assert [row.tenant for row in attainment.rows(NOW)] == ["large", "small"]


def test_old_requests_no_longer_count():
    attainment = attainment_of(ended(at=NOW - WINDOW_S - 1), ended(at=NOW))
    assert [row.requests for row in attainment.rows(NOW)] == [1]


def test_requests_that_all_failed_have_no_times():
    (row,) = attainment_of(ended(outcome="engine_error", attained=False)).rows(NOW)
    assert (row.first_token_s, row.whole_s) == (None, None)
