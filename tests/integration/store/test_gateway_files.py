"""The Files API of a gateway, with OpenAI's client and with plain HTTP."""

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from ops.bench.postgres import PrivatePostgres
from services.gateway.files.retention import Retention
from shared.store.bodies import Bodies
from shared.store.ids import new_file_id
from shared.store.migrating import migrate
from shared.store.settings import StoreSettings
from tests.brokers import MEMORY, BrokerRig, eventually
from tests.integration.gateway_rig import (
    KEYS,
    GatewayRig,
    error_of,
    http_client,
    http_of,
    running_gateway,
)
from tests.stores import ManualClock, a_file, open_store, place, put, settings_of
from tests.tcp_proxy import TcpProxy

LINES = b'{"custom_id": "1"}\n' * 1000
BATCH: dict[str, str] = {"purpose": "batch"}


@pytest.fixture
def broker_target() -> str:
    """Files do not pass through the broker."""
    return MEMORY


ONLY_SQLITE = pytest.mark.parametrize("url", ["sqlite"], indirect=True)
"""For tests of what the database has no part in."""


Start = Callable[..., contextlib.AbstractAsyncContextManager[GatewayRig]]


@pytest.fixture
def start(broker_rig: BrokerRig, registry: Path, settings: StoreSettings) -> Start:
    """Function that runs a gateway with the store; its arguments are settings of the store."""

    def running(**fields: object) -> contextlib.AbstractAsyncContextManager[GatewayRig]:
        store = msgspec.to_builtins(settings) | fields
        return running_gateway(broker_rig, registry, api_keys=KEYS, store=store)

    return running


def client_of(rig: GatewayRig, key: str = "sk-acme") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key=key, max_retries=0, timeout=60.0)


async def upload(
    http: httpx.AsyncClient, content: bytes = LINES, data: dict[str, str] = BATCH
) -> httpx.Response:
    return await http.post("/v1/files", data=data, files={"file": ("lines.jsonl", content)})


async def test_openais_client_uploads_lists_reads_and_deletes(start: Start):
    async with start() as rig, client_of(rig) as client:
        made = await client.files.create(
            file=("lines.jsonl", LINES),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        others = [
            await client.files.create(file=(f"{number}.txt", b"x"), purpose="user_data")
            for number in range(3)
        ]
        found = await client.files.retrieve(made.id)
        page = await client.files.list(limit=2)
        listed = [file.id async for file in client.files.list(limit=2, order="asc")]
        batches = [file.id async for file in client.files.list(purpose="batch")]
        content = await client.files.content(made.id)
        deleted = await client.files.delete(made.id)
        with pytest.raises(openai.NotFoundError) as gone:
            await client.files.retrieve(made.id)

    assert (made.object, made.purpose, made.filename) == ("file", "batch", "lines.jsonl")
    assert (made.bytes, made.status) == (len(LINES), "processed")
    assert made.expires_at == made.created_at + 3600
    assert found == made
    assert [file.id for file in page.data] == [others[2].id, others[1].id]
    assert page.has_more
    assert listed == [made.id, *(file.id for file in others)]
    assert batches == [made.id]
    assert content.content == LINES
    assert (deleted.id, deleted.deleted) == (made.id, True)
    assert gone.value.code == "file_not_found"
    assert others[0].expires_at is None


@ONLY_SQLITE
async def test_files_of_a_batch_expire_by_default_as_in_openais_api(start: Start):
    async with start() as rig, http_of(rig) as http:
        file = (await upload(http)).json()

    assert file["expires_at"] - file["created_at"] == 30 * 24 * 3600


async def test_no_tenant_sees_or_deletes_anothers_file(start: Start):
    async with start() as rig, http_of(rig) as http, http_of(rig, "sk-other") as foreign:
        path = f"/v1/files/{(await upload(http)).json()['id']}"
        answers = [
            await foreign.get(path),
            await foreign.get(f"{path}/content"),
            await foreign.delete(path),
        ]
        listed = (await foreign.get("/v1/files")).json()
        still = await http.get(f"{path}/content")

    assert [error_of(answer) for answer in answers] == [(404, "file_not_found", "file_id")] * 3
    assert listed["data"] == []
    assert still.content == LINES


@ONLY_SQLITE
async def test_requests_without_a_valid_key_are_refused(start: Start):
    async with start() as rig, http_of(rig, "sk-wrong") as http:
        answers = [
            await http.get("/v1/files"),
            await upload(http),
            await http.get(f"/v1/files/{new_file_id(1.7e9)}/content"),
        ]

    assert {error_of(answer)[:2] for answer in answers} == {(401, "invalid_api_key")}


@ONLY_SQLITE
async def test_other_paths_and_methods_are_refused_and_the_front_still_answers(start: Start):
    async with start() as rig, http_of(rig) as http:
        wrong = [
            await http.get("/v1/files/x/y"),
            await http.get("/v1/files/x/content/z"),
            await http.put("/v1/files"),
            await http.get("/v1/files/%00"),
            await http.get("/v1/files", params={"limit": "none"}),
            await http.post("/v1/files", json={"purpose": "batch"}),
        ]
        models = await http.get("/v1/models")

    assert [error_of(answer) for answer in wrong] == [
        (404, "not_found", None),
        (404, "not_found", None),
        (405, "method_not_allowed", None),
        (404, "file_not_found", "file_id"),
        (400, "invalid_request", "limit"),
        (400, "invalid_request", "content-type"),
    ]
    assert models.status_code == 200


@ONLY_SQLITE
async def test_an_invalid_upload_names_the_field_and_leaves_nothing(
    start: Start, settings: StoreSettings
):
    async with start() as rig, http_of(rig) as http:
        no_purpose = await upload(http, data={})
        wrong_purpose = await upload(http, data={"purpose": "x"})
        no_file = await http.post("/v1/files", data=BATCH, files={"other": ("a", b"x")})
        listed = (await http.get("/v1/files")).json()

    assert [error_of(each) for each in (no_purpose, wrong_purpose, no_file)] == [
        (400, "invalid_request", "purpose"),
        (400, "invalid_request", "purpose"),
        (400, "invalid_request", "file"),
    ]
    assert listed["data"] == []
    assert bodies_on_disk(settings) == []


def bodies_on_disk(settings: StoreSettings) -> list[Path]:
    root = Path(settings.data_dir or "") / "files"
    return [path for name in ("bodies", "uploads") for path in (root / name).rglob("file-*")]


async def test_limits_name_what_is_exceeded(start: Start, settings: StoreSettings):
    limits = {"max_bytes": 2500, "max_files": 3}
    async with (
        start(max_file_bytes=1000, limits=limits) as rig,
        http_of(rig) as http,
        http_of(rig, "sk-other") as other,
    ):
        too_large = await upload(http, b"x" * 1001)
        declared = await upload(http, b"x" * 200_000)
        for _ in range(2):
            assert (await upload(http, b"x" * 1000)).status_code == 200
        too_many_bytes = await upload(http, b"x" * 501)
        assert (await upload(http, b"x" * 500)).status_code == 200
        too_many_files = await upload(http, b"")
        of_other = await upload(other, b"x" * 1000)
        file_id = (await http.get("/v1/files")).json()["last_id"]
        await http.delete(f"/v1/files/{file_id}")
        after_delete = await upload(http, b"x" * 1000)

    assert error_of(too_large) == (413, "file_too_large", "file")
    assert "the limit is 1000 bytes" in too_large.json()["error"]["message"]
    assert error_of(declared) == (413, "file_too_large", "file")
    assert error_of(too_many_bytes) == (413, "quota_exceeded", "file")
    assert "2500 bytes of files (store.limits.max_bytes) and has 2000" in too_many_bytes.text
    assert error_of(too_many_files) == (429, "quota_exceeded", "file")
    assert "3 files (store.limits.max_files)" in too_many_files.text
    assert (of_other.status_code, after_delete.status_code) == (200, 200)
    assert len(bodies_on_disk(settings)) == 4


@ONLY_SQLITE
async def test_a_full_disk_is_reported_and_leaves_no_half_file(
    start: Start, settings: StoreSettings, monkeypatch: pytest.MonkeyPatch
):
    def full(_self: Bodies, _stream: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with start() as rig, http_of(rig) as http:
        with monkeypatch.context() as patched:
            patched.setattr(Bodies, "sync", full)
            refused = await upload(http)
        left = bodies_on_disk(settings)
        later = await upload(http)

    assert error_of(refused) == (507, "store_full", None)
    assert left == []
    assert later.status_code == 200


@ONLY_SQLITE
async def test_a_client_that_leaves_in_the_middle_leaves_nothing(
    start: Start, settings: StoreSettings
):
    begun = asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        yield (
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            + b"x" * 2_000_000
        )
        begun.set()
        await asyncio.Event().wait()

    async with start() as rig, http_of(rig) as http:
        headers = {"content-type": "multipart/form-data; boundary=b"}
        sending = asyncio.create_task(http.post("/v1/files", content=parts(), headers=headers))
        await begun.wait()
        await eventually(lambda: len(bodies_on_disk(settings)) == 1)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await eventually(lambda: bodies_on_disk(settings) == [])
        listed = (await http.get("/v1/files")).json()

    assert listed["data"] == []


@ONLY_SQLITE
async def test_a_lost_body_is_reported(start: Start, settings: StoreSettings):
    async with start() as rig, http_of(rig) as http:
        file_id = (await upload(http)).json()["id"]
        (body,) = bodies_on_disk(settings)
        body.unlink()
        lost = await http.get(f"/v1/files/{file_id}/content")
        (body.parents[2]).rename(body.parents[2].with_name("unmounted"))
        unmounted = await http.get(f"/v1/files/{file_id}/content")
        (body.parents[2].with_name("unmounted")).rename(body.parents[2])

    assert error_of(lost) == (410, "file_lost", "file_id")
    assert error_of(unmounted) == (503, "store_unavailable", None)


async def test_without_a_store_the_error_names_the_setting(broker_rig: BrokerRig, registry: Path):
    async with running_gateway(broker_rig, registry) as rig, http_client() as http:
        answers = [
            await http.get(f"{rig.url}/v1/files"),
            await http.post(f"{rig.url}/v1/files", data=BATCH, files={"file": ("a", b"x")}),
        ]
        health = (await http.get(f"{rig.url}/health")).json()

    assert {error_of(answer)[:2] for answer in answers} == {(501, "store_not_configured")}
    assert "store.data_dir" in answers[0].text
    assert health["store"] == "none"


async def test_inference_continues_while_the_database_is_away(
    broker_rig: BrokerRig,
    registry: Path,
    postgres: PrivatePostgres,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("shared.store.store.CHECK_PERIOD_S", 0.05)
    name = await postgres.create()
    await migrate(place(settings_of(postgres.url(name), tmp_path)))
    chat: dict[str, Any] = {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": "hello"}],
    }
    async with TcpProxy("127.0.0.1", postgres.port) as proxy:
        proxy.refusing = True
        settings = settings_of(postgres.url(name, port=proxy.port), tmp_path)
        store = msgspec.to_builtins(msgspec.structs.replace(settings, timeout_s=2.0))
        async with running_gateway(broker_rig, registry, store=store) as rig, http_client() as http:
            http.base_url = httpx.URL(rig.url)

            async def lists() -> bool:
                return (await http.get("/v1/files")).status_code == 200

            away = await upload(http)
            answer = await http.post("/v1/chat/completions", json=chat)
            proxy.refusing = False
            await eventually(lists)
            stored = await upload(http)
            proxy.refusing = True
            proxy.drop()
            away_again = await http.get("/v1/files")
            answer_again = await http.post("/v1/chat/completions", json=chat)
            proxy.refusing = False
            await eventually(lists)
            content = await http.get(f"/v1/files/{stored.json()['id']}/content")

    assert error_of(away)[:2] == error_of(away_again)[:2] == (503, "store_unavailable")
    assert int(away.headers["retry-after"]) >= 1
    assert (answer.status_code, answer_again.status_code) == (200, 200)
    assert content.content == LINES


async def test_a_gateway_refuses_to_start_without_the_schema(
    broker_rig: BrokerRig, registry: Path, tmp_path: Path
):
    store = msgspec.to_builtins(settings_of(None, tmp_path))
    with pytest.raises(BaseException, match="run `headway store migrate`"):
        async with running_gateway(broker_rig, registry, store=store):
            pass


async def test_retention_deletes_what_expired_and_what_was_left_behind(settings: StoreSettings):
    clock = ManualClock()
    day_s = 86400.0
    async with open_store(settings, clock=clock) as store:
        await store.check()
        kept = await put(store, b"kept")
        expiring = await put(store, b"expiring", expires_at=clock.now + 60.0)
        lost = await put(store, b"lost")
        await store.bodies.remove(lost.body)
        orphan, broken, fresh = (new_file_id(clock.now) for _ in range(3))
        for file_id in (orphan, fresh):
            async with store.bodies.upload(file_id) as writer:
                await writer.write(b"x")
                await writer.commit()
        root = Path(settings.data_dir or "") / "files"
        (root / "uploads" / broken).write_bytes(b"half")

        first, second = Retention(store, settings), Retention(store, settings)
        await first.round()
        early = sorted(path.name for path in bodies_on_disk(settings))
        status_of_lost = await store.files.get(lost.tenant, lost.id)
        clock.now += 60.0
        await second.round()
        still = sorted(path.name for path in bodies_on_disk(settings))
        await first.round()
        expired = sorted(path.name for path in bodies_on_disk(settings))
        await store.files.add(a_file(id=fresh, body=store.bodies.body_of(fresh)), lambda _: None)
        clock.now += day_s + 1.0
        await second.round()
        late = sorted(path.name for path in bodies_on_disk(settings))
        (root / lost.body).parent.mkdir(exist_ok=True)
        (root / lost.body).write_bytes(b"lost")
        clock.now += 2 * settings.sweep_period_s
        await second.round()
        found = await store.files.get(lost.tenant, lost.id)

    assert early == sorted([kept.id, expiring.id, orphan, fresh, broken])
    assert status_of_lost is not None
    assert status_of_lost.status == "lost"
    assert still == early
    assert expired == sorted([kept.id, orphan, fresh, broken])
    assert late == sorted([kept.id, fresh])
    assert found is not None
    assert found.status == "stored"


async def test_a_job_that_another_gateway_took_over_is_left_to_it(settings: StoreSettings):
    clock = ManualClock()
    async with open_store(settings, clock=clock) as store:
        await store.check()
        first, second = Retention(store, settings), Retention(store, settings)
        await first.round()
        clock.now += 1000.0
        file = await put(store, b"x", expires_at=clock.now + 1.0)
        await second.round()
        clock.now += 2.0
        await first.round()
        before = await store.bodies.exists(file.body)
        await second.round()
        after = await store.bodies.exists(file.body)
        await second.release()

    assert (before, after) == (True, False)
