"""Documents in the store: small files that many services read and operators change, by name."""

import msgspec
from sqlalchemy import insert, select, update

from shared.contracts.errors import SettingsError
from shared.store.database import Database
from shared.store.schema import documents

KEYS, TENANTS = "keys", "tenants"
NAMES = (KEYS, TENANTS)


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a document."""

    content: bytes
    version: int
    """Grows with each change; 0 for a document that does not exist yet."""


class DocumentRows:
    """
    The table `documents`.

    Args:
        database: The store's database.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, name: str) -> Document | None:
        """The document *name*; None if there is none."""
        query = select(documents.c.content, documents.c.version).where(documents.c.name == name)
        async with self._database.read() as connection:
            row = (await connection.execute(query)).first()
        return None if row is None else Document(content=bytes(row.content), version=row.version)

    async def put(self, name: str, content: bytes, *, after: int) -> int:
        """
        Write the version after *after* of a document; return its number.

        Args:
            name: Name of the document.
            content: The whole content.
            after: Version that the change is based on; 0 for a new document.

        Raises:
            SettingsError: Another process has changed the document since that version.
        """
        values = {"content": content, "version": after + 1, "changed_at": self._database.now}
        async with self._database.write() as connection:
            await self._database.lock(connection, f"document:{name}")
            query = select(documents.c.version).where(documents.c.name == name)
            found = (await connection.execute(query)).scalar() or 0
            if found != after:
                raise SettingsError(
                    f"the document {name!r} of the store has changed meanwhile: repeat the command"
                )
            change = (
                insert(documents).values(name=name, **values)
                if after == 0
                else update(documents).where(documents.c.name == name).values(**values)
            )
            await connection.execute(change)
        return after + 1
