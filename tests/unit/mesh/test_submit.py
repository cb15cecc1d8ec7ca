"""Publishing a file of requests: each line gets its own final."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from msgspec import Raw

from ops.generate.replies import completed
from services.mesh.submit import call_request, read_requests, submit_all
from services.mesh.verbs.cli_submit import summary
from shared.broker import topology
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import Delivery, OutMessage, PublishOutcome, Settlement
from shared.contracts.base import encode
from shared.contracts.errors import ContractError
from shared.contracts.ingress import CallRequest, InferenceRequest
from shared.contracts.qos import SloVerdict
from shared.contracts.requests import Final, RequestFailed
from tests.deliveries import UnreliableBroker

pytestmark = pytest.mark.virtual_time


class Full(UnreliableBroker):
    """A broker whose global queue is full for the next *refusals* publishes."""

    refusals = 0

    async def publish(self, exchange: str, routing_key: str, message: OutMessage) -> PublishOutcome:
        if exchange == topology.REQUESTS and self.refusals > 0:
            self.refusals -= 1
            return PublishOutcome.REFUSED
        return await super().publish(exchange, routing_key, message)


@pytest.fixture
async def broker() -> AsyncIterator[Full]:
    async with Full(MemoryHub()) as opened:
        await topology.declare(opened)
        yield opened


@asynccontextmanager
async def mesh(broker: Full) -> AsyncIterator[list[str]]:
    """Answer each request a moment later; return the ids of received requests."""
    came: list[str] = []

    async def answer(delivery: Delivery) -> None:
        assert delivery.message_id is not None
        assert delivery.reply_to is not None
        came.append(delivery.message_id)
        await asyncio.sleep(0.01)
        final = encode(completed("run", request=delivery.message_id))
        await broker.publish(topology.REPLIES, delivery.reply_to, OutMessage(body=final))
        await delivery.settle(Settlement.ACK)

    subscription = await broker.consume(topology.GLOBAL_REST, answer, prefetch=100)
    yield came
    await subscription.cancel()


def lines(ids: str) -> list[InferenceRequest]:
    """A request for each letter of *ids*."""
    return [InferenceRequest(model="m", prompt="x", id=each) for each in ids]


def codes(finals: list[Final]) -> list[str]:
    """Error codes of the finals; `ok` for completed requests."""
    return [each.error.code if isinstance(each, RequestFailed) else "ok" for each in finals]


async def test_refused_line_fails_alone(broker: Full, capsys: pytest.CaptureFixture[str]):
    async with mesh(broker) as came:
        finals = await submit_all(broker, lines("abacdefg"), user_id=None, concurrency=3)

    assert [each.request_id for each in finals] == list("abacdefg")
    assert codes(finals) == ["ok", "ok", "duplicate_request", *["ok"] * 5]
    assert sorted(came) == list("abcdefg")
    assert len(capsys.readouterr().out.splitlines()) == 8


async def test_unpublishable_line_fails_alone(broker: Full):
    broker.down.add(topology.REQUESTS)
    lost = await submit_all(broker, lines("ab"), user_id=None, patience_s=0.01)
    broker.down.clear()
    broker.refusals = 100
    full = await submit_all(broker, lines("c"), user_id=None, patience_s=0.01)

    assert codes(lost) == ["mesh_unavailable", "mesh_unavailable"]
    assert codes(full) == ["over_capacity"]


async def test_failed_line_without_an_id_gets_one(broker: Full):
    broker.down.add(topology.REQUESTS)
    request = InferenceRequest(model="m", prompt="x")
    (final,) = await submit_all(broker, [request], user_id=None, patience_s=0.01)

    assert final.request_id.startswith("req-")


async def test_full_global_queue_is_retried(broker: Full):
    broker.refusals = 2
    async with mesh(broker):
        finals = await submit_all(broker, lines("a"), user_id=None)

    assert codes(finals) == ["ok"]


async def test_batch_survives_a_broker_outage_of_a_minute(
    broker: Full, monkeypatch: pytest.MonkeyPatch
):
    loop = asyncio.get_running_loop()
    now = loop.time
    broker.down.add(topology.REQUESTS)

    async def tried(times: int) -> None:
        while broker.attempts.count(topology.REQUESTS) < times:
            await asyncio.sleep(0)

    async def back_after_a_minute() -> None:
        await tried(1)
        monkeypatch.setattr(loop, "time", lambda: now() + 60.0)
        await tried(2)
        broker.down.clear()

    async with mesh(broker), asyncio.TaskGroup() as group:
        group.create_task(back_after_a_minute(), name="broker")
        finals = await submit_all(broker, lines("a"), user_id=None)
    monkeypatch.undo()

    assert codes(finals) == ["ok"]


def test_request_for_an_endpoint_is_read_from_a_file(tmp_path: Path):
    body = b'{"model": "m", "prompt": "x"}'
    file = tmp_path / "body.json"
    file.write_bytes(body)
    read, given = (
        call_request("/v1/completions", source, model="m") for source in (f"@{file}", body.decode())
    )

    assert read == given == CallRequest(endpoint="/v1/completions", body=Raw(body), model="m")


@pytest.mark.parametrize("body", ["{", "[]", "@/no/such/file"])
def test_unreadable_body_is_refused(body: str):
    with pytest.raises(ContractError):
        call_request("/v1/completions", body)


def test_file_may_have_requests_in_both_forms(tmp_path: Path):
    file = tmp_path / "requests.jsonl"
    file.write_text(
        '{"model": "m", "prompt": "x"}\n{"endpoint": "/v1/completions", "body": {"model": "m"}}\n'
    )
    own, call = read_requests(file)

    assert isinstance(own, InferenceRequest)
    assert isinstance(call, CallRequest)


@pytest.mark.parametrize(("first_s", "said"), [(0.25, "first after 0.250 s, "), (None, "")])
def test_the_summary_has_no_time_to_a_token_that_never_came(first_s: float | None, said: str):
    verdict = SloVerdict(attained=True, ttft_s=first_s, ttlt_s=0.5)
    final = msgspec.structs.replace(completed("run"), verdict=verdict)

    assert f" tokens, {said}all after 0.500 s, SLO attained" in summary(final)
