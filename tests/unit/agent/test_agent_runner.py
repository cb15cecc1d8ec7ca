"""One request on the engine: its stream and its end."""

import asyncio

import pytest

from services.agent.aborting import end_run
from services.agent.runner import MAX_CRASHES
from services.agent.state import Ending
from shared.broker import topology
from shared.contracts.base import RequestId, TenantId
from shared.contracts.errors import BrokerConflictError
from shared.contracts.requests import (
    Attempts,
    FinishReason,
    ReplyMode,
    RequestCompleted,
    RunStarted,
    TokensEmitted,
)
from tests.brokers import eventually
from tests.deliveries import UnreliableBroker
from tests.queued import a_request, lane_of, sampling
from tests.unit.agent.rig import REPLY, AgentRig
from tests.unit.agent.streamed import streamed_text, streamed_tokens, tokens_of

pytestmark = pytest.mark.virtual_time

RESUME = lane_of().resume_name
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


async def test_stream_is_start_then_tokens_then_final(rig: AgentRig):
    words = tokens_of(rig, "good morning everyone")
    _, task = await rig.running(a_request("r", reply_to=REPLY))
    rig.engine.emit("r", words[0])
    rig.engine.emit("r", *words[1:])
    rig.engine.emit("r", finish=LENGTH)
    await task
    replies = await rig.replies()
    assert [type(reply) for reply in replies] == [
        RunStarted,
        TokensEmitted,
        TokensEmitted,
        RequestCompleted,
    ]
    assert streamed_tokens(replies) == words
    assert streamed_text(replies) == "good morning everyone"


async def test_last_tokens_are_confirmed_before_the_final(rig: AgentRig):
    """Unconfirmed tokens use another channel, on which they could arrive after the final."""
    assert isinstance(rig.broker, UnreliableBroker)
    _, task = await rig.running(a_request("r", reply_to=REPLY))
    rig.broker.attempts.clear()
    rig.broker.sent.clear()
    rig.engine.emit("r", *tokens_of(rig, "good morning"), finish=LENGTH)
    await task
    replies = await rig.replies()

    assert [type(reply) for reply in replies] == [RunStarted, TokensEmitted, RequestCompleted]
    assert rig.broker.attempts.count(topology.REPLIES) == 2
    assert REPLY not in rig.broker.sent


async def test_final_is_self_contained(rig: AgentRig):
    words = tokens_of(rig, "good morning")
    request = a_request("r", reply_to=REPLY, tenant=TenantId("acme"), prompt=(10, 11, 12))
    run, task = await rig.running(request)
    rig.clock.advance(1.0)
    rig.engine.emit("r", *words, finish=STOP, cached_tokens=2)
    await task
    replies = await rig.replies()
    started, final = replies[0], replies[-1]
    assert isinstance(final, RequestCompleted)
    assert isinstance(started, RunStarted)
    assert final.run_id == started.run_id == run.run_id
    assert (final.token_ids, final.text, final.finish_reason) == (words, "good morning", STOP)
    usage = final.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (
        3,
        len(words),
        2,
    )
    assert usage.total_tokens == 3 + len(words)
    assert final.timings.first_token_at - final.timings.arrived_at == 1.0
    assert final.verdict.attained


async def test_first_tokens_are_sent_at_once_and_later_ones_batched(rig: AgentRig):
    run, task = await rig.running(a_request("r", reply_to=REPLY))
    rig.engine.emit("r", 20)
    rig.engine.emit("r", 21)
    rig.engine.emit("r", 22)
    await eventually(lambda: len(run.answer.token_ids) == 3)
    before = await rig.replies()
    await rig.outbox.flush_all()
    after = await rig.replies()
    assert (streamed_tokens(before), streamed_tokens(after)) == ((20,), (21, 22))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_final_only_request_gets_only_the_final(rig: AgentRig):
    _, task = await rig.running(a_request("r", reply_to=REPLY, reply_mode=ReplyMode.FINAL))
    rig.engine.emit("r", 20, finish=LENGTH)
    await task
    assert [type(reply) for reply in await rig.replies()] == [RequestCompleted]


async def test_request_without_a_reply_queue_runs_and_is_acknowledged(rig: AgentRig):
    request = a_request("r")
    _, task = await rig.running(request)
    rig.engine.emit("r", 20, finish=LENGTH)
    await task
    assert await rig.back_in_lane(request.lane) == 0


@pytest.mark.parametrize("pieces", [1, 2, 3])
async def test_stop_string_ends_the_answer_for_any_split_into_tokens(rig: AgentRig, pieces: int):
    words = tokens_of(rig, "one two three four")
    _, task = await rig.running(a_request("r", reply_to=REPLY, sampling=sampling(stop=(" thr",))))
    for at in range(0, len(words), pieces):
        if "r" not in rig.engine.running:
            break
        rig.engine.emit("r", *words[at : at + pieces])
        for _ in range(5):
            await asyncio.sleep(0)
    await task
    replies = await rig.replies()
    final = replies[-1]
    assert isinstance(final, RequestCompleted)
    assert (final.text, final.finish_reason) == ("one two", STOP)
    assert streamed_text(replies) == "one two"
    # The answer has no tokens after the token that completes the stop string.
    assert final.token_ids == words[: len(tokens_of(rig, "one two thr"))]
    assert streamed_tokens(replies) == final.token_ids


async def test_text_held_back_for_a_stop_string_is_not_lost(rig: AgentRig):
    words = tokens_of(rig, "one two th")
    _, task = await rig.running(a_request("r", reply_to=REPLY, sampling=sampling(stop=("three",))))
    rig.engine.emit("r", *words)
    rig.engine.emit("r", finish=LENGTH)
    await task
    assert (await rig.completed()).text == "one two th"


async def test_half_a_character_is_never_streamed(rig: AgentRig):
    word = "naïve 日本語 🙂"
    tokens = tokens_of(rig, word)
    assert len(tokens) > len(word), "the tokenizer must split characters for this test"
    _, task = await rig.running(a_request("r", reply_to=REPLY))
    for token in tokens:
        rig.engine.emit("r", token)
    rig.engine.emit("r", finish=LENGTH)
    await task
    replies = await rig.replies()
    final = replies[-1]
    assert isinstance(final, RequestCompleted)
    assert final.text == word
    assert "\N{REPLACEMENT CHARACTER}" not in streamed_text(replies)
    assert word.startswith(streamed_text(replies))


async def test_output_is_limited_by_the_actual_prompt(rig: AgentRig):
    """The grouper predicted the prompt's length from bytes; the agent counts tokens."""
    request = a_request("r", prompt=(20,) * 4000, sampling=sampling(500))
    _, task = await rig.running(request)
    assert rig.engine.requests[request.request_id].sampling.max_tokens == 96
    rig.engine.emit("r", finish=LENGTH)
    await task


async def test_prompt_that_does_not_fit_is_refused_with_the_field(rig: AgentRig):
    request = a_request("r", reply_to=REPLY, prompt=(20,) * 4096)
    await rig.runner.run(rig.runner.begin(await rig.pulled(request)))
    error = (await rig.failed()).error
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    assert await rig.far.ready(topology.DEAD_LETTERS) == 1


async def test_request_refused_by_the_engine_fails_alone(rig: AgentRig):
    _, task = await rig.running(a_request("r", reply_to=REPLY))
    rig.engine.refuse("r")
    await task
    assert (await rig.failed()).error.code == "engine_refused"


async def test_bug_ends_one_request_and_not_the_agent(rig: AgentRig):
    request = a_request("r", reply_to=REPLY)
    _, task = await rig.running(request)
    rig.engine.fail("r", OverflowError("can't serialize ints bigger than 64 bits"))
    await task
    error = (await rig.failed()).error
    assert (error.code, error.status) == ("internal_error", 500)
    assert await rig.far.ready(topology.DEAD_LETTERS) == 1
    assert await rig.back_in_lane(request.lane) == 0


async def test_failed_ending_returns_the_request_and_affects_no_other_request(
    rig: AgentRig, monkeypatch: pytest.MonkeyPatch
):
    """An ending fails if, for example, the broker rejects the message."""
    first, other = a_request("first", reply_to=REPLY), a_request("other", reply_to=REPLY)
    run, task = await rig.running(first)
    _, beside = await rig.running(other)

    async def forbidden(*_: object) -> None:
        raise BrokerConflictError("no exchange 'headway.replies'")

    with monkeypatch.context() as patched:
        patched.setattr(rig.outbox, "final", forbidden)
        rig.engine.emit("first", 20, finish=LENGTH)
        await task
    rig.engine.emit("other", 20, finish=LENGTH)
    await beside

    assert run.over.is_set()
    assert rig.state.runs == {}
    assert (await rig.completed()).request_id == "other"
    assert await rig.requeued(first.lane) == first
    assert await rig.back_in_lane(first.lane) == 0


async def test_ending_that_fails_after_its_ack_returns_no_request(
    rig: AgentRig, monkeypatch: pytest.MonkeyPatch
):
    request = a_request("r", reply_to=REPLY)
    _, task = await rig.running(request)

    async def forbidden(*_: object, **__: object) -> None:
        raise BrokerConflictError("no exchange 'headway.telemetry'")

    monkeypatch.setattr(rig.endings, "_observed", forbidden)
    rig.engine.emit("r", 20, finish=LENGTH)
    await task

    assert (await rig.completed()).request_id == "r"
    assert rig.state.departed[RequestId("r")] == "completed"
    assert await rig.back_in_lane(request.lane) == 0


async def test_engine_crash_returns_the_request_with_its_progress(rig: AgentRig):
    run, task = await rig.running(a_request("r", reply_to=REPLY))
    rig.engine.emit("r", 20, 21)
    await eventually(lambda: len(run.answer.token_ids) == 2)
    rig.engine.die()
    await task
    returned = await rig.requeued(RESUME)
    assert returned.progress.token_ids == (20, 21)
    assert (returned.attempts.crashes, returned.attempts.hop) == (1, 1)


async def test_request_with_too_many_crashes_is_poison(rig: AgentRig):
    request = a_request("r", reply_to=REPLY, crashes=MAX_CRASHES - 1)
    _, task = await rig.running(request)
    rig.engine.die()
    await task
    assert (await rig.failed()).error.code == "poison_request"
    letter = await rig.far.take(topology.DEAD_LETTERS)
    assert str(letter.headers[topology.REASON_HEADER]).startswith("poison_request")
    assert await rig.back_in_lane(request.lane) == 0


async def test_run_ended_early_never_reaches_the_engine(rig: AgentRig):
    run = rig.runner.begin(await rig.pulled(a_request("r", reply_to=REPLY)))
    end_run(rig.state, rig.engine, run, Ending.EVICTED)
    await asyncio.wait_for(rig.runner.run(run), 60)
    assert rig.engine.requests == {}
    assert (await rig.requeued(RESUME)).attempts == Attempts(
        hop=1, evictions=1, evicted_by=rig.state.instance_id, evicted_at=rig.clock.now()
    )


async def test_cancelled_run_ends_with_an_error_and_no_dead_letter(rig: AgentRig):
    run, task = await rig.running(a_request("r", reply_to=REPLY))
    end_run(rig.state, rig.engine, run, Ending.CANCELLED)
    await task
    assert (await rig.failed()).error.code == "cancelled"
    assert await rig.far.ready(topology.DEAD_LETTERS) == 0


async def test_answer_complete_at_its_eviction_is_delivered(rig: AgentRig):
    run, task = await rig.running(a_request("r", reply_to=REPLY))
    rig.engine.emit("r", 20, finish=LENGTH)
    end_run(rig.state, rig.engine, run, Ending.EVICTED)
    await task
    assert (await rig.completed()).token_ids == (20,)
    assert await rig.far.ready(RESUME) == 0
