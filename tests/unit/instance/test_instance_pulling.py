"""Pulls: which queues are asked and when, and what happens to a request that comes from one."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from shared.contracts.estimates import Calibration, OutputTokens
from shared.contracts.lanes import inbox_name, relegated_name
from shared.contracts.qos import Slo
from shared.contracts.requests import Progress, QueuedRequest
from shared.contracts.telemetry import Capability, PullState
from solver.instance import commands as do
from solver.instance import events as ev
from solver.instance.end import CANCELLED
from solver.scheduling.pull_room import PullBounds
from tests.clocks import NOW
from tests.queued import BATCH, BEST_EFFORT, MODEL, OTHER, a_request, lane_of, sampling
from tests.unit.instance.driver import OURS, Driver, R, a_profile

LANE, RESUME, RELEGATED = lane_of().queue_name, lane_of().resume_name, relegated_name(MODEL)
INBOX, MINE, THEIRS = inbox_name(OURS), "reply.mine", "reply.theirs"


def full(**settings: Any) -> Driver:
    """An instance whose only slot is taken by a request that generates."""
    engine = {"max_running": 1, "kv_capacity_tokens": 1_000_000}
    driver = Driver(a_request("runs"), engine=engine, **settings)
    driver.generate("runs")
    return driver


@pytest.mark.parametrize(
    ("window", "least", "most"), [(16, 6, 24), (1, 0, 0)], ids=["empty", "full"]
)
def test_instance_without_work_sleeps_until_its_next_poll(window: int, least: int, most: int):
    """Up to three pulls ask lane and inbox after 1, 2, 4 s; with a full window, none does."""
    driver = Driver(a_request("r"), bounds=PullBounds(window=window))
    if window > 1:
        driver.end("r")
    assert least <= driver.polls(9.9) <= most


def retire(driver: Driver) -> None:
    driver.give(ev.Retiring(queues=(LANE,)))
    assert driver.polls(10.0, lane=LANE) == 0
    driver.give(ev.Retired(deleted=(LANE,)))


def lose(driver: Driver) -> None:
    driver.absent = {LANE}
    driver.wait(1.0)


@pytest.mark.parametrize("miss", [retire, lose])
def test_absent_queue_is_asked_again_after_a_notice_only(miss: Callable[[Driver], None]):
    driver = Driver()
    driver.notice(LANE)
    miss(driver)
    assert driver.polls(200.0, lane=LANE) == 0

    driver.absent.clear()
    driver.put(a_request("r", arrived_at=driver.now))
    assert driver.running == {"r"}


def test_notice_that_precedes_the_answer_of_a_poll_is_not_lost():
    """The lane was empty for the broker, and has got a request since then."""
    driver = Driver(pulls=1)
    driver.notice(LANE)
    driver.waiting = {do.Get}
    driver.notice(LANE)
    asked, asked_at = driver.of(do.Get), driver.now
    driver.wait(0.1)
    driver.notice(LANE)
    empty = ev.PullEnded(queue=LANE, outcome=ev.PullOutcome.EMPTY, asked_at=asked_at)
    driver.give(empty)
    assert driver.of(do.Get) == [*asked, do.Get(queue=LANE)]


def test_queue_that_the_leader_keeps_is_asked_again():
    driver = Driver()
    driver.notice(LANE)
    driver.give(ev.Retiring(queues=(LANE,)))
    driver.queues[LANE].append(a_request("r"))
    driver.give(ev.Retired(kept=(LANE,)))
    assert driver.running == {"r"}


def test_unreachable_broker_is_asked_again_after_a_pause():
    driver = Driver()
    driver.connected = False
    driver.put(a_request("r"))
    assert driver.polls(0.4) == 0

    driver.connected = True
    driver.wait(0.2)
    assert driver.running == {"r"}


def test_second_copy_joins_a_run():
    """After a lost connection, the broker delivers the message again."""
    driver = Driver(a_request("r"), a_request("r"))
    driver.end("r")
    assert (driver.outcome("r"), len(driver.departed[R].tags)) == ("completed", 2)


@pytest.mark.parametrize("hops", [(0, 2), (2, 0), (2, 2)], ids=["newer", "older", "same"])
def test_newest_copy_of_a_waiting_request_is_kept(hops: tuple[int, int]):
    """The producer has seen the newer message's hop, and would stop a run of the older one."""
    driver = full()
    copies = [
        a_request("r", hop=hop, progress=Progress(token_ids=(7,) * hop, first_token_at=NOW + hop))
        for hop in hops
    ]
    driver.put(*copies)
    held = driver.held("r")
    assert (held.request, len(held.tags)) == (max(copies, key=lambda each: each.attempts.hop), 2)
    assert (held.generated, held.first_token_at) == (2, NOW + 2)


@pytest.mark.parametrize(
    ("fields", "queue"),
    [
        ({"reply_to": MINE, "hop": 2}, RESUME),
        ({"reply_to": THEIRS}, RESUME),
        ({"reply_to": THEIRS, "relegated": True}, RELEGATED),
    ],
    ids=["newer than a run", "of another producer", "of another producer, relegated"],
)
def test_copy_that_must_not_join_returns_and_is_not_pulled_at_once(
    fields: dict[str, Any], queue: str
):
    driver, copy = Driver(), a_request("r", **fields)
    driver.put(a_request("r", reply_to=MINE))
    driver.put(copy, queue=queue)
    driver.notice(queue)
    driver.wait(1.0)
    again = replace(copy.attempts, hop=copy.attempts.hop + 1)
    (back,) = driver.queues[queue]
    assert (back.reply_to, back.attempts) == (copy.reply_to, again)
    assert len(driver.held("r").tags) == 1


def test_newer_copy_survives_a_stop_of_the_older_run():
    driver = Driver(a_request("r"))
    driver.put(a_request("r", hop=2), queue=RESUME)
    driver.give(ev.RunStopped(request_id=R, run_id=driver.runs[R].run_id))
    assert (driver.outcome("r"), driver.departed[R].publications) == ("stopped by its producer", ())
    assert [each.attempts.hop for each in driver.queues[RESUME]] == [3]


def test_infeasible_request_is_relegated():
    """A prefill of 10 s cannot meet a TTFT target of 5 s."""
    driver = Driver()
    driver.profile(a_profile(constant_s=10.0))
    driver.put(a_request("r"))
    assert (driver.running, driver.requeued("r").queue) == (set(), RELEGATED)
    driver.notice(RELEGATED)
    assert (driver.running, driver.held("r").request.attempts.relegated) == ({"r"}, True)


@pytest.mark.parametrize(("share", "relegated"), [(0.0, 1), (0.9, 0)])
def test_prefill_that_is_expected_in_the_prefix_cache_does_not_make_a_request_late(
    share: float, relegated: int
):
    """A prefill of 1,000 tokens takes 10 s, and the target is 5 s."""
    driver = Driver()
    request = a_request("r", prompt_tokens=1000)
    shares = {request.application: share}
    driver.profile(a_profile(constant_s=0.001, linear_s=0.01, cached_share=shares))
    driver.put(request)

    assert driver.instance.totals.relegated == relegated


@pytest.mark.parametrize(("pace_s", "relegated"), [(0.01, 0), (0.2, 1)])
def test_an_answer_takes_as_long_as_the_iterations_of_the_running_requests(
    pace_s: float, relegated: int
):
    """An answer of 100 tokens takes 1 s alone, and the target is 10 s."""
    driver = Driver(a_request("before"), engine={"pace_s": pace_s})
    driver.profile(a_profile(constant_s=0.01))
    driver.put(a_request("r", slo=Slo(ttlt_s=10.0), sampling=sampling(100)))

    assert driver.instance.totals.relegated == relegated


SERVER = frozenset({Capability.RESUME})


@pytest.mark.parametrize(
    ("capabilities", "num_before", "relegated"),
    [(SERVER, 1, 1), (SERVER, 0, 0), (None, 1, 0)],
    ids=["a busy server", "an idle server", "an engine with an order of its own"],
)
def test_prefill_of_a_busy_server_is_expected_to_take_as_long_as_those_before(
    capabilities: frozenset[Capability] | None, num_before: int, relegated: int
):
    driver = Driver() if capabilities is None else Driver(capabilities=capabilities)
    driver.profile(a_profile(constant_s=1.0))
    slo = Slo(ttft_s=1.2, tbt_s=0.1)
    for number in range(3):  # each takes twice as long as predicted
        driver.put(a_request(f"r{number}", slo=slo, arrived_at=driver.now))
        driver.wait(2.0)
        driver.generate(f"r{number}")
        driver.end(f"r{number}")
        driver.wait(2.0)

    before = [a_request(f"b{n}", slo=slo, arrived_at=driver.now) for n in range(num_before)]
    driver.put(*before)
    driver.wait(2.0)
    for each in before:
        driver.generate(each.request_id)
    driver.put(a_request("next", slo=Slo(ttft_s=1.5, tbt_s=0.1), arrived_at=driver.now))
    assert driver.status.totals.relegated == relegated


@pytest.mark.parametrize(("pace_s", "relegated"), [(0.15, 0), (6.0, 1), (math.inf, 1)])
def test_infeasibility_of_batch_work_uses_the_pace_under_load(pace_s: float, relegated: int):
    """
    24 tokens in iterations of 10 s each (1024 tokens) would exceed 100 s.

    Each held request needs 190 ms of prefill; together they exceed half of the bound.
    """
    driver = Driver(engine={"pace_s": pace_s})
    driver.profile(a_profile(constant_s=0.15, linear_s=0.01))
    driver.put(*(a_request() for _ in range(3)))
    driver.wait(0.2)
    driver.put(a_request(slo=BATCH))
    driver.wait(0.2)
    assert driver.status.totals.relegated == relegated
    assert len(driver.running) == 4 - relegated


def test_request_of_another_model_is_handed_back():
    """The pull from the lane began just before a model swap."""
    driver = Driver()
    driver.put(a_request("r", base=OTHER), queue=LANE)
    back = driver.requeued("r")
    assert (back.queue, back.attempts.hop) == (lane_of(model=OTHER).resume_name, 1)


@pytest.mark.parametrize(
    ("waiting", "stop"),
    [
        (do.Load, lambda driver: driver.give(ev.Draining())),
        (do.Load, lambda driver: driver.plan(OTHER)),
        (do.Start, Driver.die),
    ],
    ids=["drains", "swaps", "restarts"],
)
def test_instance_that_must_not_pull_only_empties_its_inbox(
    waiting: type[do.Command], stop: Callable[[Driver], None]
):
    """No other instance reads the inbox, so its requests return to their lanes."""
    driver = Driver()
    driver.notice(LANE)
    driver.waiting = {waiting}
    stop(driver)
    driver.put(a_request("waits"))
    driver.put(a_request("routed"), queue=INBOX)
    assert (driver.polls(5.0, lane=LANE), driver.status.takes_in) == (0, False)
    assert len(driver.queues[LANE]) == 1
    assert (driver.outcome("routed"), driver.requeued("routed").attempts.hop) == ("handed back", 1)


def test_instance_that_ends_pulls_nothing_at_all():
    driver = Driver()
    driver.give(ev.Draining(drain_s=5.0))
    driver.put(a_request("routed"), queue=INBOX)
    assert (driver.polls(60.0), len(driver.queues[INBOX])) == (0, 1)


@pytest.mark.parametrize(("reply_to", "ends"), [(MINE, True), (THEIRS, False)])
def test_cancelled_request_ends_when_it_is_pulled(reply_to: str, *, ends: bool):
    """Another producer's request with the same id does not."""
    driver = Driver()
    driver.give(ev.Cancelled(request_id=R, reply_to=MINE))
    driver.put(a_request("r", reply_to=reply_to))
    assert driver.running == (set() if ends else {"r"})
    outcomes = [each.publications for each in driver.departed.values()]
    assert outcomes == ([(do.Failure(error=CANCELLED),)] if ends else [])


def test_requests_fill_the_window_until_their_first_token():
    """Two requests in an engine with eight slots fill a window of two."""
    driver = Driver(*(a_request(f"r{number}") for number in range(4)), bounds=PullBounds(window=2))
    assert driver.running == {"r0", "r1"}

    driver.generate("r0")
    assert driver.running == {"r0", "r1", "r2"}
    assert driver.status.pulled_by_lane == {LANE: 3}


@pytest.mark.parametrize(
    ("engine", "token_rate_per_s", "pulled"),
    [({}, 10.0, 9), ({"kv_capacity_tokens": 30}, 1000.0, 2)],
    ids=["seconds", "tokens"],
)
def test_work_that_cannot_start_soon_stays_in_its_lane(
    engine: dict[str, Any], token_rate_per_s: float, pulled: int
):
    """Beyond eight slots, each of 28 tokens is 2.8 s of work; the bound is 1 s or 30 tokens."""
    driver = Driver(engine=engine)
    driver.profile(a_profile(latency=None, token_rate_per_s=token_rate_per_s))
    driver.put(*(a_request() for _ in range(12)))
    assert len(driver.queues[LANE]) == 12 - pulled


def test_best_effort_has_a_share_of_the_window():
    driver, lane = Driver(bounds=PullBounds(best_effort_window=2)), lane_of(BEST_EFFORT).queue_name
    driver.put(*(a_request(f"f{number}", slo=BEST_EFFORT) for number in range(4)))
    assert (driver.running, driver.polls(10.0, lane=lane)) == ({"f0", "f1"}, 0)

    driver.generate("f0")
    assert driver.running == {"f0", "f1", "f2"}


def test_waiting_best_effort_does_not_block_urgent_requests():
    """The window has 4 s of best-effort work, four times the bound."""
    driver = full()
    driver.put(a_request("dump", slo=BEST_EFFORT, sampling=sampling(2000)))
    driver.put(a_request("more", slo=BEST_EFFORT), a_request("urgent"))
    assert driver.window == {"dump", "urgent"}


def pulled_four(request: QueuedRequest, max_running: int, bounds: PullBounds) -> PullState:
    """Pulled work of an instance with four such requests and a busy slot."""
    driver = full(bounds=bounds)
    error = Calibration(count=50, bias=0.0, spread=0.3, at=0.0)
    answers = {"*": OutputTokens(mean=80.0, sd=40.0, count=100)}
    driver.profile(a_profile(0.0, 0.001, latency_calibration=error, output_tokens=answers))
    driver.look(max_running=max_running)
    driver.put(*(replace(request, request_id=name) for name in "abcd"))
    driver.wait(0.5)
    assert driver.status.pull is not None
    return driver.status.pull


@pytest.mark.parametrize(
    ("max_running", "level", "expected_s"),
    [
        (100, 0.5, 4 * 0.02),
        (100, 0.9, 4 * 0.02 + 1.2816 * 0.3 * 2 * 0.02),
        (1, 0.5, 4 * 0.1),
        (1, 0.9, 4 * 0.1 + 1.2816 * 2 * 0.04),
    ],
)
def test_backlog_is_a_quantile_of_the_prediction(max_running: int, level: float, expected_s: float):
    """Without a free slot, waiting requests count with prefill and answer."""
    request = a_request(prompt_tokens=20, sampling=sampling(5000, ignore_eos=False))
    bounds = PullBounds(backlog_level=level, max_backlog_s=10.0)
    pulled = pulled_four(request, max_running, bounds)
    assert pulled.backlog_s == pytest.approx(expected_s, rel=1e-4)


def test_long_prefills_count_partly_for_pulls_and_fully_for_plans():
    request = a_request(prompt_tokens=4000, sampling=sampling(1))
    pulled = pulled_four(request, 100, PullBounds(max_backlog_s=2.0))
    assert pulled.backlog_s == pytest.approx(4 * 0.5)
    assert pulled.whole_backlog_s == pytest.approx(4 * 4.0)
