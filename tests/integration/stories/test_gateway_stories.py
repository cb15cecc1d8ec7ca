"""`/v1/stories` over every broker: a tenant sees its own requests, an operator those of all."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from shared.broker.stories import StoryOutbox
from shared.contracts.base import RequestId, TenantId
from shared.contracts.stories.story import PulledRequest, Story
from shared.runtime.clock import SystemClock
from tests.brokers import BrokerRig, eventually
from tests.contract.stories.keepers import keeping
from tests.integration.gateway_rig import http_client, running_gateway

ACME, OTHER = {"authorization": "Bearer of-acme"}, {"authorization": "Bearer of-other"}
KEYS = {"of-acme": "acme", "of-other": "other"}


def ended(request_id: str, tenant: str = "acme", **fields: Any) -> Story:
    now = SystemClock().now()
    return Story(
        request_id=RequestId(request_id),
        tenant=TenantId(tenant),
        arrived_at=now - 3.0,
        grouped_at=now - 3.0,
        finished_at=now,
        **fields,
    )


@asynccontextmanager
async def answering(
    brokers: BrokerRig, registry: Path, *stories: Story
) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """A client and the URL of stories, when the estimator has *stories* and the pull of `held`."""
    far = await brokers.connect("agent")
    async with (
        running_gateway(brokers, registry, api_keys=KEYS) as rig,
        keeping(await brokers.connect("estimator")),
        http_client() as client,
    ):
        outbox = StoryOutbox(far, "a1")
        outbox.pulled(PulledRequest(tenant=TenantId("acme"), request_id=RequestId("held"), at=1.0))
        for story in (*stories, ended("last", "other", attained=True)):
            outbox.ended(story)
        await outbox.send()
        url = f"{rig.url}/v1/stories"

        async def has_last() -> bool:
            return (await client.get(f"{url}/last", headers=OTHER)).status_code == 200

        await eventually(has_last)
        yield client, url


async def test_a_tenant_sees_its_own_requests(broker_rig: BrokerRig, registry: Path):
    """Those of others do not exist for it."""
    stories = (ended("r/1"), ended("r2", attained=True), ended("r/1", "other"))
    async with answering(broker_rig, registry, *stories) as (client, url):
        own = await client.get(f"{url}/r/1", headers=ACME)
        late = await client.get(url, params={"late": "true", "since": "10m"}, headers=ACME)
        every = await client.get(url, headers=ACME)
        theirs = await client.get(f"{url}/last", headers=ACME)
        named = await client.get(url, params={"tenant": "other"}, headers=ACME)
        nameless = await client.get(url)

    assert own.status_code == 200
    assert (own.json()["id"], own.json()["tenant"], own.json()["late"]) == ("r/1", "acme", True)
    assert own.json()["sentence"].endswith(".")
    assert [each["id"] for each in late.json()["data"]] == ["r/1"]
    assert [each["id"] for each in every.json()["data"]] == ["r2", "r/1"]
    assert (theirs.status_code, theirs.json()["error"]["code"]) == (404, "story_not_found")
    assert (named.status_code, named.json()["error"]["code"]) == (404, "tenant_not_found")
    assert nameless.status_code == 401


async def test_a_request_without_an_end_says_where_it_is(broker_rig: BrokerRig, registry: Path):
    async with answering(broker_rig, registry) as (client, url):
        held = await client.get(f"{url}/held", headers=ACME)

    assert (held.status_code, held.json()["error"]["code"]) == (404, "story_not_found")
    assert "it has not ended, and a1 has it" in held.json()["error"]["message"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    shared_brokers: BrokerRig, registry: Path
) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """A client and the URL of stories, for requests that are refused."""
    async with answering(shared_brokers, registry) as answers:
        yield answers


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("late", "yes"), ("since", "soon")),
        *(("limit", text) for text in ("0", "x", "100000", "00000000100000")),
        ("limit", "000000001" + "0" * 5000),
    ],
)
async def test_an_invalid_parameter_is_refused_by_name(
    shared: tuple[httpx.AsyncClient, str], name: str, value: str
):
    client, url = shared
    refused = await client.get(url, params={name: value}, headers=ACME)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


async def test_without_an_estimator_stories_are_unavailable(
    broker_rig: BrokerRig, registry: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("shared.broker.stories.TIMEOUT_S", 0.1)
    async with running_gateway(broker_rig, registry) as rig, http_client() as client:
        unavailable = await client.get(f"{rig.url}/v1/stories")

    assert unavailable.status_code == 503
