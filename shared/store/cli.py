"""`headway store`: migrates and examines the store, and changes its documents."""

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from shared.contracts.errors import MeshError, SettingsError
from shared.runtime.cli import print_data
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from shared.runtime.logging import configure_logging
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

Options = argparse.Namespace
OPTIONS = ("url", "data_dir", "files")
NO_STORE = "no store is configured: give --data-dir or --url, or set HEADWAY_STORE_DATA_DIR or _URL"


def parser(prog: str) -> argparse.ArgumentParser:
    """Create the parser of the command line."""
    root = argparse.ArgumentParser(
        prog=prog,
        description="Migrate and examine the store, and change the documents that services follow.",
        epilog="The store is configured by the options, else by HEADWAY_STORE_<FIELD>. Exit codes: "
        "0 ok, 1 failed, 2 usage, settings or a schema that does not fit.",
    )
    verbs = root.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, text in (
        ("migrate", "bring the schema to the revision of this version; safe to run in parallel"),
        ("status", "print the revision of the schema, and what is stored"),
        ("check", "check that a service could use the store"),
        ("get", "print a document that services follow: keys, or policies of tenants"),
        ("put", "check a file, and make it the new version of a document"),
    ):
        verb = verbs.add_parser(name, help=text, description=text)
        # No default in the help: the URL may contain a password.
        verb.add_argument("--url", metavar="URL", help="database, of PostgreSQL or SQLite")
        verb.add_argument("--data-dir", metavar="DIR", help="directory of the SQLite store")
        verb.add_argument("--files", metavar="URL", help="place of file bodies, an fsspec URL")
        verb.add_argument("--json", action="store_true", help="machine-readable output")
        if name in {"get", "put"}:
            verb.add_argument("name", choices=NAMES, help="name of the document")
        if name == "put":
            verb.add_argument("file", type=Path, help="file with the new content")
    return root


async def run_migrate(location: Location, _settings: StoreSettings, options: Options) -> int:
    """Migrate the schema."""
    before, after = await migrate(location)
    data = {"database": location.shown, "before": before.revision, "after": after.revision}
    print_data(data, as_json=options.json)
    return EXIT_OK


async def run_status(location: Location, settings: StoreSettings, options: Options) -> int:
    """Print the schema and the contents; fail if this version cannot use the schema."""
    data: dict[str, Any] = {"database": location.shown, "files_url": location.files}
    data |= {"revision": 0, "revision_needed": HEAD}
    if location.sqlite_file is not None and not location.sqlite_file.exists():
        print_data(data, as_json=options.json)
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
    print_data(data | {"problem": problem}, as_json=options.json)
    return EXIT_OK if problem is None else EXIT_FAILED


async def run_check(location: Location, settings: StoreSettings, options: Options) -> int:
    """Use the store as a service does."""
    store = Store(location, settings)
    try:
        await store.check()
    except MeshError as error:
        print_data({"database": location.shown, "problem": str(error)}, as_json=options.json)
        return EXIT_FAILED
    finally:
        await store.close()
    print_data({"database": location.shown, "problem": None}, as_json=options.json)
    return EXIT_OK


async def run_get(location: Location, settings: StoreSettings, options: Options) -> int:
    """Print a document."""
    async with _usable(location, settings) as store:
        found = await store.documents.get(options.name)
    if found is None:
        raise SettingsError(f"the store has no document {options.name!r}")
    sys.stdout.write(found.content.decode())
    return EXIT_OK


async def run_put(location: Location, settings: StoreSettings, options: Options) -> int:
    """Replace a document by the content of a file."""
    content = read_file(options.file)
    DECODERS[options.name](options.file, content)
    async with _usable(location, settings) as store:
        found = await store.documents.get(options.name)
        after = 0 if found is None else found.version
        version = await store.documents.put(options.name, content, after=after)
    print_data({"document": options.name, "version": version}, as_json=options.json)
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
VERBS: dict[str, Callable[[Location, StoreSettings, Options], Coroutine[Any, Any, int]]] = {
    "migrate": run_migrate,
    "status": run_status,
    "check": run_check,
    "get": run_get,
    "put": run_put,
}


def main(argv: Sequence[str], *, prog: str = "headway store") -> int:
    """Entry point with the arguments *argv*; returns the exit code."""
    options = parser(prog).parse_args(argv)
    configure_logging(level="warning", service="store")
    given = {name: getattr(options, name) for name in OPTIONS}
    overrides = {name: value for name, value in given.items() if value is not None}
    try:
        settings = load_group(StoreSettings, group="store", environ=os.environ, overrides=overrides)
        if (location := location_of(settings)) is not None:
            return asyncio.run(VERBS[options.verb](location, settings, options))
        print(f"{prog} {options.verb}: {NO_STORE}", file=sys.stderr)
    except SettingsError as error:
        print(f"{prog} {options.verb}: {error}", file=sys.stderr)
    except MeshError as error:
        print(f"{prog} {options.verb}: {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_USAGE
