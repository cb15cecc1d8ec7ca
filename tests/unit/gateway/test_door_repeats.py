"""Under which id a request that may be repeated is published."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from services.gateway.door import Door
from shared.api.digests import call_digest
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
class Rig:
    """A door to one model."""

    door: Door
    mesh: FullMesh

    async def post(
        self, path: str, body: bytes, *headers: tuple[bytes, bytes]
    ) -> dict[bytes, bytes]:
        """Send a request; return the headers of the answer."""
        return (await posted(self.door, path, body, *headers))[1]


def rig_of(parts: DoorRig, *, store: Any) -> Rig:
    mesh = FullMesh()
    gateway = gateway_of(parts, mesh, tenants=tenants_of(default_tenant="acme"), store=store)
    return Rig(Door(gateway), mesh)


@pytest.fixture
def rig(door_rig: DoorRig) -> Rig:
    return rig_of(door_rig, store=UsableStore())


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": MODEL, "prompt": "hello"} | fields)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (COMPLETIONS, body()),
        (COMPLETIONS, body(stream=True)),
        (EMBEDDINGS, msgspec.json.encode({"model": MODEL, "input": "hello"})),
    ],
    ids=["whole", "streamed", "embeddings"],
)
async def test_request_under_a_key_has_an_id_and_a_digest(rig: Rig, path: str, asked: bytes):
    headers = await rig.post(path, asked, KEY)

    ((message, digest),) = rig.mesh.given
    assert message.id == headers[b"x-headway-request-id"].decode()
    assert message.id is not None
    assert message.id.startswith("idem-")
    assert (message.endpoint, message.tenant) == (path, "acme")
    assert digest == call_digest(path, asked)


async def test_preference_is_ignored_where_answers_cannot_be_collected_later(
    door_rig: DoorRig,
):
    rig = rig_of(door_rig, store=None)
    await rig.post(EMBEDDINGS, msgspec.json.encode({"model": MODEL, "input": "hello"}), PREFER)

    ((_, digest),) = rig.mesh.given
    assert digest is None
