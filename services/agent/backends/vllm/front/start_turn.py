"""Turns in which engine hosts of one machine start: each imports vLLM, which takes a core."""

import asyncio
import fcntl
import os
import tempfile
from pathlib import Path

import structlog

from shared.contracts.base import Seconds

log = structlog.get_logger()
POLL_S: Seconds = 0.2


class StartTurn:
    """
    A place among the hosts of this user that start at the same time. The time limits of a start
    count from its turn: ten hosts that start at once on two cores would all be late.

    Args:
        place: Descriptor of the locked file, whose lock ends with this process.
    """

    def __init__(self, place: int) -> None:
        self._place: int | None = place

    @classmethod
    async def taken(cls, folder: Path | None = None, *, places: int | None = None) -> "StartTurn":
        """
        Wait for a turn.

        Args:
            folder: Folder of the locks; default: one for this user.
            places: Number of hosts that may start at the same time; default: the cores.
        """
        if folder is None:
            folder = Path(tempfile.gettempdir()) / f"headway-starts-{os.getuid()}"
        if places is None:
            places = len(os.sched_getaffinity(0))
        folder.mkdir(mode=0o700, exist_ok=True)
        is_first = True
        while True:
            for number in range(places):
                if (place := _locked(folder / f"{number}.lock")) is not None:
                    return cls(place)
            if is_first:
                log.info("host.start_waits", places=places)
                is_first = False
            await asyncio.sleep(POLL_S)

    def end(self) -> None:
        """Leave the place to another host; further calls change nothing."""
        if self._place is not None:
            os.close(self._place)
            self._place = None


def _locked(file: Path) -> int | None:
    """Descriptor of *file* with a lock; None if another one has it."""
    place = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(place)
        return None
    return place
