"""Recorded events of an instance, with which its decisions can be repeated."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Union

import msgspec

from shared.contracts.base import ModelName, UnixTime
from shared.contracts.errors import SettingsError
from solver.instance.events import Event, ModelFacts
from solver.instance.instance import HANDLERS
from solver.instance.state import InstanceSettings

_LENGTH_BYTES = 4


class Begin(msgspec.Struct, frozen=True, tag_field="event", tag="begin"):
    """First record of a process: everything that the instance was made with."""

    settings: InstanceSettings
    models: Mapping[ModelName, ModelFacts]


Record = tuple[UnixTime, Begin | Event]
_Any: Any = Union[(Begin, *HANDLERS)]  # a run-time union
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(tuple[UnixTime, _Any])


class Recording:
    """
    Appends the events of one instance to a file, each as a length and a MessagePack frame.

    Args:
        path: The file; several processes may have written to it one after the other.

    Raises:
        SettingsError: The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("ab", buffering=0)  # a killed process loses no event
        except OSError as error:
            raise SettingsError(f"record: cannot write {path}: {error.strerror}") from error

    def append(self, event: Begin | Event, now: UnixTime) -> None:
        """Write an event that is handled at *now*."""
        frame = msgspec.msgpack.encode((now, event))
        self._file.write(len(frame).to_bytes(_LENGTH_BYTES) + frame)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def records(path: Path) -> Iterator[Record]:
    """The records of a file; a last record that was not written whole is left out."""
    left = path.stat().st_size
    with path.open("rb") as file:
        while left >= _LENGTH_BYTES:
            size = int.from_bytes(file.read(_LENGTH_BYTES))
            left -= _LENGTH_BYTES + size
            if left >= 0:
                yield _decoder.decode(file.read(size))
