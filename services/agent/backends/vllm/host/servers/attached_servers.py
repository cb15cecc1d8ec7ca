"""The servers of others that a host reaches."""

from typing import Any

from services.agent.backends.vllm.host.engines import engine_config
from services.agent.backends.vllm.host.servers.server_engine import ServerEngine, ServerRequests
from services.agent.backends.vllm.shared.wire import Attach


class AttachedServers:
    """Engines in servers of others, by the server's address."""

    def __init__(self) -> None:
        self._engines: dict[str, ServerEngine] = {}
        self._configs: dict[str, Any] = {}
        """Model -> vLLM's configuration, which takes seconds to make."""

    def get(self, url: str) -> ServerEngine | None:
        """The engine in the server at *url*; None if it is not attached."""
        return self._engines.get(url)

    async def attach(self, command: Attach) -> None:
        """
        Use a server from now on.

        Raises:
            Exception: Any error of vLLM, e.g. for a directory without a model.
        """
        await self.detach(command.remote.url)
        config = self._configs.get(command.model)
        if config is None:
            config = self._configs[command.model] = engine_config(command.engine_args)
        self._engines[command.remote.url] = ServerEngine(command, ServerRequests(config))

    async def detach(self, url: str) -> None:
        """End all requests at a server, and forget it; other addresses are ignored."""
        engine = self._engines.pop(url, None)
        if engine is not None:
            await engine.close()

    async def close(self) -> None:
        """Forget all servers."""
        for url in tuple(self._engines):
            await self.detach(url)
