"""Processes that migrate a store at the same time."""

import asyncio
import multiprocessing
import time
from multiprocessing.context import ForkServerContext

from shared.store.migrating import migrate
from shared.store.settings import StoreSettings
from tests.stores import place


def forkserver() -> ForkServerContext:
    """Context of processes that have imported the store, so that they start together."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def migrate_at(start_at: float, settings: StoreSettings) -> tuple[int, int]:
    """Migrate at a Unix time; return the revisions before and after."""
    time.sleep(max(0.0, start_at - time.time()))
    before, after = asyncio.run(migrate(place(settings)))
    return before.revision, after.revision
