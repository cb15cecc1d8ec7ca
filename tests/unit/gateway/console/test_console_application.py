"""The console over HTTP, with a broker in memory."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs

from services.gateway.console.application import STATIC, WithConsole
from services.gateway.console.frames import FRAMES
from services.gateway.console.sessions import COOKIE, Sessions
from services.gateway.console.watching import MeshWatch
from services.gateway.tenants import Tenants
from shared.broker import topology
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import BindingSpec, Delivery, OutMessage, Settlement
from shared.contracts.base import Decoder, RequestId, TenantId, encode
from shared.contracts.qos import Slo
from shared.contracts.stories.questions import StoriesReported, StoriesRequested
from shared.contracts.stories.story import Story
from shared.contracts.tenants.keys import Scope
from shared.tenants.keys import key_edit, key_file
from tests.clocks import NOW, FakeClock
from tests.deliveries import UnreliableBroker
from tests.unit.gateway.rig import tenants_of

decode_question: Decoder[StoriesRequested] = Decoder(StoriesRequested)
TOKEN = "token-of-this-test"
HOSTILE = "<img src=x onerror=alert(1)>"


async def front(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"front"})


@pytest.fixture
async def broker() -> AsyncIterator[UnreliableBroker]:
    async with UnreliableBroker(MemoryHub()) as opened:
        await topology.declare(opened)
        yield opened


@pytest.fixture
def watch(broker: UnreliableBroker) -> MeshWatch:
    return MeshWatch(broker, FakeClock())


class Rig:
    """The console in front of an application, and clients of it."""

    def __init__(self, watch: MeshWatch, broker: UnreliableBroker, tenants: Tenants) -> None:
        self.watch = watch
        self.stop = asyncio.Event()
        sessions = Sessions(TOKEN)
        self.session = sessions.open(TOKEN)
        self.application = WithConsole(
            watch=watch,
            broker=broker,
            tenants=tenants,
            sessions=sessions,
            stop=self.stop,
            front=front,
        )

    def client(
        self, *, peer: str = "127.0.0.1", key: str | None = None, opened: bool = True
    ) -> httpx.AsyncClient:
        """A client that has opened the link or not, and may have a key."""
        transport = httpx.ASGITransport(app=self.application, client=(peer, 1))
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(
            transport=transport,
            base_url="http://localhost:8000",
            headers=headers,
            cookies={COOKIE: self.session} if opened else {},
        )


@pytest.fixture
def rig(watch: MeshWatch, broker: UnreliableBroker) -> Rig:
    tenants = tenants_of()
    return Rig(watch, broker, tenants)


async def first_frame(rig: Rig, client: httpx.AsyncClient, view: str) -> dict[str, Any]:
    """The first frame of a view, whose stream then ends."""
    rig.stop.set()
    response = await client.get("/console/events", params={"view": view})
    assert response.headers["content-type"].startswith("text/event-stream")
    (event,) = response.text.split("\n\n")[:-1]
    frame: dict[str, Any] = msgspec.json.decode(event.removeprefix("data: "))
    return frame


async def test_other_paths_go_to_the_front(rig: Rig):
    async with rig.client() as client:
        for path in ("/v1/models", "/consoles", "/"):
            assert (await client.get(path)).text == "front"


async def test_the_page_and_its_modules_are_served_with_a_strict_policy(rig: Rig):
    async with rig.client(peer="10.0.0.7") as client:
        page = await client.get("/console", follow_redirects=True)
        assert page.url.path == "/console/"
        assert "console.js" in page.text
        for file in STATIC.rglob("*.*"):
            found = await client.get(f"/console/{file.relative_to(STATIC)}")
            assert found.status_code == 200
            assert "default-src 'none'" in found.headers["content-security-policy"]
            assert "unsafe" not in found.headers["content-security-policy"]


async def test_files_outside_the_folder_are_not_served(rig: Rig):
    async with rig.client() as client:
        for path in ("/console/../application.py", "/console/%2e%2e/application.py"):
            assert "def " not in (await client.get(path)).text


def test_modules_import_nothing_from_other_hosts():
    for file in STATIC.glob("*.*"):
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text
        assert "https://" not in text
        assert "innerHTML" not in text


@pytest.mark.parametrize("view", FRAMES)
async def test_every_view_streams_frames(rig: Rig, view: str):
    async with rig.client() as client:
        frame = await first_frame(rig, client, view)
    assert frame["view"] == view
    assert rig.watch.num_viewers == 0


async def test_an_unknown_view_is_refused(rig: Rig):
    async with rig.client() as client:
        response = await client.get("/console/events", params={"view": "secrets"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "view"


@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.7"])
async def test_browsers_without_the_link_need_a_key_with_the_scope(rig: Rig, peer: str):
    async with rig.client(peer=peer, opened=False) as client:
        for path in ("/console/events", "/console/dead-letters", "/console/dead-letters/x"):
            assert (await client.get(path)).status_code == 403


async def answer_stories(broker: UnreliableBroker, *stories: Story) -> None:
    """Answer questions about requests as an estimator does."""

    async def on_question(delivery: Delivery) -> None:
        asked = decode_question(delivery.body)
        wanted = [s for s in stories if asked.request_id in (None, s.request_id)]
        reported = StoriesReported(stories=tuple(wanted), heard_since=NOW)
        message = OutMessage(body=encode(reported), kind="stories.reported.v1", persistent=False)
        await broker.publish(topology.REPLIES, asked.reply_to, message)
        await delivery.settle(Settlement.ACK)

    queue = topology.temporary_queue("stories")
    await broker.declare_queue(queue)
    await broker.bind(
        BindingSpec(
            exchange=topology.CONTROL, queue=queue.name, routing_key=topology.CONTROL_STORIES
        )
    )
    await broker.consume(queue.name, on_question, prefetch=1)


async def test_late_requests_and_the_life_of_one(rig: Rig, broker: UnreliableBroker):
    story = Story(
        request_id=RequestId("r/1"), tenant=TenantId(HOSTILE), slo=Slo(ttft_s=1.0),
        arrived_at=NOW - 9.0, grouped_at=NOW - 9.0, pulled_at=NOW - 3.0, submitted_at=NOW - 3.0,
        first_token_at=NOW - 2.0, finished_at=NOW - 1.0, output_tokens=4,
    )  # fmt: skip
    await answer_stories(broker, story)
    async with rig.client() as client:
        late = (await client.get("/console/requests")).json()
        life = (await client.get("/console/requests/r%2F1")).json()
        unknown = await client.get("/console/requests/r2")

    assert [each["id"] for each in late["requests"]] == ["r/1"]
    assert (life["tenant"], life["late"]) == (HOSTILE, True)
    assert life["sentence"].startswith("Its first token came")
    assert unknown.status_code == 404


async def refuse(broker: UnreliableBroker, name: str, body: bytes = b"{}") -> None:
    message = OutMessage(
        body=body, kind="k", message_id=name, headers={topology.REASON_HEADER: HOSTILE}
    )
    await broker.publish(topology.DEAD, "", message)


async def test_dead_letters_are_listed_without_their_content(rig: Rig, broker: UnreliableBroker):
    await refuse(broker, "r1", b'{"prompt": "secret"}')
    async with rig.client() as client:
        first, again = [await client.get("/console/dead-letters") for _ in range(2)]

    assert first.json()["letters"] == again.json()["letters"]
    (letter,) = first.json()["letters"]
    assert (letter["id"], letter["reason"]) == ("r1", HOSTILE)
    assert "secret" not in first.text
    assert first.headers["cache-control"] == "no-store"


async def test_a_prompt_needs_its_own_scope_also_on_this_machine(
    rig: Rig, broker: UnreliableBroker
):
    await refuse(broker, "r1", b'{"prompt": "secret"}')
    async with rig.client() as client:
        response = await client.get("/console/dead-letters/r1")
    assert response.status_code == 403
    assert "prompts" in response.json()["error"]["message"]


async def test_reading_a_prompt_is_logged(
    watch: MeshWatch, broker: UnreliableBroker, tmp_path: Path
):
    await refuse(broker, "r1", b'{"prompt": "secret"}')
    keys = tmp_path / "keys.json"
    made: dict[Scope, str] = {}
    for scope in (Scope.PROMPTS, Scope.OPERATOR):
        with key_edit(keys) as edit:
            _, made[scope] = edit.create(
                tenant=TenantId("ops"), scopes=(scope,), now=watch.clock.now()
            )
    tenants = tenants_of(keys=key_file(keys), clock=watch.clock)
    rig = Rig(watch, broker, tenants)

    async with rig.client(key=made[Scope.OPERATOR]) as client:
        assert (await client.get("/console/dead-letters/r1")).status_code == 403
    with capture_logs() as logs:
        async with rig.client(key=made[Scope.PROMPTS]) as client:
            found = await client.get("/console/dead-letters/r1")
            missing = await client.get("/console/dead-letters/r2")

    assert found.json()["body"] == '{"prompt": "secret"}'
    assert missing.status_code == 404
    read = [each for each in logs if each["event"] == "console.prompt_read"]
    assert [each["dead_letter"] for each in read] == ["r1", "r2"]
    assert all(each["tenant"] == "ops" and each["key"] for each in read)


async def test_the_link_leads_to_the_page_with_a_cookie_once(
    watch: MeshWatch, broker: UnreliableBroker
):
    application = WithConsole(
        watch=watch,
        broker=broker,
        tenants=tenants_of(),
        sessions=Sessions(TOKEN),
        stop=asyncio.Event(),
        front=front,
    )
    transport = httpx.ASGITransport(app=application)
    async with httpx.AsyncClient(transport=transport, base_url="http://mesh:8000") as client:
        assert (await client.get("/console/dead-letters")).status_code == 403
        first = await client.get("/console", params={"token": TOKEN})
        assert (first.status_code, first.headers["location"]) == (307, "/console/")
        assert "httponly" in first.headers["set-cookie"].lower()
        assert (await client.get("/console/dead-letters")).status_code == 200
        again = await client.get("/console", params={"token": TOKEN})
    assert again.status_code == 403
    assert again.json()["error"]["code"] == "link_not_valid"


@pytest.mark.parametrize("path", ["/console/nope", "/console/static/x", "/console/events/x"])
async def test_an_unknown_path_is_404(rig: Rig, path: str):
    async with rig.client() as client:
        with capture_logs() as logs:
            response = await client.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"
    assert not logs


async def test_a_wrong_method_is_405(rig: Rig):
    async with rig.client() as client:
        response = await client.post("/console/events")
    assert response.status_code == 405
    assert response.headers["allow"]
