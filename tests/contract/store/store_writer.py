"""
A process that stores files until it is killed, and prints the id of each when it is committed.

Arguments: URL of the database, data directory.
"""

import asyncio
import sys
from pathlib import Path

from shared.contracts.errors import StoreUnavailableError
from tests.stores import open_store, put, settings_of

CONTENT_BYTES = 1_500_000
NUM_WRITERS = 3


async def main(url: str, directory: Path) -> None:
    settings = settings_of(url, directory)
    async with open_store(settings) as store:
        await store.check()

        async def write(number: int) -> None:
            for round_number in range(10_000):
                content = f"{number} {round_number}\n".encode()
                try:
                    file = await put(store, content * (CONTENT_BYTES // len(content)))
                except StoreUnavailableError:
                    await asyncio.sleep(0.05)
                    continue
                sys.stdout.write(f"{file.id}\n")
                sys.stdout.flush()

        await asyncio.gather(*(write(number) for number in range(NUM_WRITERS)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
