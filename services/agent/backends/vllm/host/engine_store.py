"""Engines of a host by model: creation, parking, weight reloads and shutdown."""

import asyncio
import contextlib

import structlog
from vllm.v1.engine.exceptions import EngineDeadError

from services.agent.backends.vllm.host.core_engine import CoreEngine
from services.agent.backends.vllm.host.engines import make_engine
from services.agent.backends.vllm.host.processes.process_trees import end_engine
from services.agent.backends.vllm.shared.wire import Activate, Warm
from shared.contracts.models import ModelEntry

log = structlog.get_logger()
_RESET_TRIES = 100
_RESET_PAUSE_S = 0.01
"""Pause between attempts to drop a donor's KV while its last aborts are in progress."""


class EngineStore:
    """Engines of a host: at most one is active, the others are parked."""

    def __init__(self) -> None:
        self._engines: dict[str, CoreEngine] = {}
        self._asleep: set[str] = set()
        self._active: str | None = None
        self._lost: set[str] = set()
        """Engines that still run but cannot serve."""

    def get(self, model: str) -> CoreEngine | None:
        """Engine of *model*; None if it has no engine."""
        return self._engines.get(model)

    async def activate(self, command: Activate) -> CoreEngine:
        """
        Make the engine of the command's model the active one, and return it.

        Raises:
            Exception: Any error of vLLM. Then neither the model nor the donor has an engine, and
                the previously active model continues to serve.
        """
        for model in command.drop:
            self.shut_down(model)
        engine = self._engines.get(command.model)
        if engine is not None and engine.errored:
            self.shut_down(command.model)
        try:
            # Put the active engine to sleep first, since a donor that wakes needs the device's
            # memory.
            if command.sleep and self._active not in (None, command.model, command.donor):
                await self._sleep(str(self._active))
            if command.donor in self._engines:
                await self._reload(command)
            engine = await self._awake(command)
        except BaseException as error:
            # Run this after a cancellation also: the engine may be half created, half awake, or
            # have unknown weights.
            self.shut_down(command.model)
            self.shut_down(command.donor)
            if isinstance(error, Exception):
                await self._serve_on()
            raise
        self._active = command.model
        return engine

    async def warm(self, command: Warm) -> CoreEngine:
        """
        Create an engine and park it while the active engine continues to serve; return it.

        Raises:
            Exception: Any error of vLLM.
        """
        # In a thread, since it blocks for seconds.
        engine = await asyncio.to_thread(make_engine, command.engine_args)
        self._engines[command.model] = engine
        if command.sleep:
            await self._sleep(command.model)
        return engine

    async def keep_adapters(self, entry: ModelEntry) -> None:
        """Unload unused adapters of the model's engine that its entry does not have any more."""
        engine = self._engines.get(entry.name)
        if engine is not None:
            # A dead engine has no adapters; `errored` reports its death.
            with contextlib.suppress(EngineDeadError):
                await engine.keep_adapters(entry.adapters.items())

    async def clear_caches(self) -> None:
        """Drop all KV that no running request owns, in the engines' memory and in host memory."""
        for engine in tuple(self._engines.values()):
            # A dead engine has no caches; `errored` reports its death.
            with contextlib.suppress(EngineDeadError):
                await engine.reset_caches()

    def errored(self) -> tuple[str, ...]:
        """Models whose engines have died or cannot be woken."""
        return tuple(
            model
            for model, engine in self._engines.items()
            if engine.errored or model in self._lost
        )

    def shut_down(self, model: str) -> None:
        """End the engine of *model*, if any; blocks until the engine's processes have ended."""
        engine = self._taken(model)
        if engine is not None:
            end_engine(engine)

    async def drop(self, model: str) -> None:
        """Shut down the engine of *model* in a thread, while other engines serve."""
        engine = self._taken(model)
        if engine is not None:
            await asyncio.to_thread(end_engine, engine)

    def _taken(self, model: str) -> CoreEngine | None:
        """Remove and return the engine of *model*."""
        self._asleep.discard(model)
        self._lost.discard(model)
        if model == self._active:
            self._active = None
        return self._engines.pop(model, None)

    def close(self) -> None:
        """Shut down all engines."""
        for model in tuple(self._engines):
            self.shut_down(model)

    async def _serve_on(self) -> None:
        """Wake the previously active engine after a failed activation, or record it as lost."""
        active = self._active
        if active is None or active not in self._asleep:
            return
        try:
            await self._wake_up(active)
        except Exception:  # any error of vLLM: `errored` reports the engine as lost
            log.exception("engine.lost", model=active)
            self._lost.add(active)

    async def _awake(self, command: Activate) -> CoreEngine:
        """Return the model's engine; create it if the model has none."""
        engine = self._engines.get(command.model)
        if engine is None:
            engine = self._engines[command.model] = make_engine(command.engine_args)
        elif command.model in self._asleep:
            await self._wake_up(command.model)
        return engine

    async def _reload(self, command: Activate) -> None:
        """Load the model's weights into the donor's engine, which is idle."""
        engine = self._engines[command.donor]
        if command.donor in self._asleep:
            await self._wake_up(command.donor)
        await engine.reload_weights(command.engine_args["model"])
        await _forget_kv(engine)
        del self._engines[command.donor]
        self._asleep.discard(command.donor)
        if self._active == command.donor:
            self._active = None
        self._engines[command.model] = engine

    async def _wake_up(self, model: str) -> None:
        await self._engines[model].wake_up()
        self._asleep.discard(model)

    async def _sleep(self, model: str) -> None:
        await self._engines[model].sleep()
        self._asleep.add(model)


async def _forget_kv(engine: CoreEngine) -> None:
    """Drop the KV of the engine's former weights, since vLLM identifies blocks by tokens only."""
    for _ in range(_RESET_TRIES):
        if await engine.reset_caches():
            return
        await asyncio.sleep(_RESET_PAUSE_S)
    raise RuntimeError("the engine still holds KV of its former model")
