"""The engines of a host, by model: made, parked, given another model's weights, shut down."""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

import structlog
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from services.agent.backends.vllm.engines import end_engine, engine_bytes, make_engine
from services.agent.backends.vllm.wire import Activate, Warm

T = TypeVar("T")

log = structlog.get_logger()
_CHECK_PERIOD_S = 0.1
_RESET_TRIES = 100
_RESET_PAUSE_S = 0.01
"""Between tries to forget a donor's KV, while its last aborts are still under way."""


class EngineStore:
    """At most one engine is active, the others are parked."""

    def __init__(self) -> None:
        self._engines: dict[str, AsyncLLM] = {}
        self._asleep: set[str] = set()
        self._active: str | None = None
        self._lost: set[str] = set()
        """Engines that run and cannot serve."""

    def get(self, model: str) -> AsyncLLM | None:
        """The engine of *model*, if there is one."""
        return self._engines.get(model)

    async def activate(self, command: Activate) -> int:
        """
        Make the model's engine the active one.

        Returns:
            Host memory of its processes, in bytes; 0 when unknown.

        Raises:
            Exception: Whatever vLLM raises; the model then has no engine, nor has the donor, and
                who was active serves on.
        """
        for model in command.drop:
            self.shut_down(model)
        engine = self._engines.get(command.model)
        if engine is not None and engine.errored:
            self.shut_down(command.model)
        try:
            # First: a donor that wakes takes the device's memory.
            if command.sleep and self._active not in (None, command.model, command.donor):
                await self._sleep(str(self._active))
            if command.donor in self._engines:
                await self._reload(command)
            engine = await self._awake(command)
        except BaseException as error:
            # Cancelled, too: an engine is half made, half awake, or has nobody knows whose weights.
            self.shut_down(command.model)
            self.shut_down(command.donor)
            if isinstance(error, Exception):
                await self._serve_on()
            raise
        self._active = command.model
        return engine_bytes(engine)

    async def warm(self, command: Warm) -> int:
        """
        Make an engine and park it, while the active one serves on.

        Returns:
            As `activate`.

        Raises:
            Exception: Whatever vLLM raises.
        """
        # In a thread: it blocks for seconds.
        engine = await asyncio.to_thread(make_engine, command.engine_args)
        self._engines[command.model] = engine
        if command.sleep:
            await self._sleep(command.model)
        return engine_bytes(engine)

    async def clear_caches(self) -> None:
        """Forget all KV that no running request owns, on the device and on the host."""
        for engine in tuple(self._engines.values()):
            # A dead one has no caches; whoever watches the engines sees that it is dead.
            with contextlib.suppress(EngineDeadError):
                await _answered(engine, engine.reset_prefix_cache(reset_connector=True))

    def errored(self) -> tuple[str, ...]:
        """Models whose engines have died, or cannot be woken."""
        return tuple(
            model
            for model, engine in self._engines.items()
            if engine.errored or model in self._lost
        )

    def shut_down(self, model: str) -> None:
        """End the engine of *model*, if there is one; blocks until its processes are gone."""
        engine = self._taken(model)
        if engine is not None:
            end_engine(engine)

    async def drop(self, model: str) -> None:
        """The same while others serve: in a thread."""
        engine = self._taken(model)
        if engine is not None:
            await asyncio.to_thread(end_engine, engine)

    def _taken(self, model: str) -> AsyncLLM | None:
        """The engine of *model*, which is nobody's from now on."""
        self._asleep.discard(model)
        self._lost.discard(model)
        if model == self._active:
            self._active = None
        return self._engines.pop(model, None)

    def close(self) -> None:
        """Shut every engine down."""
        for model in tuple(self._engines):
            self.shut_down(model)

    async def _serve_on(self) -> None:
        """Wake the active engine that another was to replace; one that cannot is lost."""
        active = self._active
        if active is None or active not in self._asleep:
            return
        try:
            await self._wake_up(active)
        except Exception:  # whatever vLLM raises: whoever watches the engines sees that it is lost
            log.exception("engine.lost", model=active)
            self._lost.add(active)

    async def _awake(self, command: Activate) -> AsyncLLM:
        """The model's engine, made if there is none."""
        engine = self._engines.get(command.model)
        if engine is None:
            engine = self._engines[command.model] = make_engine(command.engine_args)
        elif command.model in self._asleep:
            await self._wake_up(command.model)
        return engine

    async def _reload(self, command: Activate) -> None:
        """Put the model's weights into the donor's engine, which runs nothing."""
        engine = self._engines[command.donor]
        if command.donor in self._asleep:
            await self._wake_up(command.donor)
        weights = {"weights_path": command.engine_args["model"]}
        await _answered(engine, engine.collective_rpc("reload_weights", kwargs=weights))
        await _forget_kv(engine)
        del self._engines[command.donor]
        self._asleep.discard(command.donor)
        if self._active == command.donor:
            self._active = None
        self._engines[command.model] = engine

    async def _wake_up(self, model: str) -> None:
        await _answered(self._engines[model], self._engines[model].wake_up())
        self._asleep.discard(model)

    async def _sleep(self, model: str) -> None:
        await _answered(self._engines[model], self._engines[model].sleep(level=1))
        self._asleep.add(model)


async def _answered(engine: AsyncLLM, call: Awaitable[T]) -> T:
    """
    The answer of *engine*'s core to *call*; vLLM waits for ever for one that has died.

    Raises:
        EngineDeadError: It died before it answered.
    """
    answer = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait((answer,), timeout=_CHECK_PERIOD_S))[0]:
            if engine.errored:
                raise EngineDeadError
        return answer.result()
    finally:
        answer.cancel()


async def _forget_kv(engine: AsyncLLM) -> None:
    """No KV of the old weights may be taken for one of the new: blocks are named by tokens."""
    for _ in range(_RESET_TRIES):
        if await _answered(engine, engine.reset_prefix_cache(reset_connector=True)):
            return
        await asyncio.sleep(_RESET_PAUSE_S)
    raise RuntimeError("the engine still holds KV of its former model")
