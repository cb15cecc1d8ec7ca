"""Latency figures: requests that were never served count as infinite."""

from ops.sim.request import Arrival, SimRequest
from ops.sim.summary import latency_quantiles, rolling_p99
from shared.contracts.base import RequestId
from shared.contracts.qos import Slo

INTERACTIVE = Slo(ttft_s=6, tbt_s=0.05)
BATCH = Slo(ttlt_s=600)


def served(
    *, arrived_at: float = 0.0, name: str = "Q1", slo: Slo = INTERACTIVE, first: float | None = None
) -> SimRequest:
    """A request with tokens at *first* and one second later; None: it was not served."""
    arrival = Arrival(
        arrived_at=arrived_at, prompt_tokens=10, output_tokens=2, class_name=name, slo=slo
    )
    request = SimRequest(RequestId(str(arrived_at)), arrival)
    if first is not None:
        request.generate(first)
        request.generate(first + 1)
        request.finished_at = first + 1
    return request


def test_latency_is_to_the_first_token_if_interactive_else_to_the_last() -> None:
    interactive, batch = served(first=2.0), served(slo=BATCH, first=2.0)

    assert (latency_quantiles([interactive]) or {})["p50"] == 2.0
    assert (latency_quantiles([batch]) or {})["p50"] == 3.0


def test_a_quantile_among_unserved_requests_is_infinite() -> None:
    quantiles = latency_quantiles([served(first=1.0), served(first=2.0), served()])

    assert quantiles == {"p50": 2.0, "p95": None, "p99": None}


def test_without_requests_there_is_no_latency() -> None:
    assert latency_quantiles([]) is None


def test_a_rolling_p99_is_of_the_window_of_arrival() -> None:
    requests = [
        served(arrived_at=0.0, first=1.0),
        served(arrived_at=59.0, first=62.0),
        served(arrived_at=60.0, first=70.0),
        served(arrived_at=130.0, first=131.0),
        served(arrived_at=0.0, name="Q2", slo=BATCH),
    ]
    found = rolling_p99(requests, window_s=60.0)

    assert found["Q1"] == {"median": 3.0, "max": 10.0}
    assert found["Q2"] == {"median": None, "max": None}
