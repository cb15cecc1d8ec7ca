"""
Usage of tenants on disk.

`journal-<number>.jsonl` has one line per counted final, with the request's id. Each start and each
hour begin a journal. Journals that are older than `REMEMBER_S` are added to `totals.json`, which
names the last journal that it contains, and are deleted. A crash at any moment loses no line and
counts none twice: a journal counts if it is after the one that the totals name.
"""

import fcntl
import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from services.estimator.usage.book import UsageBook, row_of, summed
from shared.contracts.base import Decoder, UnixTime, encode
from shared.contracts.errors import ContractError, SettingsError
from shared.contracts.tenants.usage import HOUR_S, RequestMetered, UsageRow

log = structlog.get_logger()
REMEMBER_S = 6 * 3600.0
"""Time for which ids of counted requests are kept on disk; a repetition after it counts again."""
TOTALS = "totals.json"
_JOURNAL = re.compile(r"journal-(\d{9})\.jsonl")
_decode: Decoder[RequestMetered] = Decoder(RequestMetered)


class _Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `totals.json`."""

    through: int = 0
    """Number of the last journal in the totals."""
    counts_since: UnixTime = 0.0
    rows: tuple[UsageRow, ...] = ()


class UsageFiles:
    """
    The files of one directory, which this process alone writes while it is open.

    Args:
        directory: Directory; it is made if necessary.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock: int | None = None
        self._journal: int | None = None
        self._number = 0
        self._hour = -1

    def try_lock(self) -> bool:
        """
        Become the only writer; return False if another process is.

        Raises:
            SettingsError: The directory cannot be written.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._directory / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise SettingsError(f"usage_dir: cannot write {self._directory}: {error}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def load(self, book: UsageBook) -> None:
        """
        Put all that the files count into *book*.

        Raises:
            SettingsError: The totals are not valid, or a file cannot be read.
        """
        totals = self._totals()
        book.counts_since = totals.counts_since
        for row in totals.rows:
            book.put(row)
        for number, path in self._journals(totals):
            for metered in _lines(path):
                book.add(metered)
            self._number = max(self._number, number)
        self._number = max(self._number, totals.through)

    def append(self, finals: Sequence[RequestMetered], now: UnixTime) -> None:
        """
        Write finals, which are on disk when this returns.

        Raises:
            OSError: The disk is full or broken; some of the lines may be written.
        """
        hour = int(now // HOUR_S)
        if self._journal is None or hour != self._hour:
            self._begin(hour)
        assert self._journal is not None  # noqa: S101 - begun above
        data = b"".join(encode(each) + b"\n" for each in finals)
        try:
            while data:
                data = data[os.write(self._journal, data) :]
            os.fsync(self._journal)
        except OSError:
            # The journal may end within a line; what follows goes to another one.
            os.close(self._journal)
            self._journal = None
            raise

    def compact(self, now: UnixTime, oldest_hour: int = 0) -> None:
        """
        Add old journals to the totals, without rows of hours that begin before *oldest_hour*.

        Raises:
            OSError: The disk is full or broken; nothing is lost.
        """
        totals = self._totals()
        rows: list[UsageRow] = list(totals.rows)
        through, since = totals.through, totals.counts_since
        for number, path in self._journals(totals):
            is_open = self._journal is not None and number == self._number
            if is_open or now - path.stat().st_mtime < REMEMBER_S:
                break
            for metered in _lines(path):
                rows.append(row_of(metered))
                since = min(since or metered.finished_at, metered.finished_at)
            through = number
        if through > totals.through:
            kept = (row for row in rows if row.hour >= oldest_hour)
            whole = summed(kept, ("tenant", "hour", "model", "class"))
            since = max(since, oldest_hour)
            self._write(_Totals(through=through, counts_since=since, rows=whole))
        for path in self._directory.glob("journal-*.jsonl"):
            if (number_of := _number_of(path)) is not None and number_of <= through:
                path.unlink()

    def close(self) -> None:
        """Close the files and let another process write."""
        for file in (self._journal, self._lock):
            if file is not None:
                os.close(file)
        self._journal = self._lock = None

    def _begin(self, hour: int) -> None:
        if self._journal is not None:
            os.close(self._journal)
        self._number += 1
        self._hour = hour
        path = self._directory / f"journal-{self._number:09}.jsonl"
        self._journal = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o640)
        _sync(self._directory)

    def _journals(self, totals: _Totals) -> list[tuple[int, Path]]:
        """Number and path of each journal that the totals do not contain, in order."""
        found = [(_number_of(path), path) for path in self._directory.glob("journal-*.jsonl")]
        return sorted(
            (number, path)
            for number, path in found
            if number is not None and number > totals.through
        )

    def _totals(self) -> _Totals:
        path = self._directory / TOTALS
        if not path.exists():
            return _Totals()
        try:
            return msgspec.json.decode(path.read_bytes(), type=_Totals)
        except (OSError, msgspec.DecodeError) as error:
            raise SettingsError(f"usage_dir: {path}: {error}") from error

    def _write(self, totals: _Totals) -> None:
        made = self._directory / f".{TOTALS}"
        with made.open("wb") as file:
            file.write(msgspec.json.encode(totals))
            file.flush()
            os.fsync(file.fileno())
        made.replace(self._directory / TOTALS)
        _sync(self._directory)


def _lines(path: Path) -> list[RequestMetered]:
    """Finals of a journal; a last line that was not written whole was not acknowledged either."""
    found = []
    for line in path.read_bytes().split(b"\n"):
        if line:
            try:
                found.append(_decode(line))
            except ContractError as error:
                log.warning("usage.unreadable", path=str(path), error=str(error))
    return found


def _number_of(path: Path) -> int | None:
    found = _JOURNAL.fullmatch(path.name)
    return None if found is None else int(found[1])


def _sync(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
