"""QLM's table 1 from one batch, and from telemetry afterwards."""

import math
from dataclasses import replace

import pytest

from solver.prediction.service_parameters import (
    ServedRequest,
    ServiceParameters,
    ServiceTelemetry,
    from_first_batch,
)


def served(*, prompt: int = 100, output: int = 11, first_s: float = 1.0, end_s: float = 2.0):
    return ServedRequest(
        prompt_tokens=prompt,
        output_tokens=output,
        begun_at=50.0,
        first_token_at=50.0 + first_s,
        finished_at=50.0 + end_s,
    )


def test_one_batch_gives_prefill_decode_inefficiency_and_throughput():
    """Three requests of 111 tokens run for 2, 2 and 3 s; decodes take 0.1, 0.1 and 0.2 s."""
    found = from_first_batch([served(), served(), served(end_s=3.0)])

    assert found.prefill_s == pytest.approx(1.0)
    assert found.prefill_var == pytest.approx(0.0)
    assert found.decode_s_per_token == pytest.approx(0.1)
    assert found.inefficiency == pytest.approx(4 / 3)
    assert found.token_rate_per_s == pytest.approx(3 * 333 / 7)
    assert found.batch == 3


def test_one_long_answer_does_not_lower_the_rate():
    """With nine answers of 1 s and one of 10 s, the total time would give a tenth of the rate."""
    batch = [served(end_s=1.0, first_s=0.5) for _ in range(9)]
    batch.append(served(output=191, first_s=0.5, end_s=10.0))
    tokens = sum(each.tokens for each in batch)

    assert from_first_batch(batch).token_rate_per_s == pytest.approx(10 * tokens / 19)


def test_answers_of_one_token_have_no_decode():
    found = from_first_batch([served(output=1, end_s=1.0)])

    assert found.decode_s_per_token == 0.0
    assert found.inefficiency == 1.0


def test_an_empty_batch_is_rejected():
    with pytest.raises(ValueError, match="a first batch needs at least one request"):
        from_first_batch([])


def test_without_telemetry_the_first_batch_is_used():
    first = from_first_batch([served()])

    assert ServiceTelemetry(first).parameters == first


def test_telemetry_changes_throughput_batch_and_inefficiency():
    first = from_first_batch([served()])
    telemetry = ServiceTelemetry(first)
    for _ in range(20):
        telemetry.observe_busy(tokens=500.0, busy_s=2.0, running=8.0)
        telemetry.observe_request(served(first_s=0.5, end_s=2.0))
    found = telemetry.parameters

    assert found.token_rate_per_s == pytest.approx(250.0)
    assert found.batch == pytest.approx(8.0)
    assert found.decode_s_per_token == first.decode_s_per_token
    assert found.inefficiency == pytest.approx(1.5)
    assert found.prefill_s == pytest.approx(0.5)
    assert found.rate_error == pytest.approx(0.0)


def test_old_reports_are_forgotten():
    telemetry = ServiceTelemetry(from_first_batch([served()]), rate_memory=10.0)
    for rate in (100.0, 400.0):
        for _ in range(60):
            telemetry.observe_busy(tokens=rate, busy_s=1.0, running=1.0)

    assert telemetry.parameters.token_rate_per_s == pytest.approx(400.0, rel=0.01)


def test_rate_error_grows_with_variation_and_with_fewer_reports():
    def error(swing: float, reports: int) -> float:
        telemetry = ServiceTelemetry(from_first_batch([served()]))
        for number in range(reports):
            tokens = 100.0 + (swing if number % 2 else -swing)
            telemetry.observe_busy(tokens=tokens, busy_s=1.0, running=1.0)
        return telemetry.parameters.rate_error

    assert error(30.0, 10) > error(10.0, 10) > error(10.0, 100) > 0


@pytest.mark.parametrize(("tokens", "busy_s"), [(0.0, 1.0), (5.0, 0.0), (math.nan, 1.0)])
def test_intervals_without_information_are_ignored(tokens: float, busy_s: float):
    first = from_first_batch([served()])
    telemetry = ServiceTelemetry(first)
    telemetry.observe_busy(tokens=tokens, busy_s=busy_s, running=1.0)

    assert telemetry.parameters == first


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("token_rate_per_s", 0.0, "above 0"),
        ("rate_error", -0.1, "0 or more"),
        ("inefficiency", 0.9, "1 or more"),
        ("prefill_var", math.inf, "finite"),
    ],
)
def test_parameters_out_of_their_limits_are_rejected(field: str, value: float, limit: str):
    with pytest.raises(ValueError, match=f"{field} must .*{limit}"):
        replace(ServiceParameters(token_rate_per_s=1.0), **{field: value})


def test_times_out_of_order_are_rejected():
    with pytest.raises(ValueError, match="must be in this order"):
        served(first_s=3.0, end_s=2.0)
