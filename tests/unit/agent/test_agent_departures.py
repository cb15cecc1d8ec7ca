"""Outcomes of requests on the broker: published and confirmed first, then acknowledged."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from shared.broker import topology
from shared.broker.protocol import OutMessage
from shared.contracts.base import Decoder
from shared.contracts.control import EvictRequest, LaneNonempty, RequestCancel
from shared.contracts.errors import BrokerConflictError
from shared.contracts.lanes import relegated_name
from shared.contracts.qos import Slo
from shared.contracts.requests import (
    Attempts,
    Final,
    FinishReason,
    Progress,
    PromptText,
    RequestCompleted,
    RunStarted,
    TokensEmitted,
    WaitForecast,
)
from shared.contracts.telemetry import RequestObserved
from shared.contracts.tenants.usage import RequestMetered
from tests.agents.rig import (
    I1,
    LANE,
    REPLY,
    RESUME,
    AgentRig,
    R,
    decode_control,
    decode_observed,
    decode_queued,
    listen,
)
from tests.agents.streamed import streamed_tokens, tokens_of
from tests.brokers import eventually
from tests.clocks import NOW
from tests.queued import MODEL, OTHER, a_request, lane_of, sampling

pytestmark = pytest.mark.virtual_time

decode_metered: Decoder[RequestMetered] = Decoder(RequestMetered)

LENGTH = FinishReason.LENGTH
RELEGATED, OTHERS = relegated_name(MODEL), lane_of(model=OTHER).resume_name
REQUEST = a_request("r", reply_to=REPLY, hop=4)
Outcome = Callable[[AgentRig], Awaitable[object] | None]


OUTCOMES: dict[str, Outcome] = {
    "complete": lambda rig: rig.engine.emit("r", 20, finish=LENGTH),
    "refuse": lambda rig: rig.engine.refuse("r"),
    "crash": lambda rig: rig.engine.die(),
    "cancel": lambda rig: rig.deliver(RequestCancel(request_id=R, reply_to=REPLY)),
    "evict": lambda rig: rig.deliver(EvictRequest(instance_id=I1, request_id=R)),
    # A request of another model, as after a model swap.
    "hand back": lambda rig: rig.put(a_request("r", base=OTHER, reply_to=REPLY, hop=4), LANE),
    # A request whose first token is late already.
    "relegate": lambda rig: rig.put(msgspec.structs.replace(REQUEST, arrived_at=NOW - 100.0)),
}
OF_RUNS = ("complete", "refuse", "crash", "cancel", "evict")


async def leave(rig: AgentRig, outcome: str) -> None:
    """Let the request `r` leave the agent."""
    if (work := OUTCOMES[outcome](rig)) is not None:
        await work


def forbid(rig: AgentRig, patched: pytest.MonkeyPatch, method: str, kind: str) -> None:
    """Let *method* of the agent's broker refuse messages of *kind* about the request `r`."""
    allowed = getattr(rig.broker, method)

    async def forbidden(exchange: str, key: str, message: OutMessage) -> Any:
        if message.kind == kind and b'"r"' in message.body:
            raise BrokerConflictError(f"no exchange {exchange!r}")
        return await allowed(exchange, key, message)

    patched.setattr(rig.broker, method, forbidden)


@pytest.mark.parametrize(
    ("outcome", "exchange"),
    [
        *((each, topology.REPLIES) for each in ("complete", "cancel", "refuse")),
        *((each, topology.TELEMETRY) for each in ("complete", "cancel")),
        ("refuse", topology.DEAD),
        *((each, topology.LANES) for each in ("evict", "crash", "hand back", "relegate")),
    ],
)
async def test_ack_follows_the_confirm_of_the_outcome(rig: AgentRig, outcome: str, exchange: str):
    """An outage delays the acknowledgement, and loses nothing."""
    if outcome in OF_RUNS:
        await rig.running(REQUEST)
    rig.broker.attempts.clear()
    rig.broker.down.add(exchange)
    await leave(rig, outcome)
    await eventually(lambda: rig.broker.attempts.count(exchange) >= 3)
    assert await rig.holds(LANE)

    rig.broker.down.clear()

    await eventually(lambda: rig.is_empty(LANE))


@pytest.mark.parametrize("outcome", OF_RUNS)
async def test_every_copy_of_the_request_is_acknowledged(rig: AgentRig, outcome: str):
    requeued = await listen(rig, topology.LANES, RESUME)
    await rig.running(REQUEST)
    await rig.put(REQUEST)
    await rig.settled()
    assert await rig.far.ready(LANE) == 0
    await leave(rig, outcome)

    assert await rig.is_empty(LANE)
    finals = [each for each in await rig.replies() if isinstance(each, Final)]
    assert len(finals) + await rig.far.ready(requeued) == 1


@pytest.mark.parametrize(
    ("outcome", "queue", "changes"),
    [
        ("evict", RESUME, {"evictions": 1, "evicted_by": I1}),
        ("crash", RESUME, {"crashes": 1}),
        ("hand back", OTHERS, {}),
        ("relegate", RELEGATED, {"relegated": True}),
    ],
)
async def test_returned_request_has_its_progress_and_history(
    rig: AgentRig, outcome: str, queue: str, changes: dict[str, Any]
):
    requeued = await listen(rig, topology.LANES, queue)
    if outcome in OF_RUNS:
        await rig.running(REQUEST)
        rig.engine.emit("r", 20, 21)
    now = rig.clock.now()
    await leave(rig, outcome)
    back = await rig.requeued(requeued)

    evicted_at = now if outcome == "evict" else None
    assert back.attempts == Attempts(hop=5, evicted_at=evicted_at, **changes)
    assert back.progress.token_ids == ((20, 21) if outcome in OF_RUNS else ())
    lane = lane_of(model=back.model.base).queue_name
    assert (back.request_id, back.lane, back.reply_to) == ("r", lane, REPLY)


async def test_agents_are_notified_of_returned_requests(rig: AgentRig):
    await rig.running(REQUEST)
    notices = await listen(rig, topology.CONTROL, topology.CONTROL_LANE)
    await leave(rig, "evict")
    notice = decode_control((await rig.far.take(notices)).body)

    assert isinstance(notice, LaneNonempty)
    assert (notice.queue, notice.put, notice.source[:2]) == (RESUME, 1, "i1")


async def test_request_is_requeued_even_if_its_queue_was_deleted(rig: AgentRig):
    for _ in range(2):
        await rig.running(REQUEST)
        await rig.evicted("r")
        await rig.far.delete_queue(RESUME)


async def test_tokens_of_an_evicted_run_precede_the_next_run(rig: AgentRig):
    await rig.running(REQUEST)
    rig.engine.emit("r", 20)
    await rig.settled()
    rig.engine.emit("r", 21)
    rig.broker.attempts.clear()
    await leave(rig, "evict")

    assert rig.broker.attempts[0] == topology.REPLIES
    assert topology.LANES in rig.broker.attempts
    assert streamed_tokens(await rig.replies()) == (20, 21)


async def test_sent_tokens_of_an_evicted_run_precede_the_confirmed_ones(rig: AgentRig):
    """The broker does not order their channels, and a stream with a gap stalls until its final."""
    await rig.running(REQUEST)
    rig.broker.late = []
    rig.engine.emit("r", 20)
    await eventually(lambda: bool(rig.broker.late))
    rig.engine.emit("r", 21)
    await leave(rig, "evict")

    assert streamed_tokens(await rig.replies()) == (20, 21)


async def test_last_tokens_are_confirmed_before_the_final(rig: AgentRig):
    """Unconfirmed tokens use another channel, on which they could arrive after the final."""
    await rig.running(REQUEST)
    await rig.settled()
    rig.broker.attempts.clear()
    rig.broker.sent.clear()
    rig.engine.emit("r", 20, 21, finish=LENGTH)
    replies, _ = await rig.final()

    assert [type(reply) for reply in replies] == [RunStarted, TokensEmitted, RequestCompleted]
    assert rig.broker.attempts.count(topology.REPLIES) == 2
    assert REPLY not in rig.broker.sent


async def test_final_is_self_contained(rig: AgentRig):
    words = tokens_of(rig, "good morning")
    arrived_at = rig.clock.now()
    await rig.running(a_request("r", reply_to=REPLY, prompt=(10, 11, 12), arrived_at=arrived_at))
    first_token_at = rig.clock.now()
    rig.engine.emit("r", *words, finish=FinishReason.STOP, cached_tokens=2)
    replies, final = await rig.final()

    assert isinstance(replies[0], RunStarted)
    assert isinstance(final, RequestCompleted)
    assert (final.run_id, final.instance_id) == (replies[0].run_id, "i1")
    assert (final.token_ids, final.text) == (words, "good morning")
    assert (final.finish_reason, final.engine) == (FinishReason.STOP, "scripted")
    num = len(words)
    assert msgspec.structs.astuple(final.usage) == (3, num, 3 + num, 2)
    times = final.timings
    assert (times.arrived_at, times.first_token_at) == (arrived_at, first_token_at)
    assert arrived_at <= times.pulled_at <= times.submitted_at <= first_token_at
    assert final.verdict.attained


@pytest.mark.parametrize(
    ("reply_to", "deleted", "unclaimed"), [(None, False, 0), ("gone", False, 1), ("gone", True, 1)]
)
async def test_final_without_a_bound_queue_is_unclaimed(
    rig: AgentRig, reply_to: str | None, *, deleted: bool, unclaimed: int
):
    """A final that reaches no queue must not be lost by an acknowledgement."""
    if deleted:
        await rig.far.delete_queue(topology.UNCLAIMED_FINALS)
    await rig.running(a_request("r", reply_to=reply_to))
    await leave(rig, "complete")
    await eventually(lambda: rig.is_empty(LANE))

    assert await rig.far.ready(topology.UNCLAIMED_FINALS) == unclaimed


async def test_dead_letter_is_the_request_with_the_reason(rig: AgentRig):
    await rig.running(REQUEST)
    await leave(rig, "refuse")
    await rig.settled()
    letter = await rig.far.take(topology.DEAD_LETTERS)

    assert msgspec.structs.replace(decode_queued(letter.body), progress=Progress()) == REQUEST
    assert letter.headers[topology.REASON_HEADER] == "engine_refused: the engine says no"
    assert letter.headers["headway-queue"] == LANE


async def test_outcome_that_is_refused_returns_the_request_and_affects_no_other(
    rig: AgentRig, monkeypatch: pytest.MonkeyPatch
):
    await rig.running(REQUEST)
    await rig.running(a_request("other", reply_to=REPLY))
    forbid(rig, monkeypatch, "publish", "request.completed.v1")
    await leave(rig, "complete")
    assert await rig.requeued(LANE) == REQUEST
    rig.engine.emit("other", finish=LENGTH)

    assert (await rig.completed()).request_id == "other"
    assert await rig.is_empty(LANE)


async def test_observation_that_is_refused_affects_no_request(
    rig: AgentRig, monkeypatch: pytest.MonkeyPatch
):
    forbid(rig, monkeypatch, "send", "request.observed.v1")
    await rig.answered(REQUEST)
    await rig.answered(a_request("other", reply_to=REPLY))

    assert await rig.is_empty(LANE)
    assert not rig.work.done()


async def observed(rig: AgentRig, queue: str) -> dict[str, RequestObserved]:
    """All observations by request, each of which there must be once."""
    await rig.settled()
    num = await rig.far.ready(queue)
    seen = [decode_observed((await rig.far.take(queue)).body) for _ in range(num)]
    assert len({each.request_id for each in seen}) == num
    return {each.request_id: each for each in seen}


async def test_each_finished_request_is_observed_once(rig: AgentRig):
    queue = await listen(rig, topology.TELEMETRY, topology.OBSERVED_REQUEST_KEY)
    await rig.answered(a_request("text", prompt="über\n", prompt_tokens=9, reply_to=REPLY))
    await rig.answered(a_request("ids", prompt=(10, 11), reply_to=REPLY))
    await rig.running(REQUEST)
    await rig.evicted("r")
    await rig.running(a_request("r", prompt="text", prompt_tokens=9, reply_to=REPLY))
    await leave(rig, "cancel")
    seen = await observed(rig, queue)

    encode = rig.models.tokenizers[MODEL].encode
    assert {
        name: (each.outcome, each.attained, each.prompt_text, each.prompt_tokens)
        for name, each in seen.items()
    } == {
        "text": ("completed", True, PromptText(num_bytes=6), len(encode("über\n"))),
        "ids": ("completed", True, None, 2),
        "r": ("cancelled", False, None, len(encode("text"))),
    }


async def test_observation_has_the_verdict_of_the_final_after_an_outage(rig: AgentRig):
    queue = await listen(rig, topology.TELEMETRY, topology.OBSERVED_REQUEST_KEY)
    await rig.running(a_request("r", slo=Slo(ttlt_s=10.0), reply_to=REPLY))
    rig.broker.down.add(topology.REPLIES)
    rig.engine.emit("r", 20, finish=LENGTH)
    await asyncio.sleep(60.0)
    rig.broker.down.clear()
    final = await rig.completed()
    await asyncio.sleep(1.0)
    seen = (await observed(rig, queue))["r"]

    assert final.verdict.attained
    assert (seen.attained, seen.finished_at) == (True, final.timings.finished_at)


async def test_observation_has_what_estimators_learn_from(rig: AgentRig):
    queue = await listen(rig, topology.TELEMETRY, topology.OBSERVED_REQUEST_KEY)
    forecast = WaitForecast(mean_s=2.5, sd_s=0.5)
    limits = sampling(1, ignore_eos=False)
    given = {"predicted_wait": forecast, "grouped_at": NOW - 1.0}
    _, final = await rig.answered(a_request("r", sampling=limits, reply_to=REPLY, **given), (20,))
    seen = (await observed(rig, queue))["r"]

    assert {name: getattr(seen, name) for name in given} == given
    assert (seen.finish_reason, seen.max_tokens, seen.output_tokens) == (LENGTH, 1, 1)
    assert not seen.ignore_eos
    assert final.timings.predicted_wait == forecast


async def test_answer_that_is_too_large_for_the_broker_fails_by_name(rig: AgentRig):
    await rig.running(REQUEST)
    rig.broker.max_message_size = 1200
    rig.engine.emit("r", *range(20, 420), finish=LENGTH)
    failure = await rig.failed()
    assert failure.error.code == "answer_too_large"
    assert "1200" in failure.error.message
    assert await rig.is_empty(LANE)


async def test_progress_that_is_too_large_for_the_broker_is_dropped_and_not_the_request(
    rig: AgentRig,
):
    await rig.running(REQUEST)
    rig.engine.emit("r", *range(20, 420))
    rig.broker.max_message_size = 1200
    again = await rig.evicted("r")
    assert (again.progress.token_ids, again.attempts.evictions) == ((), 1)
    assert await rig.is_empty(LANE)


@pytest.mark.parametrize("outcome", ["complete", "cancel"])
async def test_a_final_is_metered_for_its_tenant(rig: AgentRig, outcome: str):
    """The numbers are those of the final; a failed request counts no tokens."""
    metered_queue = await listen(rig, topology.TELEMETRY, topology.METERED_KEY)
    await rig.running(REQUEST)
    await leave(rig, outcome)
    await eventually(lambda: rig.is_empty(LANE))
    (final,) = [each for each in await rig.replies() if isinstance(each, Final)]
    metered = decode_metered((await rig.far.take(metered_queue)).body)

    assert (metered.request_id, metered.tenant) == (REQUEST.request_id, REQUEST.tenant)
    tokens = (metered.prompt_tokens, metered.completion_tokens, metered.cached_tokens)
    if isinstance(final, RequestCompleted):
        usage = final.usage
        assert metered.outcome == "completed"
        assert tokens == (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        assert usage.total_tokens > usage.prompt_tokens > 0
    else:
        assert (metered.outcome, tokens) == ("cancelled", (0, 0, 0))
