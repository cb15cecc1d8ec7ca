"""Stores for tests, on both databases."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from sqlalchemy import ColumnElement, Double, literal

from shared.contracts.base import TenantId
from shared.store.files import StoredFile
from shared.store.ids import new_batch_id, new_file_id, new_response_id
from shared.store.location import PRIVATE, Host, Location, location_of
from shared.store.migrating import migrate
from shared.store.objects.batches import StoredBatch
from shared.store.objects.responses import StoredEvent, StoredResponse
from shared.store.settings import StoreSettings
from shared.store.store import Store

NOW = 1_700_000_000.0
ACME, OTHER = TenantId("acme"), TenantId("other")
_migrated_files: list[bytes] = []
"""The first SQLite file that was migrated here: others are copies."""


class ManualClock:
    """A clock of the database that tests set."""

    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self, is_sqlite: bool) -> ColumnElement[float]:  # noqa: FBT001 - see `Now`
        return literal(self.now, Double)


def settings_of(url: str | None, directory: Path, **fields: object) -> StoreSettings:
    """Settings of a store with its bodies, and SQLite if there is no URL, in *directory*."""
    # A busy machine may stall for longer than the default.
    return StoreSettings(url=url, data_dir=str(directory), timeout_s=20.0, **fields)  # type: ignore[arg-type]  # names of fields


def place(settings: StoreSettings) -> Location:
    location = location_of(settings)
    assert location is not None
    return location


async def migrated_settings(url: str | None, directory: Path) -> StoreSettings:
    """Settings of a store as `settings_of` makes them, with the current schema."""
    settings = settings_of(url, directory)
    file = place(settings).sqlite_file
    if file is None or file.exists():
        await migrate(place(settings))
    elif not _migrated_files:
        await migrate(place(settings))
        _migrated_files.append(file.read_bytes())
    else:
        file.parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        file.write_bytes(_migrated_files[0])
    return settings


@asynccontextmanager
async def open_store(
    settings: StoreSettings, *, clock: ManualClock | None = None, host: Host | None = None
) -> AsyncIterator[Store]:
    """A store that is not checked yet."""
    options = {} if clock is None else {"clock": clock}
    store = Store(place(settings), settings, host=host, **options)  # type: ignore[arg-type]  # a clock
    try:
        yield store
    finally:
        await store.close()


def a_file(tenant: TenantId = ACME, *, made_at: float = NOW, **fields: object) -> StoredFile:
    """The row of a file without a body."""
    file_id = new_file_id(made_at)
    values: dict[str, object] = {
        "id": file_id,
        "tenant": tenant,
        "purpose": "batch",
        "filename": "lines.jsonl",
        "num_bytes": 10,
        "sha256": "0" * 64,
        "created_at": made_at,
        "body": f"bodies/{file_id}",
    }
    return StoredFile(**(values | fields))  # type: ignore[arg-type]  # names of fields


async def put(
    store: Store, content: bytes, tenant: TenantId = ACME, **fields: object
) -> StoredFile:
    """Store a file with its body, as an upload does."""
    now = await store.database.time()
    file_id = new_file_id(now)
    async with store.bodies.upload(file_id) as writer:
        await writer.write(content)
        await writer.commit()
    file = a_file(
        tenant,
        made_at=now,
        id=file_id,
        num_bytes=writer.num_bytes,
        sha256=writer.sha256,
        body=writer.body,
        **fields,
    )
    await store.files.add(file, lambda _totals: None)
    return file


async def content_of(store: Store, file: StoredFile) -> bytes:
    return b"".join([block async for block in store.bodies.read(file.body)])


def a_batch(tenant: TenantId = ACME, *, made_at: float = NOW, **fields: object) -> StoredBatch:
    """The row of a batch whose input has no body."""
    file_id = new_file_id(made_at)
    values: dict[str, object] = {
        "id": new_batch_id(made_at),
        "tenant": tenant,
        "endpoint": "/v1/completions",
        "input_file_id": file_id,
        "input_body": f"bodies/{file_id}",
        "completion_window": "1h",
        "created_at": made_at,
        "expires_at": made_at + 3600.0,
    }
    return StoredBatch(**(values | fields))  # type: ignore[arg-type]  # names of fields


def a_response(
    tenant: TenantId = ACME, *, made_at: float = NOW, **fields: object
) -> StoredResponse:
    """A response that the gateway `a` runs."""
    values: dict[str, object] = {
        "id": new_response_id(made_at),
        "tenant": tenant,
        "model": "m",
        "status": "queued",
        "is_background": True,
        "asked": b'{"model":"m","input":"hello"}',
        "headers": b"{}",
        "created_at": made_at,
        "object": b'{"status":"queued","output":[]}',
        "runner": "a",
    }
    return StoredResponse(**(values | fields))  # type: ignore[arg-type]  # names of fields


def an_event(number: int, kind: str = "response.output_text.delta") -> StoredEvent:
    """An event of a response."""
    return StoredEvent(number=number, type=kind, data=f'{{"number":{number}}}'.encode())
