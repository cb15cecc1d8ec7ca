"""Runs on the engine: prompts, tokens, text, stop strings, errors, and resuming."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.broker import topology
from shared.contracts.base import Decoder, RequestId
from shared.contracts.control import EvictRequest, LsoSwapIn, LsoSwapOut
from shared.contracts.errors import ContractError, EngineError, NotActiveError
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import (
    FinishReason,
    Progress,
    ReplyMode,
    RequestCompleted,
    RunStarted,
    TokensEmitted,
)
from shared.contracts.routing import PrefillsObserved
from shared.models.registry import ModelRegistry
from tests.agents.rig import I1, LANE, REPLY, RESUME, AgentRig, R, listen, open_agent
from tests.agents.streamed import streamed_text, streamed_tokens, tokens_of
from tests.brokers import eventually
from tests.clocks import NOW
from tests.queued import MODEL, a_request, sampling

pytestmark = pytest.mark.virtual_time

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
decode_prefills: Decoder[PrefillsObserved] = Decoder(PrefillsObserved)


async def test_stream_is_start_then_tokens_then_final(rig: AgentRig):
    words = tokens_of(rig, "good morning everyone")
    await rig.running(a_request("r", reply_to=REPLY))
    rig.engine.emit("r", words[0])
    await rig.settled()
    rig.engine.emit("r", *words[1:])
    rig.engine.emit("r", finish=LENGTH)
    replies, final = await rig.final()

    kinds = [type(reply) for reply in replies]
    assert kinds == [RunStarted, TokensEmitted, TokensEmitted, RequestCompleted]
    assert isinstance(final, RequestCompleted)
    assert streamed_tokens(replies) == words == final.token_ids
    assert streamed_text(replies) == "good morning everyone"


async def test_first_token_is_sent_at_once_and_later_ones_at_the_end_of_the_period(
    registry: ModelRegistry, registry_path: Path
):
    async with open_agent(registry, registry_path, flush_period_s=0.5) as rig:
        await rig.running(a_request("r", reply_to=REPLY))
        for token in (20, 21, 22):
            await rig.settled()
            rig.engine.emit("r", token)
        await rig.settled()
        before = await rig.replies()
        await asyncio.sleep(0.5)

        assert streamed_tokens(before) == (20,)
        assert streamed_tokens(await rig.replies()) == (21, 22)


async def test_final_only_request_gets_only_the_final(rig: AgentRig):
    replies, final = await rig.answered(
        a_request("r", reply_to=REPLY, reply_mode=ReplyMode.FINAL), (20,), (21,)
    )

    assert replies == [final]


@pytest.mark.parametrize("pieces", [1, 2, 3])
async def test_stop_string_ends_the_answer_for_any_split_into_tokens(rig: AgentRig, pieces: int):
    words = tokens_of(rig, "one two three four")
    await rig.running(a_request("r", reply_to=REPLY, sampling=sampling(stop=(" thr",))))
    for at in range(0, len(words), pieces):
        if "r" in rig.engine.running:
            rig.engine.emit("r", *words[at : at + pieces])
    replies, final = await rig.final()

    assert isinstance(final, RequestCompleted)
    assert (final.text, final.finish_reason) == ("one two", STOP)
    assert streamed_text(replies) == "one two"
    # The answer has no tokens after the token that completes the stop string.
    assert final.token_ids == words[: len(tokens_of(rig, "one two thr"))]
    assert streamed_tokens(replies) == final.token_ids
    assert rig.engine.running == set()


@pytest.mark.parametrize(
    ("text", "sure"),
    [("one two th", "one two "), ("naïve 日本語 🙂", "naïve 日本語 🙂")],
    ids=["begin of a stop string", "halves of characters"],
)
async def test_text_is_held_back_until_it_is_sure_and_never_lost(
    rig: AgentRig, text: str, sure: str
):
    """It may be half a character, or the begin of a stop string."""
    split = [(token,) for token in tokens_of(rig, text)]
    request = a_request("r", reply_to=REPLY, sampling=sampling(stop=("three",)))
    replies, final = await rig.answered(request, *split)

    assert final.text == text
    # The rest is only in the final.
    assert streamed_text(replies) == sure


async def test_output_is_limited_by_the_actual_prompt(rig: AgentRig):
    """The grouper predicted the prompt's length from bytes; the agent counts tokens."""
    await rig.running(a_request("r", prompt=(20,) * 4000, sampling=sampling(500)))

    assert rig.engine.requests[R].sampling.max_tokens == 96


@pytest.mark.parametrize(
    ("fields", "error", "expected"),
    [
        ({"prompt": (20,) * 4096}, None, ("context_length_exceeded", "prompt", 400)),
        ({}, EngineError("no"), ("engine_refused", None, 400)),
        ({}, ContractError("no", code="bad", param="x", status=422), ("bad", "x", 422)),
        ({}, OverflowError("more than 64 bits"), ("internal_error", None, 500)),
    ],
    ids=["too long", "unsupported", "invalid", "bug"],
)
async def test_request_that_cannot_run_fails_alone(
    rig: AgentRig, fields: dict[str, Any], error: Exception | None, expected: tuple[object, ...]
):
    await rig.running(a_request("other"))
    if error is not None:
        rig.engine.fail_submit.append(error)
    await rig.put(a_request("r", reply_to=REPLY, **fields))
    info = (await rig.failed()).error

    assert (info.code, info.param, info.status) == expected
    assert await rig.far.ready(topology.DEAD_LETTERS) == 1
    assert rig.engine.running == {"other"}


async def test_bug_in_an_output_ends_one_request_and_not_the_agent(rig: AgentRig):
    await rig.running(a_request("other"))
    await rig.running(a_request("r", reply_to=REPLY))
    rig.engine.emit("r", 2**70)

    assert (await rig.failed()).error.code == "internal_error"
    assert rig.engine.running == {"other"}
    rig.engine.emit("other", finish=LENGTH)
    assert await rig.is_empty(LANE)


async def test_request_for_which_another_model_is_active_is_requeued(rig: AgentRig):
    """It arrived while the active model was being changed."""
    requeued = await listen(rig, topology.LANES, RESUME)
    rig.engine.fail_submit.append(NotActiveError("another model is active"))
    await rig.put(a_request("r"))

    assert (await rig.requeued(requeued)).attempts.hop == 1
    assert await rig.far.ready(topology.DEAD_LETTERS) == 0


@pytest.mark.parametrize("words", [3, 1100], ids=["inline", "in a thread"])
async def test_text_becomes_the_tokens_of_the_models_tokenizer(rig: AgentRig, words: int):
    await rig.running(a_request("r", prompt="the " * words))

    assert rig.engine.requests[R].prompt == rig.models.tokenizers[MODEL].encode("the " * words)


async def test_run_that_ends_before_its_prompt_is_known_never_reaches_the_engine(
    rig: AgentRig, monkeypatch: pytest.MonkeyPatch
):
    known = asyncio.Event()

    async def to_thread(work: Callable[..., Any], *arguments: object) -> Any:
        await known.wait()
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    requeued = await listen(rig, topology.LANES, RESUME)
    await rig.put(a_request("r", prompt="the " * 1100, reply_to=REPLY))
    await eventually(lambda: rig.instance.requests.num_runs == 1)
    await rig.deliver(EvictRequest(instance_id=I1, request_id=R))
    back = await rig.requeued(requeued)
    known.set()
    await rig.settled()

    assert (back.attempts.hop, back.attempts.evictions) == (1, 1)
    assert (rig.engine.requests, await rig.replies()) == ({}, [])


async def test_request_of_a_dead_engine_resumes_on_the_next_engine(rig: AgentRig):
    await rig.running(a_request("r", reply_to=REPLY))
    rig.engine.emit("r", 20, 21)
    rig.engine.die()
    again = await rig.engine.began("r")
    rig.engine.emit("r", 22, finish=LENGTH)
    final = await rig.completed()

    assert (again.progress, final.token_ids) == ((20, 21), (20, 21, 22))
    assert (final.attempts.crashes, final.attempts.hop) == (1, 1)


async def test_request_that_waits_when_the_engine_dies_counts_no_crash(narrow: AgentRig):
    await narrow.waiting(a_request("waits", reply_to=REPLY))
    narrow.engine.die()
    for _ in range(2):
        await eventually(lambda: bool(narrow.engine.running))
        (name,) = narrow.engine.running
        narrow.engine.emit(name, 20, finish=LENGTH)

    assert (await narrow.completed()).attempts.crashes == 0


async def test_outputs_of_an_earlier_run_do_not_reach_the_next(able: AgentRig):
    await able.running(a_request("r", reply_to=REPLY))
    first = able.engine.requests[R]
    able.engine.emit("r", 20)
    await able.deliver(LsoSwapOut(instance_id=I1, request_id=R, rest_s=9.0))
    await able.deliver(LsoSwapIn(instance_id=I1, request_id=R))
    second = await able.engine.began("r")
    able.engine.late(first, 99)
    able.engine.emit("r", 21, finish=LENGTH)

    assert first.request_id != second.request_id
    assert first.origin == second.origin == "r"
    assert (await able.completed()).token_ids == (20, 21)


async def test_routers_get_the_prefill_of_each_request_once(rig: AgentRig):
    prefills = await listen(rig, topology.TELEMETRY, topology.PREFILLS_KEY)
    await rig.running(a_request("r", prompt=(10, 11, 12), prefix=(1, 2)))
    rig.engine.emit("r", 20, cached_tokens=2)
    rig.engine.emit("r", 21)
    await rig.settled()
    (prefill,) = decode_prefills((await rig.far.take(prefills)).body).prefills

    assert (prefill.request_id, prefill.prompt_tokens, prefill.cached_tokens) == ("r", 3, 2)
    assert prefill.prefix == (1, 2)
    assert await rig.far.ready(prefills) == 0


@pytest.mark.parametrize("done", [1, 5, 9])
async def test_resumed_run_continues_where_the_first_ended(rig: AgentRig, done: int):
    """The first run ends inside a character and inside a possible stop string."""
    text = "naïve 日本 thre and so on"
    tokens = tokens_of(rig, text)
    await rig.running(a_request("r", reply_to=REPLY, sampling=sampling(99, stop=("three",))))
    rig.engine.emit("r", *tokens[:done])
    resumed = await rig.evicted("r")
    first = await rig.replies()
    second, final = await rig.answered(resumed, tokens[done:])
    started = second[0]

    assert resumed.progress.token_ids == rig.engine.requests[R].progress == tokens[:done]
    assert isinstance(started, RunStarted)
    assert (started.hop, started.offset) == (1, done)
    assert (final.token_ids, final.text) == (tokens, text)
    assert streamed_tokens(first + second) == tokens
    assert text.startswith(streamed_text(first + second))


@pytest.mark.parametrize(
    ("progress", "fields", "text", "reason"),
    [
        ("all done", {}, "all done", LENGTH),
        ("one two three", {"max_tokens": 99, "stop": ("two",)}, "one ", STOP),
    ],
    ids=["length", "stop string"],
)
async def test_progress_with_a_whole_answer_needs_no_engine(
    rig: AgentRig, progress: str, fields: dict[str, Any], text: str, reason: FinishReason
):
    words = tokens_of(rig, progress)
    limits = sampling(**({"max_tokens": len(words)} | fields))
    request = a_request("r", reply_to=REPLY, sampling=limits, progress=Progress(token_ids=words))
    await rig.put(request)
    final = await rig.completed()

    assert (final.text, final.finish_reason) == (text, reason)
    assert rig.engine.requests == {}


async def test_half_a_character_at_the_end_of_progress_is_shown(rig: AgentRig):
    """The text equals the text of an answer from a single run."""
    tokens = tokens_of(rig, "a 日")[:-1]
    limits = sampling(len(tokens))
    _, whole = await rig.answered(a_request("whole", reply_to=REPLY, sampling=limits), tokens)
    progress = Progress(token_ids=tokens)
    await rig.put(a_request("rest", reply_to=REPLY, sampling=limits, progress=progress))

    assert whole.text.endswith("\N{REPLACEMENT CHARACTER}")
    assert (await rig.completed()).text == whole.text


async def test_engine_request_has_all_inputs_of_scheduling_policies(rig: AgentRig):
    given = {"application": "chat", "importance": Importance.LOW}
    slo = Slo(ttft_s=9.0, tbt_s=0.05)
    await rig.running(a_request("r", slo=slo, **given))
    await rig.running(a_request("relegated", slo=slo, relegated=True))
    seen, relegated = rig.engine.requests[R], rig.engine.requests[RequestId("relegated")]

    assert {name: getattr(seen, name) for name in given} == given
    assert (seen.tenant, seen.arrived_at, seen.prompt) == ("acme", NOW, (10, 11, 12, 13))
    assert (seen.slo, seen.checkpointed) == (slo, False)
    assert (relegated.slo, relegated.checkpointed) == (Slo(), True)
