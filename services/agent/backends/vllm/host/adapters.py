"""LoRA adapters of one engine core: loaded on demand, unloaded when their room is needed."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import structlog
from vllm.lora.request import LoRARequest

log = structlog.get_logger()
_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


@dataclass(slots=True)
class _Loaded:
    request: LoRARequest
    users: int = 0
    """Number of requests in the core that use the adapter."""


class Adapters:
    """
    The adapters that a core has loaded, at most `slots`.

    An adapter is identified by its name, its directory and the state of its files. KV of another
    adapter is never used for it: vLLM's cache keys contain the name, which has the state's digest.

    Args:
        client: vLLM's asynchronous `EngineCoreClient`.
        slots: Maximum number of adapters in the core.
    """

    def __init__(self, client: Any, slots: int) -> None:
        self._client = client
        self._slots = slots
        self._loaded: dict[str, _Loaded] = {}
        """Identity -> adapter, the least recently used first."""
        self._of_request: dict[str, str] = {}
        """Request in the core -> identity of its adapter."""
        self._kept: tuple[tuple[str, str], ...] | None = None
        """Names and directories of the adapters in the registry; None if they have not changed."""
        self._ids = count(1)
        self._lock = asyncio.Lock()

    async def take(self, core_id: str, name: str, path: str) -> LoRARequest:
        """
        Load an adapter for a request, unless it is loaded; `give_back` ends its use.

        Raises:
            ValueError: The adapter cannot be loaded, or all adapters in the core are in use.
        """
        async with self._lock:
            identity = _identity(name, path)
            if identity not in self._loaded:
                await self._unload_removed()
                await self._make_room(name)
                await self._load(identity, path)
            loaded = self._loaded[identity] = self._loaded.pop(identity)
            loaded.users += 1
            self._of_request[core_id] = identity
            return loaded.request

    def give_back(self, core_id: str) -> None:
        """End the use of an adapter by a request; other requests are ignored."""
        identity = self._of_request.pop(core_id, None)
        if identity is not None:
            self._loaded[identity].users -= 1

    async def keep(self, adapters: Iterable[tuple[str, str]]) -> None:
        """
        Unload the adapters without one of these names and directories. An adapter that is in use is
        unloaded when a later request takes an adapter.
        """
        async with self._lock:
            self._kept = tuple(adapters)
            await self._unload_removed()

    async def _unload_removed(self) -> None:
        """Unload adapters that are not kept and that no request uses."""
        if self._kept is None:
            return
        wanted = {_identity(name, path) for name, path in self._kept}
        for identity, loaded in tuple(self._loaded.items()):
            if identity not in wanted and not loaded.users:
                await self._unload(identity)

    async def _make_room(self, name: str) -> None:
        if not self._slots:
            raise ValueError(
                f"adapter {name!r}: the engine was started without room for adapters; set "
                "max_adapters of the model"
            )
        while len(self._loaded) >= self._slots:
            idle = next((key for key, each in self._loaded.items() if not each.users), None)
            if idle is None:
                raise ValueError(
                    f"adapter {name!r}: all {self._slots} adapters of the engine are in use; raise "
                    "max_adapters of the model"
                )
            await self._unload(idle)

    async def _load(self, identity: str, path: str) -> None:
        request = LoRARequest(lora_name=identity, lora_int_id=next(self._ids), lora_path=path)
        try:
            # In the core a request with an adapter that cannot be loaded would end all requests.
            await self._client.add_lora_async(request)
        except Exception as error:
            raise ValueError(f"the adapter in {path} cannot be loaded: {error}") from error
        self._loaded[identity] = _Loaded(request)
        log.info("adapter.loaded", adapter=identity, path=path)

    async def _unload(self, identity: str) -> None:
        await self._client.remove_lora_async(self._loaded[identity].request.lora_int_id)
        del self._loaded[identity]
        log.info("adapter.unloaded", adapter=identity)


def _identity(name: str, path: str) -> str:
    """Name with a digest of the directory and of the state of its files."""
    state = sha256(path.encode())
    for file in _FILES:
        try:
            found = (Path(path) / file).stat()
        except OSError:
            continue
        state.update(f"{file} {found.st_ino} {found.st_size} {found.st_mtime_ns}".encode())
    return f"{name}@{state.hexdigest()[:12]}"
