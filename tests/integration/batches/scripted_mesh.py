"""A mesh that answers the lines of batches as a script says, through the store alone."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.gateway.batches.publishing import BatchPorts
from services.gateway.batches.settings import BatchSettings
from services.gateway.webhooks.settings import Webhook, WebhookSettings
from shared.contracts.base import (
    InstanceId,
    ModelName,
    RequestId,
    RunId,
    TenantId,
    UnixTime,
    encode,
)
from shared.contracts.errors import BrokerUnavailableError
from shared.contracts.ingress import CallRequest, InferenceRequest
from shared.contracts.models import ModelEntry
from shared.contracts.qos import SloVerdict
from shared.contracts.requests import (
    ErrorInfo,
    Final,
    FinishReason,
    RequestCompleted,
    RequestFailed,
    Timings,
    Usage,
)
from shared.models.registry import ModelRegistry
from shared.producer.assembly import CANCELLED
from shared.runtime.clock import SystemClock
from shared.store.ids import new_batch_id
from shared.store.objects.batches import StoredBatch
from shared.store.requests.records import Ended
from shared.store.settings import StoreSettings
from shared.store.store import Store
from tests.stores import ACME, put

CHAT = "/v1/chat/completions"
MODEL = "m"
REGISTRY = ModelRegistry(
    [
        ModelEntry(name=ModelName(MODEL), takes="bodies", max_model_len=512),
        ModelEntry(name=ModelName("vectors"), path="/nowhere", task="embed", max_model_len=512),
    ]
)
Body = CallRequest | InferenceRequest
Script = Callable[[Body, int], Final | None]
"""Request and the number of its publication, from 1 -> its final, or None to keep it running."""


def completed(body: Body) -> RequestCompleted:
    """A response that repeats the request's text."""
    assert isinstance(body, CallRequest)
    text = msgspec.json.decode(bytes(body.body))["messages"][0]["content"]
    response = {"object": "chat.completion", "choices": [{"message": {"content": text}}]}
    now = SystemClock().now()
    return RequestCompleted(
        request_id=RequestId(body.id or ""),
        run_id=RunId("run"),
        instance_id=InstanceId("i"),
        model=MODEL,
        token_ids=(),
        text="",
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2),
        timings=Timings(
            arrived_at=now,
            grouped_at=now,
            pulled_at=now,
            submitted_at=now,
            first_token_at=now,
            finished_at=now,
        ),
        verdict=SloVerdict(attained=True),
        engine="scripted",
        response=msgspec.Raw(json.dumps(response).encode()),
    )


def failed(body: Body, **fields: Any) -> RequestFailed:
    values: dict[str, Any] = {"message": "no", "code": "bad", "status": 400}
    return RequestFailed(
        request_id=RequestId(body.id or ""),
        error=ErrorInfo(**(values | fields)),
        at=SystemClock().now(),
    )


def answer(body: Body, _number: int) -> Final | None:
    """Answer every request at once."""
    return completed(body)


def run_on(_body: Body, _number: int) -> Final | None:
    """Answer no request."""
    return None


@dataclass
class ScriptedMesh:
    """Stands for the producer and the mesh behind it."""

    store: Store
    script: Script = answer
    published: Counter[str] = field(default_factory=Counter)
    bodies: dict[str, Body] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    is_away: bool = False
    num_refused: int = 0
    """Number of publishes while the broker was away."""
    on_publish: Callable[[int], None] = lambda _total: None

    async def publish_stored(self, body: Body, *, digest: str) -> None:
        """Publish a request; a repeat of one that runs or has ended joins it."""
        await asyncio.sleep(0)
        if self.is_away:
            self.num_refused += 1
            raise BrokerUnavailableError("away")
        request_id = RequestId(body.id or "")
        self.published[request_id] += 1
        self.bodies[request_id] = body
        row = await self.store.requests.get(TenantId(body.tenant or ""), request_id)
        assert row is not None
        assert row.digest == digest
        if row.final is None:
            final = self.script(body, self.published[request_id])
            if final is not None:
                await self.end(TenantId(body.tenant or ""), final)
        self.on_publish(self.published.total())

    async def cancel_stored(self, tenant: TenantId, request_id: RequestId) -> None:
        """End a request that runs."""
        self.cancelled.add(request_id)
        error = RequestFailed(request_id=request_id, error=CANCELLED, at=SystemClock().now())
        await self.end(tenant, error)

    async def end(self, tenant: TenantId, final: Final) -> None:
        """Write a final, as the store's consumer does."""
        outcome = "completed" if isinstance(final, RequestCompleted) else final.error.code
        ended = Ended(
            tenant=tenant,
            request_id=final.request_id,
            outcome=outcome,
            final=encode(final),
            at=SystemClock().now(),
        )
        await self.store.requests.end([ended])


WEBHOOK = Webhook(url="https://example.com/hook", secret="whsec_" + "a" * 32)


def ports_of(mesh: ScriptedMesh, kept: StoreSettings, **fields: Any) -> BatchPorts:
    """What the runners of one gateway use; *fields* are settings of batches."""
    quick: dict[str, Any] = {"poll_s": 0.01, "settle_s": 0.5, "lease_s": 1.0}
    return BatchPorts(
        store=mesh.store,
        producer=mesh,
        registry=REGISTRY,
        settings=BatchSettings(**(quick | fields)),
        kept=kept,
        webhooks=WebhookSettings(endpoints={ACME: (WEBHOOK,)}),
        max_body_bytes=100_000,
        clock=SystemClock(),
    )


def a_line(number: int, **fields: Any) -> bytes:
    """The line with `custom_id` c<number>; *fields* are those of its body."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"text {number}"}]}
    line = {"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body | fields}
    return json.dumps(line).encode() + b"\n"


async def submitted(
    store: Store, content: bytes, *, window_s: float = 600.0, **fields: Any
) -> StoredBatch:
    """A batch with the input *content*, as the HTTP interface makes it."""
    file = await put(store, content)
    now: UnixTime = await store.database.time()
    values: dict[str, Any] = {
        "id": new_batch_id(now),
        "tenant": ACME,
        "endpoint": CHAT,
        "input_file_id": file.id,
        "input_body": file.body,
        "completion_window": f"{window_s:g}s",
        "created_at": now,
        "expires_at": now + window_s,
    }
    batch = StoredBatch(**(values | fields))
    await store.batches.add(batch)
    return batch
