"""Keys where commands edit them: in a file, or in the store."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from shared.contracts.errors import SettingsError
from shared.contracts.tenants.keys import ApiKey
from shared.runtime.settings import load_group
from shared.store.documents import KEYS, Document
from shared.store.location import location_of
from shared.store.settings import StoreSettings
from shared.store.store import Store
from shared.tenants.keys import KeyEdit, decode_keys, encode_keys, key_edit, read_keys
from shared.tenants.watched import STORE

T = TypeVar("T")
NEW = Document(content=b"{}", version=0)


@contextmanager
def edited_keys(place: Path) -> Iterator[KeyEdit]:
    """
    Context in which the keys at *place*, a file or `store:`, are edited by this process alone.

    Raises:
        SettingsError: The keys cannot be read or written, are invalid, or were changed meanwhile.
        StoreUnavailableError: The database does not answer.
    """
    if str(place) != STORE:
        with key_edit(place) as edit:
            yield edit
        return
    document = asyncio.run(_with_store(_read))
    edit = KeyEdit(list(decode_keys(place, document.content).values()))
    yield edit
    content = encode_keys(edit.keys)
    asyncio.run(
        _with_store(lambda store: store.documents.put(KEYS, content, after=document.version))
    )


def listed_keys(place: Path) -> tuple[ApiKey, ...]:
    """
    The keys at *place*, a file or `store:`.

    Raises:
        SettingsError: The keys cannot be read, or are invalid.
        StoreUnavailableError: The database does not answer.
    """
    if str(place) != STORE:
        return read_keys(place)
    return tuple(decode_keys(place, asyncio.run(_with_store(_read)).content).values())


async def _read(store: Store) -> Document:
    return await store.documents.get(KEYS) or NEW


async def _with_store(action: Callable[[Store], Awaitable[T]]) -> T:
    settings = load_group(StoreSettings, group="store", environ=os.environ)
    location = location_of(settings)
    if location is None:
        raise SettingsError(
            f"{STORE} needs a store: set HEADWAY_STORE_URL or HEADWAY_STORE_DATA_DIR"
        )
    store = Store(location, settings)
    try:
        await store.check()
        return await action(store)
    finally:
        await store.close()
