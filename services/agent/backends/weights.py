"""Weights of models kept in host memory, so that loading them does not wait for storage."""

import asyncio
import hashlib
import mmap
from pathlib import Path

import msgspec

from shared.contracts.base import ModelName
from shared.contracts.errors import EngineError
from shared.contracts.models import ModelEntry

_WEIGHTS = ("*.safetensors", "*.bin")
_NAMES_ONLY = ("_name_or_path", "transformers_version", "torch_dtype_origin")
"""Of `config.json`: what says nothing of the engine."""


def weight_files(entry: ModelEntry) -> tuple[Path, ...]:
    """Of the first format that *entry*'s directory has."""
    for pattern in _WEIGHTS:
        if files := sorted(Path(entry.path).glob(pattern)):
            return tuple(files)
    return ()


def weight_bytes(entry: ModelEntry) -> int:
    """What the registry says, or else the size of the files."""
    return entry.weight_bytes or sum(file.stat().st_size for file in weight_files(entry))


def engine_shape(entry: ModelEntry) -> str:
    """
    Equal for models whose engines differ in nothing but their weights.

    Empty, and so like no other, when the model has no readable `config.json`, or adapters, which
    an engine would keep.
    """
    try:
        config = msgspec.json.decode((Path(entry.path) / "config.json").read_bytes(), type=dict)
    except (OSError, msgspec.DecodeError):
        return ""
    if entry.adapters:
        return ""
    for name in _NAMES_ONLY:
        config.pop(name, None)
    about = (config, entry.architecture, entry.max_model_len, entry.engine_args)
    return hashlib.blake2b(msgspec.json.encode(about, order="deterministic")).hexdigest()


class HostWeights:
    """
    Weights files mapped and read into host memory.

    They are the kernel's page cache, which every engine of this host loads from; mapped, they are
    given up only when memory is short.
    """

    def __init__(self) -> None:
        self._maps: dict[ModelName, list[mmap.mmap]] = {}

    async def hold(self, entry: ModelEntry) -> None:
        """
        Read *entry*'s weights in, in a thread.

        Raises:
            EngineError: They cannot be read.
        """
        if entry.name in self._maps:
            return
        try:
            self._maps[entry.name] = await asyncio.to_thread(_mapped, weight_files(entry))
        except OSError as error:
            raise EngineError(f"cannot read the weights of {entry.name}: {error}") from error

    def release(self, model: ModelName) -> None:
        """Give the memory of *model*'s weights back to the kernel."""
        for each in self._maps.pop(model, ()):
            each.close()

    def close(self) -> None:
        """Release all."""
        for model in tuple(self._maps):
            self.release(model)


def _mapped(files: tuple[Path, ...]) -> list[mmap.mmap]:
    maps = []
    for path in files:
        with path.open("rb") as file:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            maps.append(mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ))
    return maps
