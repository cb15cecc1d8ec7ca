"""Each ending of a request at an agent: published messages, then the acknowledgement."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.agent.aborting import end_run
from services.agent.backends.base import EngineOutput
from services.agent.endings import CANCELLED_ERROR
from services.agent.state import Ending as RunEnding
from services.agent.state import Pulled, Run
from shared.broker import topology
from shared.contracts.lanes import relegated_name
from shared.contracts.qos import Slo
from shared.contracts.requests import FinishReason, PromptText, QueuedRequest, WaitForecast
from tests.brokers import eventually
from tests.clocks import NOW
from tests.queued import BATCH, MODEL, a_request, lane_of, sampling
from tests.unit.agent.parts import EVICT_HOLD_S
from tests.unit.agent.rig import REPLY, AgentRig, decode_observed, listen

pytestmark = pytest.mark.virtual_time

RESUME = lane_of().resume_name
RELEGATED = relegated_name(MODEL)


def run_of(pulled: Pulled, *tokens: int) -> Run:
    run = Run(pulled=pulled, submitted_at=NOW)
    run.answer.push(EngineOutput(token_ids=tokens), run.run_id, NOW + 1)
    run.answer.finish_reason = FinishReason.LENGTH
    return run


Ending = Callable[[AgentRig, Pulled], Awaitable[None]]


async def complete(rig: AgentRig, pulled: Pulled) -> None:
    await rig.endings.complete(run_of(pulled, 20), prompt_tokens=3)


async def fail(rig: AgentRig, pulled: Pulled) -> None:
    await rig.endings.fail(pulled, CANCELLED_ERROR)


async def relegate(rig: AgentRig, pulled: Pulled) -> None:
    await rig.endings.relegate(pulled)


async def hand_back(rig: AgentRig, pulled: Pulled) -> None:
    await rig.endings.hand_back(pulled)


async def evict(rig: AgentRig, pulled: Pulled) -> None:
    await rig.endings.evict(run_of(pulled, 20))


async def crashed(rig: AgentRig, pulled: Pulled) -> None:
    await rig.endings.crashed(run_of(pulled, 20))


WAYS_OUT = [
    (complete, topology.REPLIES),
    (fail, topology.REPLIES),
    (fail, topology.DEAD),
    (relegate, topology.LANES),
    (hand_back, topology.LANES),
    (evict, topology.LANES),
    (crashed, topology.LANES),
]


@pytest.mark.parametrize(("ending", "exchange"), WAYS_OUT)
async def test_ack_follows_the_confirm_of_the_outcome(rig: AgentRig, ending: Ending, exchange: str):
    request = a_request(reply_to=REPLY)
    pulled = await rig.pulled(request)
    rig.broker.down.add(exchange)
    task = asyncio.create_task(ending(rig, pulled))
    await eventually(lambda: exchange in rig.broker.attempts)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await rig.back_in_lane(request.lane) == 1


@pytest.mark.parametrize(("ending", "exchange"), WAYS_OUT)
async def test_outage_only_delays_the_acknowledgement(rig: AgentRig, ending: Ending, exchange: str):
    request = a_request(reply_to=REPLY)
    pulled = await rig.pulled(request)
    rig.broker.down.add(exchange)
    task = asyncio.create_task(ending(rig, pulled))
    await eventually(lambda: exchange in rig.broker.attempts)
    rig.broker.down.clear()
    await task
    assert await rig.back_in_lane(request.lane) == 0


@pytest.mark.parametrize("ending", [complete, fail, relegate, hand_back, evict, crashed])
async def test_every_copy_of_the_request_is_acknowledged(rig: AgentRig, ending: Ending):
    request = a_request(reply_to=REPLY)
    pulled = await rig.pulled(request)
    pulled.deliveries += (await rig.pulled(request)).deliveries
    await ending(rig, pulled)
    assert await rig.back_in_lane(request.lane) == 0


@pytest.mark.parametrize("ending", [relegate, hand_back, evict, crashed])
async def test_return_of_a_request_increases_its_hop(rig: AgentRig, ending: Ending):
    request = a_request(reply_to=REPLY, hop=4)
    await ending(rig, await rig.pulled(request))
    queue = RELEGATED if ending is relegate else RESUME
    back = await rig.requeued(queue)
    assert back.attempts.hop == 5
    assert (back.request_id, back.lane, back.reply_to) == (request.request_id, request.lane, REPLY)


async def test_evicted_request_carries_progress_and_the_eviction(rig: AgentRig):
    pulled = await rig.pulled(a_request(reply_to=REPLY))
    run = run_of(pulled, 20, 21)
    await rig.endings.evict(run)
    back = await rig.requeued(RESUME)
    assert back.progress == run.answer.progress()
    assert back.progress.token_ids == (20, 21)
    attempts = back.attempts
    assert (attempts.evictions, attempts.evicted_by, attempts.evicted_at) == (1, "i1", NOW)
    assert attempts.crashes == 0


async def test_evicted_request_is_not_pulled_here_for_a_while(rig: AgentRig):
    """The agent does not pull the request even when it receives the notice of its own publish."""
    await rig.endings.evict(run_of(await rig.pulled(a_request()), 20))
    rig.sources(RESUME)
    rig.residency.noticed(RESUME)
    order = rig.state.order
    assert order.next(NOW + EVICT_HOLD_S - 0.1, best_effort_room=True) is None
    assert order.next(NOW + EVICT_HOLD_S, best_effort_room=True) is not None


async def test_a_crash_is_counted(rig: AgentRig):
    await rig.endings.crashed(run_of(await rig.pulled(a_request(crashes=1)), 20))
    back = await rig.requeued(RESUME)
    assert (back.attempts.crashes, back.attempts.evictions) == (2, 0)


async def test_relegated_request_is_marked_and_stays_in_its_queue(rig: AgentRig):
    await rig.endings.relegate(await rig.pulled(a_request()))
    relegated = await rig.requeued(RELEGATED)
    assert relegated.attempts.relegated
    await rig.endings.hand_back(await rig.pulled(relegated, RELEGATED))
    assert (await rig.requeued(RELEGATED)).attempts.relegated
    assert await rig.far.ready(RESUME) == 0


async def test_agents_are_notified_of_returned_requests(rig: AgentRig):
    notices = await listen(rig, topology.CONTROL, topology.CONTROL_LANE)
    await rig.endings.hand_back(await rig.pulled(a_request()))
    assert await rig.far.ready(notices) == 1


async def test_tokens_of_an_evicted_run_precede_the_next_run(rig: AgentRig):
    request = a_request("r", reply_to=REPLY)
    run, task = await rig.running(request)
    for token in (20, 21):
        rig.engine.emit("r", token)
    await eventually(lambda: len(run.answer.token_ids) == 2)
    rig.broker.sent.clear()
    rig.broker.attempts.clear()
    rig.broker.down.add(topology.LANES)
    end_run(rig.state, rig.engine, run, RunEnding.EVICTED)
    await eventually(lambda: topology.LANES in rig.broker.attempts)
    assert rig.broker.sent == [REPLY]
    rig.broker.down.clear()
    await task


async def test_requeued_message_is_not_merged_with_the_old_message_on_one_agent(rig: AgentRig):
    """
    Between the publish and the ack of an eviction, another worker may pull the new message.

    If the agent merged the new message as a copy, it would acknowledge the two messages and lose
    the request.
    """
    request = a_request("r", reply_to=REPLY)
    run, task = await rig.running(request)
    pulled_again: list[QueuedRequest] = []
    original = run.pulled.deliveries[0]

    class Slow:
        """The old delivery; during its settlement, the test pulls the new message."""

        async def settle(self, how: object) -> bool:
            rig.sources(RESUME)
            delivery = await rig.broker.get(RESUME)
            assert delivery is not None
            source = rig.state.order.next(NOW + EVICT_HOLD_S, best_effort_room=True)
            assert source is not None
            await rig.puller._take(delivery, source)
            pulled_again.extend(held.request for held in rig.state.pulled.values())
            return await original.settle(how)  # type: ignore[arg-type]  # as it came

    run.pulled.deliveries[0] = Slow()  # type: ignore[call-overload]  # all that is asked of it
    rig.engine.die()
    await task
    assert [each.request_id for each in pulled_again] == ["r"]
    assert await rig.back_in_lane(RESUME) == 1


async def test_a_finished_request_is_observed_once(rig: AgentRig):
    observed = await listen(rig, topology.TELEMETRY, topology.OBSERVED_REQUEST_KEY)
    await complete(rig, await rig.pulled(a_request("done")))
    await fail(rig, await rig.pulled(a_request("failed")))
    await hand_back(rig, await rig.pulled(a_request("back")))
    seen = [decode_observed((await rig.far.take(observed)).body) for _ in range(2)]
    assert [(each.request_id, each.outcome) for each in seen] == [
        ("done", "completed"),
        ("failed", "cancelled"),
    ]
    assert await rig.far.ready(observed) == 0


async def test_observation_has_the_text_length_once_counted(rig: AgentRig):
    observed = await listen(rig, topology.TELEMETRY, topology.OBSERVED_REQUEST_KEY)
    await complete(rig, await rig.pulled(a_request("text", prompt="über\n", prompt_tokens=9)))
    await complete(rig, await rig.pulled(a_request("ids", prompt=(1, 2))))
    await fail(rig, await rig.pulled(a_request("failed", prompt="text", prompt_tokens=9)))
    seen = [decode_observed((await rig.far.take(observed)).body) for _ in range(3)]
    texts = {each.request_id: (each.prompt_text, each.prompt_tokens) for each in seen}
    assert texts == {
        "text": (PromptText(num_bytes=6), 3),
        "ids": (None, 3),
        "failed": (None, 9),
    }


async def test_observation_has_the_finish_reason(rig: AgentRig):
    observed = await listen(rig, topology.TELEMETRY, topology.OBSERVED_REQUEST_KEY)
    request = a_request("cut", sampling=sampling(1, ignore_eos=False))
    await complete(rig, await rig.pulled(request))
    seen = decode_observed((await rig.far.take(observed)).body)
    assert (seen.finish_reason, seen.max_tokens) == (FinishReason.LENGTH, 1)
    assert not seen.ignore_eos


async def test_predicted_wait_is_reported_at_the_end(rig: AgentRig):
    """The producer gets the wait; the estimator gets the wait and the prediction."""
    observed = await listen(rig, topology.TELEMETRY, topology.OBSERVED_REQUEST_KEY)
    reported = WaitForecast(mean_s=2.5, sd_s=0.5)
    request = a_request(predicted_wait=reported, grouped_at=NOW - 1.0, reply_to=REPLY)
    await complete(rig, await rig.pulled(request))

    seen = decode_observed((await rig.far.take(observed)).body)
    assert (seen.predicted_wait, seen.grouped_at) == (reported, NOW - 1.0)
    assert (await rig.completed()).timings.predicted_wait == reported


async def test_final_without_a_bound_queue_is_unclaimed(rig: AgentRig):
    await complete(rig, await rig.pulled(a_request(reply_to="gone")))
    assert await rig.far.ready(topology.UNCLAIMED_FINALS) == 1


async def test_final_is_unclaimed_even_if_its_queue_was_deleted(rig: AgentRig):
    """A final that reaches no queue must not be lost by an acknowledgement."""
    await rig.far.delete_queue(topology.UNCLAIMED_FINALS)
    await complete(rig, await rig.pulled(a_request(reply_to="gone")))
    assert await rig.far.ready(topology.UNCLAIMED_FINALS) == 1


@pytest.mark.parametrize(
    ("slo", "token_times_s", "attained", "late_tokens"),
    [
        # Equation 1: the first token is due at arrival + 2.
        (Slo(ttft_s=2.0), (2.0,), True, 0),
        (Slo(ttft_s=2.0), (2.1,), False, 0),
        # Without a TBT target only the first token counts.
        (Slo(ttft_s=2.0), (1.0, 50.0), True, 0),
        # Equation 2: token n is due at arrival + 2 + (n - 1) / 2.
        (Slo(ttft_s=2.0, tbt_s=0.5), (2.0, 2.5, 3.0), True, 0),
        (Slo(ttft_s=2.0, tbt_s=0.5), (1.0, 2.5, 3.0), True, 0),
        (Slo(ttft_s=2.0, tbt_s=0.5), (1.0, 2.6, 3.0), False, 1),
        (Slo(ttft_s=2.0, tbt_s=0.5), (2.1, 2.6, 3.1), False, 3),
        # Equation 3: the last token is due at arrival + 4.
        (Slo(ttlt_s=4.0), (3.0, 4.0), True, 0),
        (Slo(ttlt_s=4.0), (1.0, 4.1), False, 0),
        # With several targets, all must be met, and the earlier deadline applies.
        (Slo(ttft_s=2.0, ttlt_s=4.0), (1.0, 4.1), False, 0),
        (Slo(ttlt_s=9.0, deadline_at=NOW + 3), (1.0, 3.1), False, 0),
        # Best effort is always attained.
        (Slo(), (1e6,), True, 0),
    ],
)
def test_verdicts_follow_equations_1_to_3(
    slo: Slo, token_times_s: tuple[float, ...], attained: object, late_tokens: int
):
    pulled = Pulled(request=a_request(slo=slo), deliveries=[], pulled_at=NOW)
    run = Run(pulled=pulled)
    for at in token_times_s:
        push(run, NOW + at)
    verdict = run.answer.verdict(finished_at=NOW + token_times_s[-1])
    assert (verdict.attained, verdict.late_tokens) == (attained, late_tokens)
    assert verdict.ttft_s == pytest.approx(token_times_s[0])
    assert verdict.ttlt_s == pytest.approx(token_times_s[-1])


def push(run: Run, at: float) -> None:
    run.answer.push(EngineOutput(token_ids=(20,)), run.run_id, at)


def test_verdict_of_a_run_without_tokens_uses_its_end():
    pulled = Pulled(request=a_request(slo=Slo(ttft_s=2.0)), deliveries=[], pulled_at=NOW)
    verdicts = [Run(pulled=pulled).answer.verdict(finished_at=NOW + at).attained for at in (1, 3)]
    assert verdicts == [True, False]


def test_longest_pause_is_kept_across_runs():
    pulled = Pulled(request=a_request(slo=BATCH), deliveries=[], pulled_at=NOW)
    run = Run(pulled=pulled)
    run.answer.max_tbt_s = 0.7
    for at in (1.0, 1.5, 1.6):
        push(run, NOW + at)
    assert run.answer.max_tbt_s == 0.7
    push(run, NOW + 9.6)
    assert run.answer.max_tbt_s == pytest.approx(8.0)
