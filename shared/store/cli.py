"""`headway store`: migrates and examines the store, and changes its documents."""

import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from sqlalchemy import func, select

from shared.contracts.errors import MeshError, SettingsError
from shared.runtime.cli import print_data
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK
from shared.runtime.options import File, JsonOption, path_or_url
from shared.runtime.program import commands
from shared.runtime.settings import load_group
from shared.store.database import Database
from shared.store.documents import KEYS, NAMES, TENANTS
from shared.store.location import Location, location_of
from shared.store.migrating import migrate, read_schema
from shared.store.migrations import HEAD
from shared.store.schema import files, leases
from shared.store.settings import StoreSettings
from shared.store.store import Store
from shared.tenants.keys import decode_keys
from shared.tenants.policies import decode_policies
from shared.tenants.watched import read_file

NO_STORE = "no store is configured: give --data-dir or --url, or set HEADWAY_STORE_DATA_DIR or _URL"


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Options that locate the store; without them the variables HEADWAY_STORE_<FIELD> do."""

    # No default in the help: the URL may contain a password.
    url: Annotated[str | None, path_or_url(str, metavar="URL")] = None
    """Database, of PostgreSQL or SQLite."""
    data_dir: Annotated[str | None, path_or_url(str, metavar="DIR")] = None
    """Directory of the SQLite store."""
    files: Annotated[str | None, path_or_url(str, metavar="URL")] = None
    """Place of file bodies, an fsspec URL."""

    def located(self) -> tuple[Location, StoreSettings]:
        """
        The store and its settings.

        Raises:
            SettingsError: A setting is invalid, or no store is configured.
        """
        given = {"url": self.url, "data_dir": self.data_dir, "files": self.files}
        overrides = {name: value for name, value in given.items() if value is not None}
        settings = load_group(StoreSettings, group="store", environ=os.environ, overrides=overrides)
        location = location_of(settings)
        if location is None:
            raise SettingsError(NO_STORE)
        return location, settings


SET = Place()
DocumentName = Annotated[str, Parameter(name="name", choices=NAMES, help="Name of the document.")]


async def run_migrate(*, place: Place = SET, json: JsonOption = False) -> int:
    """Bring the schema to the revision of this version; safe to run in parallel."""
    location, _ = place.located()
    before, after = await migrate(location)
    data = {"database": location.shown, "before": before.revision, "after": after.revision}
    print_data(data, as_json=json)
    return EXIT_OK


async def run_status(*, place: Place = SET, json: JsonOption = False) -> int:
    """
    Print the revision of the schema, and what is stored.

    The verb fails if this version cannot use the schema.
    """
    location, settings = place.located()
    data: dict[str, Any] = {"database": location.shown, "files_url": location.files}
    data |= {"revision": 0, "revision_needed": HEAD}
    if location.sqlite_file is not None and not location.sqlite_file.exists():
        print_data(data, as_json=json)
        return EXIT_FAILED
    database = Database(location.url, timeout_s=settings.timeout_s)
    try:
        async with database.read() as connection:
            schema = await read_schema(connection)
            data |= {"revision": schema.revision, "min_reader": schema.min_reader}
            if schema.revision:
                query = select(func.count(), func.coalesce(func.sum(files.c.bytes), 0))
                row = (await connection.execute(query.select_from(files))).one()
                data |= {"num_files": row[0], "file_bytes": int(row[1])}
                held = select(leases).where(leases.c.until > database.now)
                rows = (await connection.execute(held)).all()
                data["leases"] = {row.name: row.holder for row in rows}
    finally:
        await database.close()
    problem = schema.problem()
    print_data(data | {"problem": problem}, as_json=json)
    return EXIT_OK if problem is None else EXIT_FAILED


async def run_check(*, place: Place = SET, json: JsonOption = False) -> int:
    """Check that a service could use the store."""
    location, settings = place.located()
    store = Store(location, settings)
    try:
        await store.check()
    except MeshError as error:
        print_data({"database": location.shown, "problem": str(error)}, as_json=json)
        return EXIT_FAILED
    finally:
        await store.close()
    print_data({"database": location.shown, "problem": None}, as_json=json)
    return EXIT_OK


async def run_get(name: DocumentName, /, *, place: Place = SET, json: JsonOption = False) -> int:
    """
    Print a document that services follow: keys, or policies of tenants.

    Raises:
        SettingsError: The store has no such document.
    """
    del json  # a document is printed as it is
    location, settings = place.located()
    async with _usable(location, settings) as store:
        found = await store.documents.get(name)
    if found is None:
        raise SettingsError(f"the store has no document {name!r}")
    sys.stdout.write(found.content.decode())
    return EXIT_OK


async def run_put(
    name: DocumentName,
    file: Annotated[File, Parameter(help="File with the new content.")],
    /,
    *,
    place: Place = SET,
    json: JsonOption = False,
) -> int:
    """Check a file, and make it the new version of a document."""
    location, settings = place.located()
    content = read_file(file)
    DECODERS[name](file, content)
    async with _usable(location, settings) as store:
        found = await store.documents.get(name)
        after = 0 if found is None else found.version
        version = await store.documents.put(name, content, after=after)
    print_data({"document": name, "version": version}, as_json=json)
    return EXIT_OK


@asynccontextmanager
async def _usable(location: Location, settings: StoreSettings) -> AsyncIterator[Store]:
    """A store that this process can use."""
    store = Store(location, settings)
    try:
        await store.check()
        yield store
    finally:
        await store.close()


DECODERS: dict[str, Callable[[Path, bytes], object]] = {KEYS: decode_keys, TENANTS: decode_policies}
"""Name of a document -> check of its content."""


def store_app(prog: str) -> App:
    """The verbs of the store, as the program *prog* or a part of it."""
    app = commands(
        prog,
        "Migrate and examine the store of files, and change the documents that services follow.",
        examples="The store is configured by the options, else by HEADWAY_STORE_<FIELD>.\n"
        "Exit codes: 0 ok, 1 failed, 2 usage, settings or a schema that does not fit.",
    )
    verbs: dict[str, Callable[..., Any]] = {
        "migrate": run_migrate,
        "status": run_status,
        "check": run_check,
        "get": run_get,
        "put": run_put,
    }
    for name, verb in verbs.items():
        app.command(verb, name=name)
    return app


STORE = store_app("store")
