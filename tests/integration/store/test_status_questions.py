"""Questions of producers about their requests, which groupers answer from the store."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from services.planner.grouper.stored.questions import Questions
from services.planner.settings import GrouperSettings
from shared.broker import topology
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import Broker, Delivery, OutMessage, Settlement
from shared.contracts.base import Decoder, RequestId, TenantId, encode, tag_of
from shared.contracts.requests import ErrorInfo, RequestFailed
from shared.contracts.stored import RequestAsked, RequestState, RequestStatus
from shared.store.requests.records import Asked, Ended, Started
from shared.store.store import Store
from tests.brokers import eventually
from tests.stores import ACME, migrated_settings, open_store

REQUEST = RequestId("r1")
ANSWERS = "reply.asker"
SETTINGS = GrouperSettings(trusted_users=("trusted",))
decode: Decoder[RequestStatus] = Decoder(RequestStatus)


@pytest.fixture
def hub() -> MemoryHub:
    """A broker that checks the user ids of messages."""
    return MemoryHub()


@dataclass
class Asker:
    """A client whose questions one grouper answers."""

    hub: MemoryHub
    broker: Broker

    async def ask(
        self, user: str | None, *, tenant: str | None = None, request_id: str = REQUEST
    ) -> RequestStatus:
        asked = RequestAsked(
            request_id=RequestId(request_id),
            reply_to=ANSWERS,
            tenant=None if tenant is None else TenantId(tenant),
        )
        await self.send(encode(asked), user)
        found: list[Delivery] = []

        async def arrived() -> bool:
            if delivery := await self.broker.get(ANSWERS):
                await delivery.settle(Settlement.ACK)
                found.append(delivery)
            return bool(found)

        await eventually(arrived)
        assert found[0].correlation_id == request_id
        return decode(found[0].body)

    async def send(self, body: bytes, user: str | None) -> None:
        message = OutMessage(body=body, kind=tag_of(RequestAsked), user_id=user)
        async with MemoryBroker(self.hub, user=user or "guest") as broker:
            await broker.publish(topology.CONTROL, topology.CONTROL_REQUEST, message)


@contextlib.asynccontextmanager
async def asking(hub: MemoryHub, store: Store | None) -> AsyncIterator[Asker]:
    async with MemoryBroker(hub) as near, MemoryBroker(hub) as far:
        await topology.declare(far)
        queue, binding = topology.reply_queue(ANSWERS)
        await near.declare_queue(queue)
        await near.bind(binding)
        questions = Questions(broker=far, store=store, settings=SETTINGS)
        await far.consume(topology.QUESTIONS, questions.on_question, prefetch=16)
        yield Asker(hub, near)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    settings = await migrated_settings(None, tmp_path / "data")
    async with open_store(settings) as opened:
        await opened.check()
        asked = Asked(
            tenant=ACME,
            request_id=REQUEST,
            digest="d",
            endpoint="/v1/completions",
            model="tiny",
            kept_s=60.0,
        )
        await opened.requests.ask([asked])
        yield opened


async def test_status_follows_the_request(hub: MemoryHub, store: Store):
    started = Started(tenant=ACME, request_id=REQUEST, instance_id="i1", at=5.0)  # type: ignore[arg-type]  # an id
    error = ErrorInfo(message="no", code="poison_request", status=500)
    final = encode(RequestFailed(request_id=REQUEST, error=error, at=6.0))
    ended = Ended(tenant=ACME, request_id=REQUEST, outcome="poison_request", final=final, at=6.0)
    async with asking(hub, store) as asker:
        queued = await asker.ask("acme")
        await store.requests.mark_started([started])
        running = await asker.ask("acme")
        await store.requests.end([ended])
        failed = await asker.ask("acme")

    assert [each.state for each in (queued, running, failed)] == [
        RequestState.QUEUED,
        RequestState.RUNNING,
        RequestState.FAILED,
    ]
    assert (running.instance_id, running.runs, running.started_at) == ("i1", 1, 5.0)
    assert (queued.endpoint, queued.final) == ("/v1/completions", msgspec.UNSET)
    assert bytes(failed.final or b"") == final


async def test_only_trusted_users_ask_about_others(hub: MemoryHub, store: Store):
    async with asking(hub, store) as asker:
        answers = [
            await asker.ask("other"),
            await asker.ask("other", tenant="acme"),
            await asker.ask(None, tenant="acme"),
            await asker.ask("trusted"),
        ]
        allowed = await asker.ask("trusted", tenant="acme")
        unknown = await asker.ask("acme", request_id="none")

    problems = [each.problem for each in (*answers, unknown)]
    assert {(each.status, each.code) for each in problems if each} == {(404, "request_not_found")}
    assert [each.state for each in answers] == [None] * 4
    assert allowed.state is RequestState.QUEUED


async def test_without_a_usable_store_the_answer_says_so(hub: MemoryHub, store: Store):
    store.problem = "the disk is on fire"
    async with asking(hub, store) as asker:
        away = await asker.ask("acme")

    assert away.problem is not None
    assert (away.problem.status, away.problem.code) == (503, "store_unavailable")
    assert "on fire" in away.problem.message


async def test_without_a_store_the_answer_says_so(hub: MemoryHub):
    async with asking(hub, None) as asker:
        none = await asker.ask("acme")

    assert none.problem is not None
    assert (none.problem.status, none.problem.code) == (501, "store_not_configured")


async def test_unreadable_question_does_not_stop_the_answers(hub: MemoryHub, store: Store):
    async with asking(hub, store) as asker:
        await asker.send(b'{"kind":"request.asked.v1"}', "acme")
        answer = await asker.ask("acme")

    assert answer.state is RequestState.QUEUED
