"""Views of an instance: the situation for the choice of operations, and its status."""

import math
from typing import Any

import pytest

from shared.contracts.control import EvictRequest
from shared.contracts.estimates import OutputTokens
from shared.contracts.qos import Slo
from solver.instance import commands as do
from solver.instance.views import kv_costs, situation
from solver.planning.lso.facts import facts_of
from solver.planning.lso.situation import RunningWork
from tests.queued import BEST_EFFORT, a_request, sampling
from tests.unit.instance.driver import OURS, Driver, R, a_profile

PRIOR_BYTES_PER_S = float(4 << 30)


def only_work(driver: Driver) -> RunningWork:
    (work,) = situation(driver.instance, driver.now).running
    return work


def test_requests_that_are_ending_do_not_count_as_running():
    """If requests that leave did not count as gone, their room would be freed twice."""
    driver = Driver(a_request("stays"), a_request("r", slo=BEST_EFFORT))
    before = situation(driver.instance, driver.now)
    driver.waiting = {do.Abort}
    driver.ask(EvictRequest(instance_id=OURS, request_id=R))
    after = situation(driver.instance, driver.now)

    assert [work.request_id for work in before.running] == ["stays", "r"]
    assert [work.request_id for work in after.running] == ["stays"]
    assert after.free_tokens == before.free_tokens + 28
    assert after.free_slots == before.free_slots + 1


@pytest.mark.parametrize(
    ("fields", "slack_s"),
    [
        ({"slo": Slo(ttft_s=5.0, tbt_s=1.0)}, 10.0),
        ({"slo": Slo(ttft_s=5.0)}, math.inf),
        ({"slo": Slo(ttlt_s=30.0)}, 30.0 - 0.01 * 20),
        ({"slo": Slo(ttft_s=5.0, ttlt_s=8.0)}, 8.0 - 0.01 * 20),
        ({"slo": BEST_EFFORT}, math.inf),
        ({"slo": Slo(ttlt_s=30.0), "relegated": True}, math.inf),
    ],
    ids=["token", "no pace", "end", "end of a chat", "best effort", "relegated"],
)
def test_slack_ends_at_the_next_token_or_the_completion_deadline(
    fields: dict[str, Any], slack_s: float
):
    """Five of 25 tokens are generated; each further token takes 10 ms by the profile."""
    driver = Driver(a_request("r", sampling=sampling(25), **fields))
    driver.generate("r", 5)
    assert (only_work(driver).remaining_s, only_work(driver).slack_s) == (None, math.inf)
    driver.profile(a_profile())

    assert only_work(driver).remaining_s == pytest.approx(0.2)
    assert only_work(driver).slack_s == pytest.approx(slack_s)


@pytest.mark.parametrize(
    ("num_tokens", "left"),
    [(1, 99), (40, 60), (90, 10), (99, 10), (500, 10), (2040, 8)],
    ids=["begun", "under way", "nearly done", "about to end", "longer than expected", "limit"],
)
def test_remaining_time_follows_from_the_expected_answer(num_tokens: int, left: int):
    """The expected answer has 100 tokens, the limit is 2048; each token takes 10 ms."""
    driver = Driver()
    driver.profile(a_profile(output_tokens={"*": OutputTokens(mean=100.0, sd=10.0, count=9)}))
    driver.put(a_request("r", sampling=sampling(2048, ignore_eos=False)))
    driver.generate("r", num_tokens)

    assert only_work(driver).remaining_s == pytest.approx(0.01 * left)


def test_transfer_rate_is_the_prior_until_measured():
    driver = Driver()
    assert kv_costs(driver.instance).transfer_bytes_per_s == PRIOR_BYTES_PER_S

    driver.look(restored_bytes_per_s=6e6)

    assert kv_costs(driver.instance).transfer_bytes_per_s == 6e6


def test_status_has_the_inputs_for_the_choice_of_operations():
    driver = Driver(a_request("stays"), a_request("dump", slo=BEST_EFFORT))
    reported = driver.status.lso

    assert reported is not None
    assert reported == facts_of(situation(driver.instance, driver.now))
    running = sorted((each.requests, each.gives_way) for each in reported.running)
    assert running == [(1, False), (1, True)]
    assert reported.transfer_bytes_per_s == PRIOR_BYTES_PER_S
