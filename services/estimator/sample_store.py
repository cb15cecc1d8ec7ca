"""Samples of prefill times, kept for `headway-estimator fit`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.estimator.keys import directory_name
from services.estimator.observations import ProfileKey
from services.estimator.sample_files import header_line, header_of, numbered, sample_lines
from shared.contracts.base import UnixTime
from shared.contracts.routing import PrefillSample, PrefillsSampled
from solver.prediction.prefill_features import SCHEMA_VERSION
from solver.prediction.prefill_samples import fault_of

log = structlog.get_logger()

SCHEMA = "schema_version"
DISK = "disk"
"""Reasons for which samples are refused, beside the names of features."""


@dataclass(slots=True)
class _Log:
    """The files of one (model, engine, device)."""

    folder: Path
    number: int
    """Of the file that is appended to."""
    count: int = 0
    """Of samples in that file."""
    earlier: int = 0
    """In the one before, which is kept."""

    @property
    def file(self) -> Path:
        return self.folder / f"{self.number}.jsonl"


class SampleStore:
    """
    The latest samples of each (model, engine, device), between *most* and twice as many.

    Two files of at most *most* samples are kept: the older one is removed when a third begins, so
    that nothing is ever rewritten. A process that is killed loses the line that it was writing.

    Args:
        directory: Made when missing; None keeps nothing.
        most: Samples of each key that are worth keeping.
    """

    def __init__(self, directory: Path | None, *, most: int = 20_000) -> None:
        self._directory = directory
        self._most = most
        self._logs: dict[ProfileKey, _Log] = {}
        self._warned: set[tuple[str, str]] = set()
        self.refused: Counter[str] = Counter()
        """Samples by the field at fault."""
        self.num_taken = 0
        """Samples kept since the start."""

    def open(self) -> None:
        """Find what an earlier estimator kept; what cannot be read is begun anew."""
        if self._directory is None or not self._directory.is_dir():
            return
        try:
            for folder in sorted(self._directory.iterdir()):
                self._find(folder)
        except OSError as error:
            log.warning("samples.unreadable", directory=str(self._directory), error=str(error))

    def _find(self, folder: Path) -> None:
        files = numbered(folder)
        header = header_of(_first_line(files[-1][1])) if files else None
        if header is not None and directory_name(header.key) == folder.name:
            self._logs[header.key] = _opened(folder)

    def kept(self) -> Iterator[tuple[ProfileKey, int]]:
        """How many samples of each key there are."""
        for key, files in tuple(self._logs.items()):
            yield key, files.count + files.earlier

    def take(self, message: PrefillsSampled) -> None:
        """Keep what can be learnt from, and count the rest by what is wrong with it."""
        if message.schema_version != SCHEMA_VERSION:
            self._refuse(message, SCHEMA, len(message.samples))
            return
        sound = []
        for sample in message.samples:
            if (fault := fault_of(sample.features, sample.prefill_s)) is None:
                sound.append(sample)
            else:
                self._refuse(message, fault, 1)
        if sound and self._directory is not None:
            key = (message.model, message.engine, message.device)
            self._append(self._directory / directory_name(key), key, sound, message.at)

    def _append(
        self, folder: Path, key: ProfileKey, samples: Sequence[PrefillSample], at: UnixTime
    ) -> None:
        try:
            if key not in self._logs:
                self._logs[key] = _opened(folder)
            files = self._logs[key]
            if files.count + len(samples) > self._most and files.count > 0:
                _begin_next(files)
            with files.file.open("ab") as stream:
                if stream.tell() == 0:
                    stream.write(header_line(key))
                stream.write(sample_lines(samples, at))
            files.count += len(samples)
            self.num_taken += len(samples)
        except OSError as error:
            # A part may have been written: the next one looks at the file again.
            self._logs.pop(key, None)
            self.refused[DISK] += len(samples)
            log.warning("samples.lost", count=len(samples), error=str(error))

    def _refuse(self, message: PrefillsSampled, field: str, count: int) -> None:
        """One line for each sender and field: it goes on like that every second."""
        self.refused[field] += count
        if (message.sender, field) in self._warned:
            return
        self._warned.add((message.sender, field))
        found = {"found": message.schema_version, "expected": SCHEMA_VERSION}
        log.warning(
            "samples.refused",
            sender=message.sender,
            field=field,
            **(found if field == SCHEMA else {}),
        )


def _begin_next(files: _Log) -> None:
    files.number += 1
    files.earlier, files.count = files.count, 0
    for number, file in numbered(files.folder):
        if number < files.number - 1:
            file.unlink(missing_ok=True)


def _opened(folder: Path) -> _Log:
    """The files in *folder*, ready to be appended to; what was torn at their end is cut off."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = {number: _mended(file) for number, file in numbered(folder)}
    if not counts:
        return _Log(folder, number=1)
    latest = max(counts)
    count, earlier = counts[latest], counts.get(latest - 1)
    if count is None:
        return _Log(folder, number=latest + 1)
    return _Log(folder, number=latest, count=count, earlier=earlier or 0)


def _mended(file: Path) -> int | None:
    """Samples in *file*, less a torn last line; None for one that is not to be appended to."""
    text = file.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        log.warning("samples.torn", file=str(file), num_bytes=len(text) - whole)
        with file.open("r+b") as stream:
            stream.truncate(whole)
    if whole == 0:
        return 0
    header = header_of(text[: text.index(b"\n")])
    if header is None or header.schema_version != SCHEMA_VERSION:
        return None
    return text.count(b"\n", 0, whole) - 1


def _first_line(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.readline()
