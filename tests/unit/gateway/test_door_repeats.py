"""Which application reads a call that may be repeated, and under which id."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from services.gateway.call import Call, current
from services.gateway.door import Door
from shared.api.digests import call_digest
from shared.contracts.base import ModelName
from shared.contracts.errors import CapacityError
from shared.contracts.ingress import CallRequest
from tests.unit.gateway.rig import MODEL, DoorRig, gateway_of, posted, tenants_of

COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
KEY = (b"idempotency-key", b"k1")
PREFER = (b"prefer", b"respond-async")


class UsableStore:
    """A store that can be used."""

    def require(self) -> None: ...


@dataclass
class FullMesh:
    """A producer that records requests and refuses them."""

    given: list[tuple[CallRequest, str | None]] = field(default_factory=list)

    async def submit(self, body: CallRequest, *, digest: str | None = None, **_: object) -> None:
        self.given.append((body, digest))
        raise CapacityError("the mesh is full", retry_after_s=1.0)


@dataclass
class Own:
    """The model's own application."""

    calls: list[Call] = field(default_factory=list)
    headers: list[dict[bytes, bytes]] = field(default_factory=list)

    async def __call__(self, scope: dict[str, Any], _receive: Any, send: Any) -> None:
        self.calls.append(current.get())
        self.headers.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


@dataclass
class Rig:
    """A door to one model."""

    door: Door
    own: Own
    mesh: FullMesh

    async def post(
        self, path: str, body: bytes, *headers: tuple[bytes, bytes]
    ) -> dict[bytes, bytes]:
        """Send a request; return the headers of the answer."""
        return (await posted(self.door, path, body, *headers))[1]


def rig_of(parts: DoorRig, *, store: Any) -> Rig:
    own, mesh = Own(), FullMesh()
    gateway = gateway_of(parts, mesh, tenants=tenants_of(default_tenant="acme"), store=store)
    return Rig(Door(gateway, {ModelName(MODEL): own}), own, mesh)


@pytest.fixture
def rig(door_rig: DoorRig) -> Rig:
    return rig_of(door_rig, store=UsableStore())


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": MODEL, "prompt": "hello"} | fields)


async def test_whole_answer_under_a_key_is_asked_as_a_call(rig: Rig):
    headers = await rig.post(COMPLETIONS, body(), KEY)

    ((message, digest),) = rig.mesh.given
    assert message.id == headers[b"x-headway-request-id"].decode()
    assert message.id is not None
    assert message.id.startswith("idem-")
    assert (message.endpoint, message.tenant) == (COMPLETIONS, "acme")
    assert digest == call_digest(COMPLETIONS, body())
    assert rig.own.calls == []


@pytest.mark.parametrize("path", [COMPLETIONS, EMBEDDINGS])
async def test_other_answers_under_a_key_are_made_by_the_models_application(rig: Rig, path: str):
    """Streams have their tokens as they come, and outputs of pooling models have no text."""
    asked = body(stream=path == COMPLETIONS)
    headers = await rig.post(path, asked, KEY)

    (call,) = rig.own.calls
    assert call.digest == call_digest(path, asked)
    assert call.new_request_id().encode() == headers[b"x-headway-request-id"]
    assert rig.own.headers[0][b"x-request-id"].decode() == call.call_id, "answers have this id"


async def test_without_a_key_the_application_gets_the_id_of_the_client(rig: Rig):
    await rig.post(COMPLETIONS, body(), (b"x-request-id", b"mine"))

    (call,) = rig.own.calls
    assert call.digest is None
    assert rig.own.headers[0][b"x-request-id"] == b"mine"


async def test_preference_is_ignored_where_answers_cannot_be_collected_later(
    door_rig: DoorRig,
):
    rig = rig_of(door_rig, store=None)
    await rig.post(EMBEDDINGS, body(), PREFER)

    (call,) = rig.own.calls
    assert call.digest is None
