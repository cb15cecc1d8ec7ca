"""What is checked before a body is read, in each application that reads one."""

import asyncio
from codecs import BOM_UTF8
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.admission import ADMISSION, INTERNAL, Internal, admission, read_ahead
from services.gateway.application import application_of
from services.gateway.body import BodyMemory
from services.gateway.responses.application import StoredResponses
from services.gateway.settings import Settings
from services.gateway.state import Gateway
from shared.contracts.base import ModelName, TenantId
from shared.contracts.checks import IngressLimits
from shared.contracts.errors import CapacityError, ContractError, TransientError
from shared.contracts.models import ModelEntry
from shared.contracts.tenants.keys import Scope
from shared.models.registry import ModelRegistry, write_registry
from shared.runtime.health import Health
from tests.unit.gateway.rig import MODEL, DoorRig, gateway_of, scope_of, tenants_of

ACME, KEY, LIMIT = TenantId("acme"), (b"authorization", b"Bearer sk"), 1000
CHAT, RESPONSES, FILES = "/v1/chat/completions", "/v1/responses", "/v1/files"


@dataclass
class FullMesh:
    """A producer that refuses requests, and notes what they take at the gateway."""

    gateway: Gateway | None = None
    open: list[tuple[int, int]] = field(default_factory=list)
    """Slots and bytes of bodies at each request."""

    async def submit(self, *_: object, **__: object) -> None:
        assert self.gateway is not None
        self.open.append((self.gateway.tenants.num_open, self.gateway.bodies.num_bytes))
        raise CapacityError("the mesh is full", retry_after_s=1.0)


def full_gateway(rig: DoorRig, registry: ModelRegistry | None = None) -> Gateway:
    """A gateway with one slot for each tenant, before a mesh that is full."""
    settings = Settings(limits=IngressLimits(max_body_bytes=LIMIT))
    registry, mesh = registry or rig.registry, FullMesh()
    mesh.gateway = gateway_of(
        rig,
        mesh,
        settings=settings,
        registry=registry,
        tenants=tenants_of(api_keys={"sk": "acme"}),
        bodies=BodyMemory(2 * LIMIT),
    )
    return mesh.gateway


class Client:
    """A client that sends *body* and waits for the answer."""

    def __init__(self, body: bytes = b"") -> None:
        self._body = body
        self.num_read = 0
        self.status = 0
        self.answer = b""

    async def receive(self) -> dict[str, Any]:
        self.num_read += 1
        if self.num_read > 1:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def send(self, event: Mapping[str, Any]) -> None:
        self.status = event.get("status", self.status)
        self.answer += event.get("body", b"")

    @property
    def code(self) -> str:
        return str(msgspec.json.decode(self.answer)["error"]["code"])


@pytest.fixture(params=["engines", "servers"])
def gateway(request: pytest.FixtureRequest, door_rig: DoorRig, tmp_path: Path) -> Gateway:
    """A gateway whose model own engines or servers of others have."""
    if request.param == "engines":
        return full_gateway(door_rig)
    file = tmp_path / "registry.json"
    write_registry(file, [ModelEntry(name=ModelName(MODEL), takes="bodies", max_model_len=512)])
    return full_gateway(door_rig, ModelRegistry.load(file))


async def post(gateway: Gateway, client: Client, path: str, *headers: tuple[bytes, bytes]) -> None:
    """Send a request through all layers that may read its body."""
    front = application_of(gateway, Health(service="gateway"))
    application = StoredResponses(gateway, None, front)
    await application(scope_of(path, *headers), client.receive, client.send)


def chat(**fields: Any) -> bytes:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    return msgspec.json.encode(asked | fields)


async def test_a_request_takes_one_slot_and_the_bytes_of_its_body(gateway: Gateway):
    client, body = Client(chat()), chat()
    await post(gateway, client, CHAT, KEY)

    mesh: Any = gateway.producer
    assert mesh.open == [(1, len(body))]
    assert (client.status, client.code) == (429, "over_capacity")
    assert (gateway.tenants.num_open, gateway.bodies.num_bytes) == (0, 0)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("fields", [{}, {"stream": True}])
async def test_a_byte_order_mark_before_a_body_is_ignored(
    gateway: Gateway, path: str, fields: dict[str, Any]
):
    client = Client(BOM_UTF8 + chat(prompt="hello", **fields))
    await post(gateway, client, path, KEY)

    mesh: Any = gateway.producer
    assert len(mesh.open) == 1
    assert (client.status, client.code) == (429, "over_capacity")


async def test_applications_that_read_bodies_get_no_byte_order_mark(gateway: Gateway):
    client = Client(BOM_UTF8 + b"{}")
    with admission(gateway, scope_of("/v1/batches", KEY)) as admitted:
        assert await admitted.body(client.receive) == b"{}"


LENGTH = (b"content-length", str(LIMIT + 1).encode())


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ([], 401, "invalid_api_key"),
        ([KEY, (b"x-headway-priority", b"high")], 400, "invalid_header"),
        ([KEY, LENGTH], 413, "body_too_large"),
    ],
)
async def test_a_refused_body_is_not_read(
    gateway: Gateway, headers: list[tuple[bytes, bytes]], status: int, code: str
):
    client = Client(chat())
    await post(gateway, client, CHAT, *headers)

    assert (client.status, client.code, client.num_read) == (status, code, 0)


async def test_without_a_slot_no_body_is_read(gateway: Gateway):
    client = Client(chat())
    with gateway.tenants.slot(ACME):
        await post(gateway, client, CHAT, KEY)

    assert (client.status, client.code, client.num_read) == (429, "over_capacity", 0)


async def test_without_memory_no_declared_body_is_read(gateway: Gateway):
    client = Client(chat())
    with gateway.bodies.held(TenantId("other")) as hold:
        hold(LIMIT)
        await post(gateway, client, CHAT, KEY, (b"content-length", b"501"))

    assert (client.status, client.code, client.num_read) == (503, "over_capacity", 0)


async def test_a_gateway_that_stops_reads_no_body(gateway: Gateway):
    client = Client(chat())
    gateway.stop.set()
    await post(gateway, client, CHAT, KEY)

    assert (client.status, client.num_read) == (503, 0)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_body_without_length_is_refused_once_it_is_too_large(gateway: Gateway, path: str):
    client = Client(b"x" * (LIMIT + 1))
    await post(gateway, client, path, KEY)

    assert (client.status, client.code, client.num_read) == (413, "body_too_large", 1)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_model_that_is_not_ready_is_refused_for_now(gateway: Gateway, path: str):
    gateway.registry.expected = frozenset({"new"})
    client = Client(chat(model="new"))
    await post(gateway, client, path, KEY)

    assert (client.status, client.code) == (503, "model_not_ready")
    assert gateway.tenants.num_open == 0


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_body_that_is_nested_too_deeply_is_refused(gateway: Gateway, path: str):
    client = Client(b'{"model":' + b"[" * (LIMIT - 20))
    await post(gateway, client, path, KEY)

    assert (client.status, client.code) == (400, "invalid_json")


async def test_a_request_for_the_store_without_a_slot_is_refused_unread(gateway: Gateway):
    """It is not passed on as one that is not stored, although its fields are unknown."""
    client = Client(chat(store=True))
    with gateway.tenants.slot(ACME):
        await post(gateway, client, RESPONSES, KEY)

    mesh: Any = gateway.producer
    assert (client.status, client.num_read, mesh.open) == (429, 0, [])


async def test_the_application_of_a_body_read_ahead_takes_no_slot(door_rig: DoorRig):
    gateway = full_gateway(door_rig)
    client = Client(b"{}")
    async with read_ahead(gateway, scope_of(CHAT, KEY), client.receive) as (request, body):
        with admission(gateway, request.scope) as admitted:
            again = await admitted.body(request.receive)
            open_ones = gateway.tenants.num_open, gateway.bodies.num_bytes

    assert (admitted.tenant, body, again) == (ACME, b"{}", b"{}")
    assert open_ones == (1, 2)


def test_headers_cannot_admit_a_request(door_rig: DoorRig):
    gateway = full_gateway(door_rig)
    names = [(ADMISSION.encode(), b"acme"), (INTERNAL.encode(), b"acme")]
    with pytest.raises(ContractError), admission(gateway, scope_of(CHAT, *names)):
        pass


def test_the_key_must_allow_what_is_asked(door_rig: DoorRig):
    """Keys of settings are for everything but views of the whole mesh."""
    gateway = full_gateway(door_rig)
    with admission(gateway, scope_of(FILES, KEY), needs=Scope.FILES) as admitted:
        pass
    with (
        pytest.raises(ContractError) as error,
        admission(gateway, scope_of(FILES, KEY), needs=Scope.OPERATOR),
    ):
        pass

    assert admitted.tenant == ACME
    assert error.value.status == 403


def test_internal_requests_need_no_key_and_no_free_slot(door_rig: DoorRig):
    gateway = full_gateway(door_rig)
    internal = scope_of(RESPONSES) | {INTERNAL: Internal(ACME)}
    with ExitStack() as held:
        held.enter_context(admission(gateway, scope_of(CHAT, KEY)))
        admitted = held.enter_context(admission(gateway, internal))
        num_open = gateway.tenants.num_open
        with pytest.raises(CapacityError), admission(gateway, scope_of(CHAT, KEY)):
            pass

    assert (admitted.tenant, num_open) == (ACME, 2)
    assert gateway.tenants.num_open == 0


def test_a_gateway_that_stops_admits_nothing(door_rig: DoorRig):
    gateway = full_gateway(door_rig)
    gateway.stop.set()
    with pytest.raises(TransientError), admission(gateway, scope_of(CHAT, KEY)):
        pass
