"""
Samples of prefill times on disk: two files of lines for each (model, engine, device).

The files are `<directory>/<key>/earlier.jsonl` and `latest.jsonl`. Each line is a router's message
without invalid samples, and contains its key and schema.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.estimator.telemetry_adapters import ProfileKey
from services.estimator.trees.artefacts import folders
from shared.contracts.base import Decoder, UnixTime
from shared.contracts.errors import ContractError
from shared.contracts.routing import PrefillSample, PrefillsSampled
from solver.prediction.prefill.features import FEATURES, SCHEMA_VERSION
from solver.prediction.prefill.samples import fault_of

FILES = ("earlier.jsonl", "latest.jsonl")
"""Files with the samples of one (model, engine, device), older samples first."""

_decode: Decoder[PrefillsSampled] = Decoder(PrefillsSampled)


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of one (model, engine, device) in order of time."""

    at: NDArray[np.float64]
    """Times at which routers published the samples, in Unix seconds, float64[num_samples]."""
    features: NDArray[np.float64]
    """
    Features of the samples, float64[num_samples, num_features], with the columns of `FEATURES`.
    """
    prefill_s: NDArray[np.float64]
    """Prefill times of the samples in seconds, float64[num_samples]."""


@dataclass(slots=True)
class ReadSamples:
    """Content of a directory with samples of prefill times."""

    by_key: dict[ProfileKey, Samples] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Parts of the files that were skipped, each with file and reason."""


def read_samples(directory: Path, *, most: int) -> ReadSamples:
    """
    The latest *most* samples of each key in *directory*; empty if the directory does not exist.

    Another process may append to the files meanwhile. Incomplete lines, lines with invalid samples
    and lines of another schema are skipped.

    Raises:
        OSError: The directory cannot be read.
    """
    found = ReadSamples()
    by_key: dict[ProfileKey, list[tuple[UnixTime, PrefillSample]]] = {}
    for folder in folders(directory):
        for name in FILES:
            for message in messages_in(folder / name, found.problems):
                samples = by_key.setdefault(key_of(message), [])
                samples += ((message.at, each) for each in message.samples)
    found.by_key = {key: _samples_of(each[-most:]) for key, each in by_key.items() if each}
    return found


def messages_in(file: Path, problems: list[str]) -> Iterator[PrefillsSampled]:
    """
    Messages with samples in *file*, if it exists; skipped parts are appended to *problems*.

    Raises:
        OSError: The file cannot be read.
    """
    faults = []
    lines = file.read_bytes().split(b"\n") if file.exists() else []
    for number, line in enumerate(filter(None, lines), start=1):
        try:
            message = _decode(line)
        except ContractError as error:
            faults.append(f"line {number}: {error}")
            continue
        if (fault := _fault_in(message)) is None:
            yield message
        else:
            faults.append(f"line {number}: {fault}")
    if faults:
        problems.append(f"{file}: {len(faults)} lines skipped; the first one is {faults[0]}")


def key_of(message: PrefillsSampled) -> ProfileKey:
    """The (model, engine, device) of the samples in *message*."""
    return message.model, message.engine, message.device


def _fault_in(message: PrefillsSampled) -> str | None:
    if message.schema_version != SCHEMA_VERSION:
        return f"schema_version is {message.schema_version}, expected {SCHEMA_VERSION}"
    faults = (fault_of(each.features, each.prefill_s) for each in message.samples)
    return next((f"{fault} is out of bounds" for fault in faults if fault is not None), None)


def _samples_of(timed: Sequence[tuple[UnixTime, PrefillSample]]) -> Samples:
    return Samples(
        at=np.array([at for at, _ in timed], dtype=np.float64),
        features=np.array([each.features for _, each in timed], dtype=np.float64).reshape(
            len(timed), len(FEATURES)
        ),
        prefill_s=np.array([each.prefill_s for _, each in timed], dtype=np.float64),
    )
