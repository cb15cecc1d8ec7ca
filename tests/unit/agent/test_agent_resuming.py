"""Runs that resume where an earlier run ended."""

import pytest

from services.agent.aborting import end_run
from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.backend import SimulatedEngine
from services.agent.state import Ending
from shared.contracts.base import ModelName
from shared.contracts.requests import (
    FinishReason,
    Progress,
    RequestCompleted,
    RunStarted,
)
from shared.models.registry import ModelRegistry
from shared.models.tokenizer import Tokenizer
from shared.runtime.clock import SystemClock
from tests.brokers import eventually
from tests.queued import MODEL, a_request, lane_of, sampling
from tests.unit.agent.rig import REPLY, AgentRig, open_agent
from tests.unit.agent.streamed import streamed_text, streamed_tokens, tokens_of

pytestmark = pytest.mark.virtual_time

RESUME = lane_of().resume_name
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize("done", [1, 5, 9])
async def test_resumed_run_continues_where_the_first_ended(rig: AgentRig, done: int):
    """The first run ends inside a character and inside a possible stop string."""
    tokens = tokens_of(rig, "naïve 日本 thre and so on")
    request = a_request("r", reply_to=REPLY, sampling=sampling(99, stop=("three",)))
    run, task = await rig.running(request)
    rig.engine.emit("r", *tokens[:done])
    await eventually(lambda: len(run.answer.token_ids) == done)
    end_run(rig.state, rig.engine, run, Ending.EVICTED)
    await task
    first = await rig.replies()
    resumed = await rig.requeued(RESUME)
    assert resumed.progress.token_ids == tokens[:done]
    _, task = await rig.running(resumed)
    assert rig.engine.requests[resumed.request_id].progress == tokens[:done]
    rig.engine.emit("r", *tokens[done:])
    rig.engine.emit("r", finish=LENGTH)
    await task
    second = await rig.replies()
    started, final = second[0], second[-1]
    assert isinstance(started, RunStarted)
    assert isinstance(final, RequestCompleted)
    assert (started.hop, started.offset) == (1, done)
    assert (final.token_ids, final.text) == (tokens, "naïve 日本 thre and so on")
    assert streamed_tokens(first) + streamed_tokens(second) == tokens
    assert final.text.startswith(streamed_text(first) + streamed_text(second))


@pytest.mark.parametrize("cut", [1, 7, 23])
async def test_whole_and_resumed_runs_give_the_same_answer(
    registry: ModelRegistry, tokenizers: dict[ModelName, Tokenizer], cut: int
):
    """Answers of the simulated engine are hashes of all previous tokens."""
    settings = SimulatedSettings(time_scale=0.0)
    engine = SimulatedEngine([registry.entry(MODEL)], settings, SystemClock())
    async with open_agent(registry, tokenizers, engine=engine) as rig:
        await engine.start()
        await engine.activate(MODEL)
        whole = a_request("whole", reply_to=REPLY, sampling=sampling(24))
        await rig.runner.run(rig.runner.begin(await rig.pulled(whole)))
        expected = await rig.completed()
        progress = Progress(token_ids=expected.token_ids[:cut])
        rest = a_request("rest", reply_to=REPLY, sampling=sampling(24), progress=progress)
        await rig.runner.run(rig.runner.begin(await rig.pulled(rest)))
        final = await rig.completed()
        assert (final.token_ids, final.text, final.finish_reason) == (
            expected.token_ids,
            expected.text,
            expected.finish_reason,
        )
        await engine.close()


async def test_progress_with_a_whole_answer_needs_no_engine(rig: AgentRig):
    words = tokens_of(rig, "all done")
    request = a_request(
        "r", reply_to=REPLY, sampling=sampling(len(words)), progress=Progress(token_ids=words)
    )
    await rig.runner.run(rig.runner.begin(await rig.pulled(request)))
    final = await rig.completed()
    assert (final.text, final.finish_reason) == ("all done", LENGTH)
    assert rig.engine.requests == {}


async def test_half_a_character_at_the_end_of_progress_is_shown(rig: AgentRig):
    """The text equals the text of an answer from a single run."""
    tokens = tokens_of(rig, "a 日")[:-1]
    whole = a_request("whole", reply_to=REPLY, sampling=sampling(len(tokens)))
    _, task = await rig.running(whole)
    rig.engine.emit("whole", *tokens, finish=LENGTH)
    await task
    expected = (await rig.completed()).text
    assert expected.endswith("\N{REPLACEMENT CHARACTER}")
    rest = a_request(
        "rest", reply_to=REPLY, sampling=sampling(len(tokens)), progress=Progress(token_ids=tokens)
    )
    await rig.runner.run(rig.runner.begin(await rig.pulled(rest)))
    assert (await rig.completed()).text == expected


async def test_progress_that_reached_a_stop_string_is_a_whole_answer(rig: AgentRig):
    tokens = tokens_of(rig, "one two three")
    request = a_request(
        "r",
        reply_to=REPLY,
        sampling=sampling(99, stop=("two",)),
        progress=Progress(token_ids=tokens),
    )
    await rig.runner.run(rig.runner.begin(await rig.pulled(request)))
    final = await rig.completed()
    assert (final.text, final.finish_reason) == ("one ", STOP)
