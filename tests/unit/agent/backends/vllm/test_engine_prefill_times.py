"""Prefill times: from first scheduling to the first token, without preempted time."""

import pytest

from services.agent.backends.prefill_times import PrefillTimes
from services.agent.backends.vllm.shared.prefill_reports import (
    PrefillTimeReporter,
    reported_prefill_s,
)


class Output:
    """The relevant fields of vLLM's output of a step."""

    def __init__(self, request_id: str, *token_ids: int) -> None:
        self.request_id = request_id
        self.new_token_ids = list(token_ids)
        self.pooling_output: object | None = None
        self.kv_transfer_params: dict[str, object] | None = None
        self.finish_reason: str | None = None


def test_preempted_time_does_not_count():
    times = PrefillTimes()
    times.begin("r", 10.0)
    times.pause("r", 11.0)
    times.begin("r", 15.0)

    assert times.end("r", 15.5) == pytest.approx(1.5)
    assert times.end("r", 16.0) is None
    assert len(times) == 0


def test_request_that_was_never_scheduled_has_no_time():
    times = PrefillTimes()
    times.pause("r", 1.0)
    times.forget("r")

    assert times.end("r", 2.0) is None


def test_finished_request_is_forgotten_even_while_preempted():
    times = PrefillTimes()
    times.begin("r", 1.0)
    times.pause("r", 2.0)
    times.forget("r")

    assert len(times) == 0


def test_prefill_time_is_in_the_output_with_the_first_tokens():
    reporter = PrefillTimeReporter()
    reporter.times.begin("a", 1.0)
    reporter.times.begin("b", 1.0)
    first, none_yet, second = Output("a", 7), Output("b"), Output("a", 8)
    first.kv_transfer_params = {"other": 1}
    reporter.annotate([first, none_yet], 1.25)
    reporter.annotate([second], 2.0)

    reported = [reported_prefill_s(each.kv_transfer_params) for each in (first, none_yet, second)]
    assert reported == [0.25, 0.0, 0.0]
    assert first.kv_transfer_params["other"] == 1


def test_prefill_time_is_in_the_output_of_a_pooled_input():
    reporter = PrefillTimeReporter()
    reporter.times.begin("a", 1.0)
    pooled = Output("a")
    pooled.pooling_output, pooled.finish_reason = "vector", "stop"
    reporter.annotate([pooled], 1.25)

    assert reported_prefill_s(pooled.kv_transfer_params) == 0.25


def test_no_state_of_finished_requests_is_kept():
    reporter = PrefillTimeReporter()
    for request_id in ("ended", "failed"):
        reporter.times.begin(request_id, 1.0)
    ended, failed = Output("ended", 7), Output("failed")
    ended.finish_reason, failed.finish_reason = "length", "error"
    reporter.annotate([ended, failed], 2.0)

    assert reported_prefill_s(ended.kv_transfer_params) == 1.0
    assert failed.kv_transfer_params is None
    assert len(reporter.times) == 0
