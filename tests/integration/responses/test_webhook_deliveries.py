"""Deliveries of webhooks from the store to a receiver that the test controls."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import openai
import pytest
from aiohttp import web

from services.gateway.webhooks.deliveries import Deliveries
from services.gateway.webhooks.sender import Sender
from services.gateway.webhooks.settings import WebhookSettings
from shared.runtime.clock import SystemClock
from shared.store.objects.webhooks import Notice, enqueue
from shared.store.settings import StoreSettings
from shared.store.store import Store
from tests.stores import ACME, ManualClock, open_store

SECRET = "whsec_" + "QUJDREVG" * 4
ONLY_SQLITE = pytest.mark.parametrize("url", ["sqlite"], indirect=True)
DAY_S = 86400.0


@dataclass
class Receiver:
    """A server that answers with the given statuses, then with 200."""

    statuses: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    received: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.received.append((headers, await request.read()))
        self.paths.append(request.path)
        status, extra = self.statuses.pop(0) if self.statuses else (200, {})
        return web.Response(status=status, headers=extra)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        application = web.Application()
        application.router.add_post("/{path:.*}", self.answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def settings_for(*urls: str, **fields: object) -> WebhookSettings:
    webhooks = [{"url": url, "secret": SECRET} for url in urls]
    values = {"endpoints": {"acme": webhooks}, "allow_private": True, "timeout_s": 10.0}
    return msgspec.convert(values | fields, WebhookSettings)


@asynccontextmanager
async def deliveries_of(store: Store, settings: WebhookSettings) -> AsyncIterator[Deliveries]:
    async with Sender(timeout_s=settings.timeout_s, allow_private=settings.allow_private) as sender:
        yield Deliveries(store, settings, sender, SystemClock(), chance=lambda: 0.0)


async def rounds(deliveries: Deliveries) -> None:
    """One round, and the end of its attempts."""
    await deliveries.round()
    await deliveries.idle()


@pytest.fixture
async def store(settings: StoreSettings, clock: ManualClock) -> AsyncIterator[Store]:
    async with open_store(settings, clock=clock) as opened:
        await opened.check()
        yield opened


async def enqueued(store: Store, *urls: str, number: int = 1) -> None:
    notices = [
        Notice(tenant=ACME, type="response.completed", object_id=f"resp_{each}", urls=urls)
        for each in range(number)
    ]
    async with store.database.write() as connection:
        await enqueue(connection, store.database, notices)


async def num_due(store: Store) -> int:
    return len(await store.deliveries.due(limit=100, limit_per_url=100))


async def test_openais_client_unwraps_what_is_received(store: Store):
    receiver = Receiver()
    async with receiver.serving() as url, deliveries_of(store, settings_for(url)) as deliveries:
        await enqueued(store, url)
        await rounds(deliveries)
        await rounds(deliveries)

    ((headers, payload),) = receiver.received
    client = openai.OpenAI(api_key="x", webhook_secret=SECRET)
    event = client.webhooks.unwrap(payload, headers)
    assert (event.type, event.id) == ("response.completed", headers["webhook-id"])


async def test_a_failed_attempt_is_repeated_later_under_the_same_id(
    store: Store, clock: ManualClock
):
    receiver = Receiver(statuses=[(500, {}), (503, {"Retry-After": "60"})])
    async with receiver.serving() as url, deliveries_of(store, settings_for(url)) as deliveries:
        await enqueued(store, url)
        counts = []
        for passed_s in (0.0, 4.0, 1.0, 59.0, 1.0, DAY_S):
            clock.now += passed_s
            await rounds(deliveries)
            counts.append(len(receiver.received))

    assert counts == [1, 1, 2, 2, 3, 3]
    assert len({headers["webhook-id"] for headers, _ in receiver.received}) == 1


@ONLY_SQLITE
@pytest.mark.parametrize(
    "asked",
    [
        "soon",
        "Fri, 31 Dec 99999999999 23:59:59 GMT",
        "Fri, 31 Dec 2100 23:59:59 +99999999999999999999",
    ],
)
async def test_a_time_that_is_none_does_not_change_when_an_attempt_is_repeated(
    store: Store, clock: ManualClock, asked: str
):
    receiver = Receiver(statuses=[(503, {"Retry-After": asked})])
    async with receiver.serving() as url, deliveries_of(store, settings_for(url)) as deliveries:
        await enqueued(store, url)
        counts = []
        for passed_s in (0.0, 4.0, 1.0):
            clock.now += passed_s
            await rounds(deliveries)
            counts.append(len(receiver.received))

    assert counts == [1, 1, 2]


async def test_a_delivery_is_given_up_after_three_days(store: Store, clock: ManualClock):
    receiver = Receiver(statuses=[(500, {})] * 1000)
    async with receiver.serving() as url, deliveries_of(store, settings_for(url)) as deliveries:
        await enqueued(store, url)
        for _ in range(40):
            await rounds(deliveries)
            clock.now += 6 * 3600.0
        number = len(receiver.received)

    assert 10 <= number <= 14
    assert await num_due(store) == 0


@ONLY_SQLITE
async def test_a_receiver_that_is_gone_is_not_asked_again(store: Store, clock: ManualClock):
    receiver = Receiver(statuses=[(410, {})])
    async with receiver.serving() as url, deliveries_of(store, settings_for(url)) as deliveries:
        await enqueued(store, url)
        await rounds(deliveries)
        clock.now += DAY_S
        await rounds(deliveries)

    assert len(receiver.received) == 1


@ONLY_SQLITE
async def test_redirects_are_failures(store: Store, clock: ManualClock):
    receiver = Receiver(statuses=[(302, {"Location": "/elsewhere"})])
    async with (
        receiver.serving() as url,
        deliveries_of(store, settings_for(f"{url}/hook")) as deliveries,
    ):
        await enqueued(store, f"{url}/hook")
        await rounds(deliveries)
    clock.now += 5.0

    assert receiver.paths == ["/hook"]
    assert await num_due(store) == 1


@ONLY_SQLITE
async def test_nothing_is_sent_to_private_addresses(store: Store, clock: ManualClock):
    receiver = Receiver()
    async with receiver.serving() as url:
        settings = settings_for(url, allow_private=False)
        async with deliveries_of(store, settings) as deliveries:
            await enqueued(store, url)
            await rounds(deliveries)
    clock.now += 5.0

    assert receiver.received == []
    assert await num_due(store) == 1


@ONLY_SQLITE
async def test_a_url_that_is_not_configured_any_more_gets_nothing(store: Store, clock: ManualClock):
    receiver = Receiver()
    async with receiver.serving() as url, deliveries_of(store, settings_for()) as deliveries:
        await enqueued(store, url)
        await rounds(deliveries)
    clock.now += DAY_S

    assert receiver.received == []
    assert await num_due(store) == 0


async def test_many_events_are_delivered_once_by_two_gateways(store: Store):
    receiver = Receiver()
    async with receiver.serving() as url:
        settings = settings_for(url)
        async with (
            deliveries_of(store, settings) as first,
            deliveries_of(store, settings) as second,
        ):
            await enqueued(store, url, number=50)
            for _ in range(20):
                await rounds(first)
                await rounds(second)
            await first.release()
            await enqueued(store, url)
            await rounds(second)

    ids = [headers["webhook-id"] for headers, _ in receiver.received]
    assert len(ids) == len(set(ids)) == 51
