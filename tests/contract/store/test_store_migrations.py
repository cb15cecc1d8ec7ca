"""Migrations, and the schemas that a service uses or refuses."""

import asyncio
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from shared.contracts.errors import StoreSchemaError
from shared.store.database import Database
from shared.store.migrating import alembic_config, check_schema, migrate, read_schema
from shared.store.migrations import HEAD, revision_id
from shared.store.schema import metadata
from shared.store.settings import StoreSettings
from tests.contract.store.migrators import forkserver, migrate_at
from tests.stores import a_file, open_store, place

NUM_MIGRATORS = 5


def test_the_newest_revision_is_the_one_that_the_code_needs():
    script = ScriptDirectory.from_config(alembic_config())

    assert script.get_current_head() == revision_id(HEAD)
    assert [each.revision for each in script.walk_revisions()] == [
        revision_id(number) for number in range(HEAD, 0, -1)
    ]


async def test_an_empty_database_gets_the_schema_of_the_tables(empty: StoreSettings):
    before, after = await migrate(place(empty))
    database = Database(place(empty).url, timeout_s=20.0)
    async with database.read() as connection:
        differences = await connection.run_sync(
            lambda sync: compare_metadata(
                MigrationContext.configure(sync, opts={"compare_type": True}), metadata
            )
        )
    await database.close()

    assert (before.revision, after.revision) == (0, HEAD)
    assert differences == []


async def test_a_second_migration_changes_nothing(migrated: StoreSettings):
    async with open_store(migrated) as store:
        await store.files.add(file := a_file(), lambda _: None)

        before, after = await migrate(place(migrated))

        assert before == after
        assert await store.files.get(file.tenant, file.id) == file


async def test_a_database_without_a_schema_is_refused_with_the_command(empty: StoreSettings):
    async with open_store(empty) as store:
        with pytest.raises(StoreSchemaError, match="run `headway store migrate`"):
            await store.check()

        assert "headway store migrate" in (store.problem or "")


async def set_schema(settings: StoreSettings, *, revision: int, min_reader: int) -> None:
    database = Database(place(settings).url, timeout_s=20.0)
    async with database.write() as connection:
        for statement, value in (
            ("UPDATE alembic_version SET version_num = :value", revision_id(revision)),
            ("UPDATE schema_info SET min_reader = :value", min_reader),
        ):
            await connection.execute(text(statement), {"value": value})
    await database.close()


async def test_a_newer_schema_is_used_and_left_as_it_is(migrated: StoreSettings):
    """It has been expanded: a column and a table that the code does not know."""
    await set_schema(migrated, revision=HEAD + 1, min_reader=HEAD)
    database = Database(place(migrated).url, timeout_s=20.0)
    async with database.write() as connection:
        await connection.execute(text("ALTER TABLE files ADD COLUMN unknown TEXT"))
        await connection.execute(text("CREATE TABLE unknown (id TEXT PRIMARY KEY)"))
    await database.close()
    async with open_store(migrated) as store:
        await store.check()
        await store.files.add(file := a_file(), lambda _: None)
        before, after = await migrate(place(migrated))

        assert before.revision == after.revision == HEAD + 1
        assert await store.files.get(file.tenant, file.id) == file


async def test_a_newer_schema_that_needs_newer_code_is_refused(migrated: StoreSettings):
    await set_schema(migrated, revision=HEAD + 1, min_reader=HEAD + 1)
    database = Database(place(migrated).url, timeout_s=20.0)

    with pytest.raises(StoreSchemaError, match="upgrade it"):
        await check_schema(database)
    with pytest.raises(StoreSchemaError, match="upgrade it"):
        await migrate(place(migrated))
    await database.close()


def test_many_processes_migrate_at_once(empty: StoreSettings):
    with ProcessPoolExecutor(NUM_MIGRATORS, mp_context=forkserver()) as processes:
        start_at = time.time() + 0.3
        running = [processes.submit(migrate_at, start_at, empty) for _ in range(NUM_MIGRATORS)]
        results = [each.result(timeout=120) for each in running]

    assert sorted(before for before, _ in results) == [0] + [HEAD] * (NUM_MIGRATORS - 1)
    assert {after for _, after in results} == {HEAD}


async def test_a_failed_migration_leaves_nothing(
    empty: StoreSettings, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise RuntimeError("in the middle")

    monkeypatch.setattr("shared.store.migrations.versions.r0001_files.op.create_index", fail)
    with pytest.raises(RuntimeError):
        await migrate(place(empty))
    monkeypatch.undo()
    database = Database(place(empty).url, timeout_s=20.0)
    async with database.read() as connection:
        left = await read_schema(connection)
    await database.close()
    _, after = await migrate(place(empty))

    assert left.revision == 0
    assert after.revision == HEAD


async def test_a_migration_waits_for_one_in_progress(empty: StoreSettings):
    results = await asyncio.gather(*(migrate(place(empty)) for _ in range(4)))

    assert sorted(before.revision for before, _ in results) == [0] + [HEAD] * 3
    assert {after.revision for _, after in results} == {HEAD}
