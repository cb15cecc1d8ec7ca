"""The client's answers, cancellations and questions; the test acts as the mesh."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from ops.generate.replies import ANSWER, REQUEST, completed, failed, started, tokens
from shared.broker import topology
from shared.broker.protocol import OutMessage
from shared.client.client import Client
from shared.client.errors import RequestError
from shared.contracts.base import encode
from shared.contracts.control import RequestCancel
from shared.contracts.errors import BrokerUnavailableError, ContractError
from shared.contracts.ingress import IDEMPOTENT_HEADER
from shared.contracts.requests import ErrorInfo
from shared.contracts.stored import RequestAsked, RequestState, RequestStatus
from tests.brokers import eventually
from tests.unit.producer.producer_rig import Rig, rig

pytestmark = pytest.mark.virtual_time
FIELDS = {"model": "m", "prompt": "hello", "id": REQUEST}


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Rig, Client]]:
    async with rig(user_id="guest") as it:
        # The client shares the producer's connection, as `connect` does.
        yield it, Client(it.producer._broker, it.producer, user_id="guest")


async def test_streamed_parts_equal_the_final_although_replies_are_repeated():
    async with connected() as (it, client):
        answer = await client.submit(**FIELDS)
        await it.reply(
            started("a"), tokens("a", 0, 4), tokens("a", 0, 4), started("b", hop=1, offset=4)
        )
        await it.reply(tokens("a", 4, 6), tokens("b", 4, 7), completed("b"), completed("a"))

        parts = [part async for part in answer.stream()]
        final = await answer.wait()

    assert tuple(token for part in parts for token in part.token_ids) == ANSWER
    assert "".join(part.text for part in parts) == final.text


async def test_a_failed_request_raises_its_error_from_stream_and_wait():
    async with connected() as (it, client):
        answer = await client.submit(**FIELDS)
        await it.reply(failed())

        with pytest.raises(RequestError, match="no: no"):
            [part async for part in answer.stream()]
        with pytest.raises(RequestError) as raised:
            await answer.wait()

    assert (raised.value.code, raised.value.status) == ("no", 500)


async def test_a_wait_that_is_over_leaves_the_request_in_progress():
    async with connected() as (it, client):
        answer = await client.submit(**FIELDS)
        with pytest.raises(TimeoutError):
            await answer.wait(timeout_s=5.0)
        await it.reply(completed("a"))

        assert (await answer.wait()).token_ids == ANSWER


async def test_an_idempotent_request_needs_an_id():
    async with connected() as (_, client):
        with pytest.raises(ContractError, match="needs an id"):
            await client.submit(model="m", prompt="hello", idempotent=True)


async def test_an_idempotent_request_is_cancelled_in_the_mesh_on_request_only():
    async with connected() as (it, client):
        answer = await client.submit(**FIELDS, idempotent=True)
        again = await client.submit(**FIELDS, idempotent=True)
        delivery = await it.requested()

        await answer.cancel()

        assert await it.controlled() == RequestCancel(
            request_id=REQUEST, reply_to=it.producer.reply_queue
        )
    assert delivery.headers[IDEMPOTENT_HEADER] is True
    for each in (answer, again):
        with pytest.raises(RequestError, match="cancelled"):
            await each.wait()


async def test_idempotent_requests_continue_when_the_client_closes():
    async with connected() as (it, client):
        await client.submit(**FIELDS, idempotent=True)
        far = it.far
        await it.producer.__aexit__(None, None, None)

        assert await far.get("control") is None


async def answer_question(it: Rig, status: RequestStatus) -> RequestAsked:
    """Answer the question that arrives."""
    found = []

    async def arrived() -> bool:
        if (delivery := await it.far.get(topology.QUESTIONS)) is not None:
            found.append(delivery)
        return bool(found)

    await eventually(arrived)
    asked = msgspec.json.decode(found[0].body, type=RequestAsked)
    assert found[0].user_id == "guest"
    await it.far.publish(topology.REPLIES, asked.reply_to, OutMessage(body=encode(status)))
    return asked


async def test_status_is_asked_with_a_queue_that_producers_may_declare():
    async with connected() as (it, client):
        status = RequestStatus(request_id=REQUEST, state=RequestState.RUNNING)
        asking = asyncio.ensure_future(client.status(REQUEST))

        asked = await answer_question(it, status)

        assert await asking == status
    assert asked.reply_to.startswith("reply.")


async def test_a_question_about_an_unknown_request_raises_the_answer():
    async with connected() as (it, client):
        problem = ErrorInfo(message="no such request", code="request_not_found", status=404)
        asking = asyncio.ensure_future(client.status(REQUEST))

        await answer_question(it, RequestStatus(request_id=REQUEST, problem=problem))

        with pytest.raises(RequestError, match="request_not_found: no such request"):
            await asking


async def test_a_question_that_no_planner_answers_is_given_up():
    async with connected() as (_, client):
        with pytest.raises(BrokerUnavailableError, match="is the mesh running"):
            await client.status(REQUEST, timeout_s=3.0)
