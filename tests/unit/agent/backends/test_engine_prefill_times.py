"""First scheduled to first token: what was preempted in between does not count."""

import pytest

from services.agent.backends.prefill_times import PrefillTimes
from services.agent.backends.vllm.first_tokens import PrefillTeller, told_prefill_s


class Output:
    """As much of vLLM's output of a step as matters here."""

    def __init__(self, request_id: str, *token_ids: int) -> None:
        self.request_id = request_id
        self.new_token_ids = list(token_ids)
        self.kv_transfer_params: dict[str, object] | None = None
        self.finish_reason: str | None = None


def test_time_preempted_does_not_count():
    times = PrefillTimes()
    times.begin("r", 10.0)
    times.pause("r", 11.0)
    times.begin("r", 15.0)

    assert times.end("r", 15.5) == pytest.approx(1.5)
    assert times.end("r", 16.0) is None
    assert len(times) == 0


def test_what_was_never_scheduled_took_no_time():
    times = PrefillTimes()
    times.pause("r", 1.0)
    times.forget("r")

    assert times.end("r", 2.0) is None


def test_what_is_over_is_forgotten_even_while_preempted():
    times = PrefillTimes()
    times.begin("r", 1.0)
    times.pause("r", 2.0)
    times.forget("r")

    assert len(times) == 0


def test_it_travels_from_the_first_token_to_the_last_and_what_is_there_stays():
    teller = PrefillTeller()
    teller.times.begin("a", 1.0)
    teller.times.begin("b", 1.0)
    first, none_yet, second = Output("a", 7), Output("b"), Output("a", 8)
    first.kv_transfer_params = {"other": 1}
    teller.tell([first, none_yet], 1.25)
    teller.tell([second], 2.0)

    told = [told_prefill_s(each.kv_transfer_params) for each in (first, none_yet, second)]
    assert told == [0.25, 0.0, 0.25]
    assert first.kv_transfer_params["other"] == 1
    assert second.kv_transfer_params is not None
    assert "other" not in second.kv_transfer_params


def test_nothing_is_kept_of_what_is_over():
    teller = PrefillTeller()
    for request_id in ("ended", "stopped", "never begun"):
        teller.times.begin(request_id, 1.0)
    teller.tell([Output("ended", 7), Output("stopped", 7)], 2.0)
    last = Output("ended", 8)
    last.finish_reason = "length"
    teller.tell([last], 3.0)
    teller.forget("stopped")
    teller.forget("never begun")
    again = Output("stopped", 9)
    teller.tell([again], 4.0)

    assert told_prefill_s(last.kv_transfer_params) == 1.0
    assert again.kv_transfer_params is None
    assert len(teller) == 0
