"""Batching of tokens for producers."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from services.agent.outbox import Outbox
from shared.broker import topology
from shared.broker.memory.hub import MemoryHub
from shared.contracts.base import Decoder, RequestId, RunId
from shared.contracts.requests import Reply, RunStarted, TokenChunk, TokensEmitted
from shared.contracts.stored import RunsStarted
from tests.agents.rig import I1, REPLY, decode_reply
from tests.deliveries import UnreliableBroker

pytestmark = pytest.mark.virtual_time

PERIOD_S = 0.5
decode_starts: Decoder[RunsStarted] = Decoder(RunsStarted)


@dataclass
class OutboxRig:
    """An outbox that works, and the replies that it has sent."""

    outbox: Outbox
    broker: UnreliableBroker

    async def after(self, seconds: float) -> list[Reply]:
        """Replies that have arrived after *seconds*."""
        await asyncio.sleep(seconds)
        num = await self.broker.ready(REPLY)
        return [decode_reply((await self.broker.take(REPLY)).body) for _ in range(num)]


@pytest.fixture
async def rig() -> AsyncIterator[OutboxRig]:
    async with UnreliableBroker(MemoryHub()) as broker:
        await topology.declare(broker)
        spec, binding = topology.reply_queue(REPLY)
        await broker.declare_queue(spec)
        await broker.bind(binding)
        outbox, stop = Outbox(broker, PERIOD_S), asyncio.Event()
        work = asyncio.create_task(outbox.work(stop))
        yield OutboxRig(outbox, broker)
        stop.set()
        outbox.stop()
        await asyncio.wait_for(work, 60)


def chunk(run: str, offset: int, *tokens: int, child: int = 0) -> TokenChunk:
    return TokenChunk(
        request_id=RequestId(f"of-{run}"),
        run_id=RunId(run),
        offset=offset,
        token_ids=tokens,
        text="".join(f"{token}." for token in tokens),
        child=child,
    )


def start(run: str) -> RunStarted:
    return RunStarted(request_id=RequestId(f"of-{run}"), run_id=RunId(run), instance_id=I1, at=0.0)


@pytest.mark.parametrize(
    ("added", "batch"),
    [
        ((chunk("a", 3, 20), chunk("a", 4, 21, 22)), (chunk("a", 3, 20, 21, 22),)),
        ((chunk("a", 0, 20), chunk("b", 5, 30)),) * 2,
        ((chunk("a", 0, 20), chunk("a", 0, 30, child=1)),) * 2,
    ],
    ids=["chunks of a run are merged", "runs share a message", "answers of a call stay apart"],
)
async def test_tokens_of_a_period_are_one_message(
    rig: OutboxRig, added: tuple[TokenChunk, ...], batch: tuple[TokenChunk, ...]
):
    for each in added:
        rig.outbox.add_tokens(REPLY, each)

    assert await rig.after(2 * PERIOD_S) == [TokensEmitted(chunks=batch)]


async def test_start_of_a_run_is_sent_at_once_and_between_the_tokens(rig: OutboxRig):
    rig.outbox.add_tokens(REPLY, chunk("a", 0, 20))
    rig.outbox.run_started(REPLY, start("b"))
    rig.outbox.add_tokens(REPLY, chunk("b", 0, 30))

    kinds = [type(each) for each in await rig.after(0.01)]
    assert kinds == [TokensEmitted, RunStarted, TokensEmitted]


async def test_hurried_destination_does_not_wait_for_the_period(rig: OutboxRig):
    rig.outbox.add_tokens("elsewhere", chunk("b", 0, 30))
    rig.outbox.add_tokens(REPLY, chunk("a", 0, 20))
    rig.outbox.hurry(REPLY)
    await rig.after(0.1)
    assert rig.broker.sent == [REPLY]

    await rig.after(PERIOD_S)

    assert rig.broker.sent == [REPLY, "elsewhere"]


@pytest.mark.parametrize("confirmed", [False, True])
async def test_tokens_are_sent_once_and_empty_messages_never(rig: OutboxRig, *, confirmed: bool):
    rig.outbox.add_tokens(REPLY, chunk("a", 0, 20))
    if confirmed:
        await rig.outbox.flush_confirmed(REPLY, RequestId("of-a"))
    await rig.after(5 * PERIOD_S)
    rig.outbox.hurry(REPLY)
    await rig.after(5 * PERIOD_S)

    assert len(rig.broker.sent) == (not confirmed)
    assert len(rig.broker.attempts) == confirmed


async def test_flush_returns_after_the_messages_that_are_being_sent(rig: OutboxRig):
    """Otherwise a final could precede them."""
    rig.outbox.run_started(REPLY, start("a"))
    rig.outbox.add_tokens(REPLY, chunk("a", 0, 20))
    for _ in range(100):
        if not rig.broker.sent:
            await asyncio.sleep(0)
    assert rig.broker.sent == [REPLY]
    await rig.outbox.flush_confirmed(REPLY, RequestId("of-a"))

    assert await rig.broker.ready(REPLY) == 2


async def test_flush_takes_no_messages_of_other_requests(rig: OutboxRig):
    """Confirmed messages have another channel, so the tokens of a run could precede its start."""
    rig.outbox.add_tokens(REPLY, chunk("a", 0, 20))
    rig.outbox.add_tokens(REPLY, chunk("b", 5, 30))
    rig.outbox.run_started(REPLY, start("c"))
    rig.outbox.run_started(REPLY, start("a"))
    rig.outbox.add_tokens(REPLY, chunk("c", 0, 40))
    rig.outbox.add_tokens(REPLY, chunk("a", 1, 21))
    await rig.outbox.flush_confirmed(REPLY, RequestId("of-a"))

    sent = await rig.after(2 * PERIOD_S)
    own = [
        TokensEmitted(chunks=(chunk("a", 0, 20),)),
        start("a"),
        TokensEmitted(chunks=(chunk("a", 1, 21),)),
    ]
    assert [each for each in sent if each in own] == own
    assert [each for each in sent if each not in own] == [
        TokensEmitted(chunks=(chunk("b", 5, 30),)),
        start("c"),
        TokensEmitted(chunks=(chunk("c", 0, 40),)),
    ]
    assert len(rig.broker.attempts) == len(rig.broker.sent) == 3


@pytest.mark.parametrize("confirmed", [False, True])
async def test_tokens_that_cannot_be_sent_are_dropped(rig: OutboxRig, *, confirmed: bool):
    """They are also in the final reply."""
    rig.outbox.add_tokens(REPLY, chunk("a", 0, 20))
    rig.outbox.hurry(REPLY)
    rig.broker.lose_connection()
    if confirmed:
        await rig.outbox.flush_confirmed(REPLY, RequestId("of-a"))
    await asyncio.sleep(2 * PERIOD_S)
    rig.broker.reconnect()

    assert await rig.after(2 * PERIOD_S) == []
