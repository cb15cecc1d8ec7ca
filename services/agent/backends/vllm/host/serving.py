"""Executes the front's commands on vLLM engines. Runs in the engine host."""

import asyncio
from itertools import count

import structlog
from vllm.v1.engine.exceptions import EngineDeadError

from services.agent.backends.vllm.host.engine_store import EngineStore
from services.agent.backends.vllm.host.runs import Run
from services.agent.backends.vllm.shared.core_ids import core_id
from services.agent.backends.vllm.shared.wire import (
    Abort,
    Activate,
    ClearCaches,
    Connection,
    Drop,
    EngineDied,
    HostCommand,
    HostEvent,
    Outputs,
    Reply,
    RunFailed,
    RunOutput,
    Shutdown,
    Submit,
    Warm,
)

log = structlog.get_logger()

_HEALTH_PERIOD_S = 0.5


class EngineHost:
    """Executes commands on the engines of this process, and sends events to the front."""

    def __init__(self, connection: Connection[HostCommand]) -> None:
        self._connection = connection
        self._store = EngineStore()
        self._loading = asyncio.Lock()
        """Lock: engines are created one at a time, because creation changes the environment."""
        self._runs: dict[str, Run] = {}
        self._numbers = count()
        self._pending: list[RunOutput] = []

    async def run(self) -> None:
        """Serve until the front ends or sends a stop."""
        async with asyncio.TaskGroup() as group:
            health = group.create_task(self._watch_engines(), name="watch-engines")
            async for command in self._connection.frames():
                if isinstance(command, Shutdown):
                    break
                await self._on_command(command, group)
            health.cancel()

    def close(self) -> None:
        """Shut down all engines; blocks until their processes have ended."""
        self._store.close()

    async def _on_command(self, command: HostCommand, group: asyncio.TaskGroup) -> None:
        match command:
            case Activate() | Warm():
                group.create_task(self._load(command), name=f"load-{command.model}")
            case Drop():
                group.create_task(self._drop(command), name="drop")
            # In order: an abort never overtakes its run. vLLM's client sends without waiting.
            case Submit():
                await self._submit(command)
            case Abort():
                await self._abort(command)
            case ClearCaches():
                group.create_task(self._clear_caches(), name="clear-caches")
            case Shutdown():
                pass

    async def _load(self, command: Activate | Warm) -> None:
        """
        Load a model and send the reply.

        Starting the active engine blocks the event loop; no other engine has work then.
        """
        try:
            async with self._loading:
                if isinstance(command, Activate):
                    host_bytes = await self._store.activate(command)
                else:
                    host_bytes = await self._store.warm(command)
        except Exception as error:  # any error of vLLM must reach the front as text
            log.exception("engine.failed", model=command.model)
            self._send(Reply(command.model, f"cannot load {command.model}: {error}"))
        else:
            self._send(Reply(command.model, host_bytes=host_bytes))

    async def _drop(self, command: Drop) -> None:
        async with self._loading:
            for model in command.models:
                await self._store.drop(model)

    async def _submit(self, command: Submit) -> None:
        request = command.request
        engine = self._store.get(request.model)
        if engine is None:
            self._send(RunFailed(request.request_id, "the model has no engine"))
            return
        run = Run(
            request,
            core_id(request.request_id, next(self._numbers)),
            engine,
            on_output=self._on_output,
            on_error=self._on_error,
        )
        self._runs[run.run_id] = run
        try:
            await engine.submit(engine.requests.build(command, run.core_id), run)
        except Exception as error:  # noqa: BLE001 - whatever vLLM dislikes goes to the front
            self._on_error(run, error)

    async def _abort(self, command: Abort) -> None:
        run = self._runs.pop(command.request_id, None)
        if run is not None:
            await run.engine.abort(run.core_id)

    async def _clear_caches(self) -> None:
        try:
            await self._store.clear_caches()
        except Exception as error:  # any error must reach the front and end no engine
            log.exception("caches.failed")
            self._send(Reply(error=f"caches were not cleared: {error}"))
        else:
            self._send(Reply())

    def _on_output(self, output: RunOutput) -> None:
        """Send *output* together with all other outputs of the same turn of the event loop."""
        if output.finish:
            self._runs.pop(output.request_id, None)
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(output)

    def _on_error(self, run: Run, error: Exception) -> None:
        """End *run*, and report its failure or the death of its engine."""
        self._runs.pop(run.run_id, None)
        if isinstance(error, EngineDeadError):
            self._report_death(run.model, str(error))
        else:
            self._send(RunFailed(run.run_id, str(error)))

    def _flush(self) -> None:
        if self._pending:
            self._connection.send(Outputs(tuple(self._pending)))
            self._pending.clear()

    def _send(self, event: HostEvent) -> None:
        """Send *event* after all earlier outputs."""
        self._flush()
        self._connection.send(event)

    async def _watch_engines(self) -> None:
        """Detect the death of engines that have no running requests."""
        while True:
            await asyncio.sleep(_HEALTH_PERIOD_S)
            for model in self._store.errored():
                self._report_death(model, "the engine core ended")

    def _report_death(self, model: str, message: str) -> None:
        if self._store.get(model) is not None:
            self._send(EngineDied(model, message))
            self._store.shut_down(model)
            self._runs = {name: run for name, run in self._runs.items() if run.model != model}
