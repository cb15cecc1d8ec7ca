"""Stores samples of prefill times for `headway-estimator fit`."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import structlog
from msgspec.structs import replace

from services.estimator.telemetry_adapters import ProfileKey
from services.estimator.trees.artefact_names import directory_name
from services.estimator.trees.artefacts import folders
from services.estimator.trees.sample_files import FILES, key_of, messages_in
from shared.contracts.base import encode
from shared.contracts.routing import PrefillsSampled
from solver.prediction.prefill.features import SCHEMA_VERSION
from solver.prediction.prefill.samples import fault_of

log = structlog.get_logger()

SCHEMA = "schema_version"
DISK = "disk"
"""Reason of refusing samples that cannot be written; other reasons are names of features."""
EARLIER, LATEST = FILES


class SampleStore:
    """
    Stores the latest samples of each (model, engine, device), between *most* and twice as many.

    Each key has two files of at most *most* samples. A full file replaces the earlier one, so no
    file is rewritten. A killed process loses only the line that it was writing.

    Args:
        directory: Directory of the files, created if missing; None stores nothing.
        most: Minimum number of samples to keep per key.
    """

    def __init__(self, directory: Path | None, *, most: int = 20_000) -> None:
        self._directory = directory
        self._most = most
        self._counts: dict[ProfileKey, Counter[str]] = {}
        """(Model, engine, device) -> number of samples in each of its two files."""
        self._warned: set[tuple[str, str]] = set()
        self.refused: Counter[str] = Counter()
        """
        Invalid field, or `DISK` for samples that could not be written -> number of refused samples.
        """
        self.num_taken = 0
        """Number of samples stored since the process started."""

    def open(self) -> None:
        """Count the samples that earlier runs stored; cut off incomplete last lines."""
        try:
            for folder in folders(self._directory) if self._directory is not None else ():
                self._counts |= _counted(folder)
        except OSError as error:
            log.warning("samples.unreadable", directory=str(self._directory), error=str(error))

    def kept(self) -> Iterator[tuple[ProfileKey, int]]:
        """Number of stored samples of each (model, engine, device)."""
        for key, counts in tuple(self._counts.items()):
            yield key, counts.total()

    def take(self, message: PrefillsSampled) -> None:
        """Store valid samples of prefill times; count invalid samples by field."""
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
            key = key_of(message)
            folder = self._directory / directory_name(key)
            self._append(folder, key, replace(message, samples=tuple(sound)))

    def _append(self, folder: Path, key: ProfileKey, message: PrefillsSampled) -> None:
        count = len(message.samples)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if key not in self._counts:
                self._counts[key] = _counted(folder).get(key, Counter())
            counts = self._counts[key]
            if counts[LATEST] and counts[LATEST] + count > self._most:
                (folder / LATEST).replace(folder / EARLIER)
                counts = self._counts[key] = Counter({EARLIER: counts[LATEST]})
            with (folder / LATEST).open("ab") as stream:
                stream.write(encode(message) + b"\n")
            counts[LATEST] += count
            self.num_taken += count
        except OSError as error:
            # A part of the message may have been written, so the next write counts the samples in
            # the files again.
            self._counts.pop(key, None)
            self.refused[DISK] += count
            log.warning("samples.lost", count=count, error=str(error))

    def _refuse(self, message: PrefillsSampled, field: str, count: int) -> None:
        """
        Log a refusal once per sender and invalid field, since routers send messages every second.
        """
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


def _counted(folder: Path) -> dict[ProfileKey, Counter[str]]:
    """Numbers of samples in the files of *folder*; an incomplete last line is cut off."""
    _cut_torn_line(folder / LATEST)
    counts: dict[ProfileKey, Counter[str]] = {}
    for name in FILES:
        for message in messages_in(folder / name, []):
            counts.setdefault(key_of(message), Counter())[name] += len(message.samples)
    return counts


def _cut_torn_line(file: Path) -> None:
    text = file.read_bytes() if file.exists() else b""
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        log.warning("samples.torn", file=str(file), num_bytes=len(text) - whole)
        os.truncate(file, whole)
