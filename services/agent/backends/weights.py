"""Weights of models kept in host memory, so that loading them does not wait for storage."""

import asyncio
import hashlib
import mmap
from pathlib import Path

import msgspec

from shared.contracts.base import ModelName
from shared.contracts.errors import EngineError
from shared.contracts.models import ModelEntry
from shared.models.digest import tokenizer_digest
from shared.models.files.sizes import weight_files

_NAMES_ONLY = ("_name_or_path", "transformers_version", "torch_dtype_origin")
"""Keys of `config.json` that do not affect the engine."""


def engine_shape(entry: ModelEntry) -> str:
    """
    Digest of a model's configuration: equal for models whose engines differ only in their weights.

    The digest is empty if the model has no readable `config.json`, or room for adapters, which an
    engine would keep. An empty digest equals no other digest.
    """
    try:
        config = msgspec.json.decode((Path(entry.path) / "config.json").read_bytes(), type=dict)
    except (OSError, msgspec.DecodeError):
        return ""
    if entry.adapter_slots:
        return ""
    for name in _NAMES_ONLY:
        config.pop(name, None)
    text = tokenizer_digest(entry)  # engines make grammars and find stop strings in text
    task, longest = entry.task, entry.max_model_len
    about = (config, entry.architecture, task, longest, entry.engine_args, text)
    return hashlib.blake2b(msgspec.json.encode(about, order="deterministic")).hexdigest()


class HostWeights:
    """
    Weight files mapped and read into host memory.

    The files are in the kernel's page cache, from which every engine of this host loads; mapped
    pages are dropped only when memory is short.
    """

    def __init__(self) -> None:
        self._maps: dict[ModelName, list[mmap.mmap]] = {}

    async def hold(self, entry: ModelEntry) -> None:
        """
        Read *entry*'s weights into memory, in a thread.

        Raises:
            EngineError: The weights cannot be read.
        """
        if entry.name in self._maps:
            return
        try:
            self._maps[entry.name] = await asyncio.to_thread(_mapped, weight_files(entry))
        except OSError as error:
            raise EngineError(f"cannot read the weights of {entry.name}: {error}") from error

    def release(self, model: ModelName) -> None:
        """Allow the kernel to reclaim the memory that holds *model*'s weights."""
        for each in self._maps.pop(model, ()):
            each.close()

    def close(self) -> None:
        """Release the weights of all models."""
        for model in tuple(self._maps):
            self.release(model)


def _mapped(files: tuple[Path, ...]) -> list[mmap.mmap]:
    maps = []
    for path in files:
        with path.open("rb") as file:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            maps.append(mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ))
    return maps
