"""
Samples of prefill times on disk: files of lines, the latest of a (model, engine, device) last.

`<directory>/<key>/<number>.jsonl` begins with a line that says whose samples these are, and of
which schema; each further line is one sample. Files are only ever appended to and removed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.estimator.observations import ProfileKey
from shared.contracts.base import UnixTime
from shared.contracts.routing import PrefillSample
from solver.prediction.prefill_features import FEATURES, SCHEMA_VERSION
from solver.prediction.prefill_samples import fault_of


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a file."""

    model: str
    engine: str
    device: str
    schema_version: int

    @property
    def key(self) -> ProfileKey:
        return self.model, self.engine, self.device


class _Line(msgspec.Struct, frozen=True, array_like=True):
    """One sample."""

    at: UnixTime
    prefill_s: float
    features: tuple[float, ...]


_encoder = msgspec.json.Encoder()
_decode_header = msgspec.json.Decoder(Header).decode
_decode_line = msgspec.json.Decoder(_Line).decode


@dataclass(frozen=True, slots=True)
class Samples:
    """Of one (model, engine, device), the latest last."""

    at: NDArray[np.float64]
    """float64[num_samples], Unix seconds at which their router told of them."""
    features: NDArray[np.float64]
    """float64[num_samples, num_features], columns as in `FEATURES`."""
    prefill_s: NDArray[np.float64]
    """float64[num_samples]."""


@dataclass(slots=True)
class ReadSamples:
    """What a directory holds."""

    by_key: dict[ProfileKey, Samples] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """What was left out, and why, with the file."""


def numbered(directory: Path) -> list[tuple[int, Path]]:
    """The files of one key, the oldest first."""
    files = [file for file in directory.glob("*.jsonl") if file.stem.isdecimal()]
    return sorted((int(file.stem), file) for file in files)


def header_line(key: ProfileKey) -> bytes:
    model, engine, device = key
    header = Header(model=model, engine=engine, device=device, schema_version=SCHEMA_VERSION)
    return _encoder.encode(header) + b"\n"


def sample_lines(samples: Sequence[PrefillSample], at: UnixTime) -> bytes:
    """A line for each of *samples*."""
    lines = [_encoder.encode(_Line(at, each.prefill_s, each.features)) for each in samples]
    return b"".join(line + b"\n" for line in lines)


def header_of(line: bytes) -> Header | None:
    """What a file's first line says; None if it says nothing that can be read."""
    try:
        return _decode_header(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def read_samples(directory: Path, *, most: int) -> ReadSamples:
    """
    The latest *most* samples of each key in *directory*.

    Files may be appended to meanwhile. A line that is torn or no sound sample, and a file of
    another schema, are left out.

    Raises:
        OSError: The directory cannot be read.
    """
    found = ReadSamples()
    for folder in sorted(each for each in directory.iterdir() if each.is_dir()):
        lines: dict[ProfileKey, list[_Line]] = {}
        for _, file in numbered(folder):
            _read_file(file, lines, found.problems)
        for key, each in lines.items():
            found.by_key[key] = _samples_of(each[-most:])
    return found


def _read_file(file: Path, lines: dict[ProfileKey, list[_Line]], problems: list[str]) -> None:
    try:
        first, *rest = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return  # it was the oldest, and is no longer needed
    if (header := header_of(first)) is None:
        problems.append(f"{file}: the first line is no header; the file is left out")
    elif header.schema_version != SCHEMA_VERSION:
        problems.append(
            f"{file}: schema_version is {header.schema_version}; here it is {SCHEMA_VERSION}; "
            "the file is left out"
        )
    else:
        faults: list[str] = []
        lines.setdefault(header.key, []).extend(_sound_lines(rest, faults))
        if faults:
            problems.append(f"{file}: {len(faults)} lines left out; the first one is {faults[0]}")


def _sound_lines(rest: Sequence[bytes], faults: list[str]) -> Iterator[_Line]:
    for number, text in enumerate(rest, start=2):
        if not text:
            continue
        try:
            line = _decode_line(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            faults.append(f"line {number}: {error}")
            continue
        if (fault := fault_of(line.features, line.prefill_s)) is None:
            yield line
        else:
            faults.append(f"line {number}: {fault} is out of bounds")


def _samples_of(lines: Sequence[_Line]) -> Samples:
    return Samples(
        at=np.array([line.at for line in lines], dtype=np.float64),
        features=np.array([line.features for line in lines], dtype=np.float64).reshape(
            len(lines), len(FEATURES)
        ),
        prefill_s=np.array([line.prefill_s for line in lines], dtype=np.float64),
    )
