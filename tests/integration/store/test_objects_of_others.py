"""No tenant reaches the objects of another one: tries at every path of the OpenAPI document."""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from services.gateway.batches.openapi import batch_paths
from services.gateway.files.openapi import file_paths
from services.gateway.requests.openapi import request_paths
from services.gateway.responses.openapi import response_paths
from shared.contracts.base import RequestId, TenantId
from shared.store.requests.records import Asked
from shared.store.store import Store
from tests.brokers import MemoryRig
from tests.integration.gateway_rig import KEYS, http_client, running_gateway
from tests.stores import (
    ACME,
    a_batch,
    a_response,
    an_event,
    migrated_settings,
    open_store,
    put,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATHS: dict[str, Any] = {
    path: operations
    for paths in (file_paths, request_paths, batch_paths, response_paths)
    for path, operations in paths()[0].items()
}
OF_OBJECTS = [
    pytest.param(method, path, id=f"{method} {path}")
    for path, operations in PATHS.items()
    for method in operations
    if "{" in path
]
LISTED = TenantId("listed")
"""Tenant with one object of each kind."""
API_KEYS = KEYS | {"sk-listed": LISTED}
LISTS = [path for path, operations in PATHS.items() if "{" not in path and "get" in operations]


@dataclass(frozen=True)
class Rig:
    """A gateway, and the ids of one object of each kind, which belong to a tenant."""

    http: httpx.AsyncClient
    ids: dict[str, str]

    async def ask(self, method: str, path: str, key: str) -> httpx.Response:
        url = re.sub(r"\{(\w+)\}", lambda match: self.ids[match[1]], path)
        return await self.http.request(method, url, headers={"authorization": f"Bearer {key}"})


Served = tuple[httpx.AsyncClient, Store]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(registry: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """Client of a gateway, and its store; stored objects do not pass through the broker."""
    settings = await migrated_settings(None, tmp_path_factory.mktemp("data"))
    brokers = MemoryRig()
    async with open_store(settings) as store, http_client() as http:
        await store.check()
        stored = msgspec.to_builtins(settings)
        async with running_gateway(brokers, registry, api_keys=API_KEYS, store=stored) as gateway:
            http.base_url = httpx.URL(gateway.url)
            yield http, store
    await brokers.close()


async def objects_in(store: Store, tenant: TenantId) -> dict[str, str]:
    """One object of each kind: name of the parameter of paths -> id."""
    now = await store.database.time()
    file = await put(store, b"content", tenant)
    batch = a_batch(tenant, made_at=now)
    await store.batches.add(batch)
    response = a_response(tenant, made_at=now)
    await store.responses.add(response, (an_event(0), an_event(1)), held_s=3600.0)
    asked = Asked(
        tenant=tenant,
        request_id=RequestId(f"order-{file.id}"),
        digest="d",
        endpoint="/v1/completions",
        model="tiny-llama",
        kept_s=3600.0,
    )
    await store.requests.ask([asked])
    return {
        "file_id": file.id,
        "batch_id": batch.id,
        "response_id": response.id,
        "request_id": asked.request_id,
    }


@pytest.mark.parametrize(("method", "path"), OF_OBJECTS)
async def test_objects_of_others_are_not_found(served: Served, method: str, path: str):
    http, store = served
    rig = Rig(http, await objects_in(store, ACME))
    of_other = await rig.ask(method, path, "sk-other")
    of_owner = await rig.ask(method, path, "sk-acme")

    assert of_other.status_code == 404
    assert of_owner.status_code not in {401, 403, 404, 405}


async def test_lists_have_the_objects_of_the_tenant_alone(served: Served):
    http, store = served
    rig = Rig(http, await objects_in(store, LISTED))
    for path in LISTS:
        of_other = (await rig.ask("get", path, "sk-other")).json()
        of_owner = (await rig.ask("get", path, "sk-listed")).json()

        assert of_other["data"] == []
        assert len(of_owner["data"]) == 1
