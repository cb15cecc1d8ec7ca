"""Connects the parts of stored responses and of webhooks with a gateway."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from services.gateway.requests.ids import call_id_of
from services.gateway.responses.feed import Feed
from services.gateway.responses.run import RunTools
from services.gateway.responses.runner import Runner
from services.gateway.responses.service import Responses
from services.gateway.state import Gateway
from shared.contracts.base import TenantId
from shared.store.group_commit import GroupCommit


@asynccontextmanager
async def opened_responses(gateway: Gateway, front: Any) -> AsyncIterator[Responses | None]:
    """
    Context in which responses are stored and run; None without a store.

    Args:
        gateway: Components that all requests share.
        front: ASGI application of the front.
    """
    store, settings = gateway.store, gateway.settings
    if store is None:
        yield None
        return
    feed = Feed(store.responses)

    async def cancel(tenant: TenantId, key: str) -> None:
        await gateway.producer.cancel_stored(tenant, call_id_of(tenant, key))

    tools = RunTools(
        rows=store.responses,
        feed=feed,
        front=front,
        commits=GroupCommit(store.responses.append),
        webhooks=settings.webhooks,
        cancel=cancel,
        clock=gateway.clock,
        stop=gateway.stop,
    )
    runner = Runner(store, tools, max_running=settings.max_outstanding_per_tenant)
    async with runner.running():
        yield Responses(store, settings.store, gateway.registry, runner, feed)
