"""Executes the front's commands on vLLM engines. Runs in the engine host."""

import asyncio
from itertools import count

import structlog
from vllm.v1.engine.exceptions import EngineDeadError

from services.agent.backends.base import EngineCall
from services.agent.backends.vllm.host.built_runs import EngineRun, built_run
from services.agent.backends.vllm.host.calls.applications import Applications
from services.agent.backends.vllm.host.calls.call_run import CallRun
from services.agent.backends.vllm.host.engine import Engine
from services.agent.backends.vllm.host.engine_store import EngineStore
from services.agent.backends.vllm.host.processes.process_trees import engine_bytes
from services.agent.backends.vllm.host.servers.attached_servers import AttachedServers
from services.agent.backends.vllm.shared.wire import (
    Abort,
    Activate,
    Attach,
    ClearCaches,
    Connection,
    Detach,
    Drop,
    EngineDied,
    HostCommand,
    HostEvent,
    Models,
    Outputs,
    Reply,
    RunDisplaced,
    RunFailed,
    RunOutput,
    RunRefused,
    Shutdown,
    Submit,
    Warm,
)
from shared.contracts.errors import ContractError, NotActiveError

log = structlog.get_logger()

_HEALTH_PERIOD_S = 0.5


class EngineHost:
    """Executes commands on the engines of this process, and sends events to the front."""

    def __init__(self, connection: Connection[HostCommand]) -> None:
        self._connection = connection
        self._store = EngineStore()
        self._servers = AttachedServers()
        self._loading = asyncio.Lock()
        """Lock: engines are created one at a time, because creation changes the environment."""
        self._runs: dict[str, EngineRun] = {}
        self._numbers = count()
        self._pending: list[RunOutput] = []
        self._applications = Applications()
        self._calls: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """Run of a call -> its model and its task."""

    async def run(self) -> None:
        """Serve until the front ends or sends a stop."""
        async with asyncio.TaskGroup() as group:
            health = group.create_task(self._watch_engines(), name="watch-engines")
            async for command in self._connection.frames():
                if isinstance(command, Shutdown):
                    break
                await self._on_command(command, group)
            health.cancel()
            await self._servers.close()

    def close(self) -> None:
        """Shut down all engines; blocks until their processes have ended."""
        self._applications.close()
        self._store.close()

    async def _on_command(self, command: HostCommand, group: asyncio.TaskGroup) -> None:
        match command:
            case Activate() | Warm():
                group.create_task(self._load(command), name=f"load-{command.model}")
            case Drop():
                group.create_task(self._drop(command), name="drop")
            case Models():
                self._applications.know(command.entries)
                for entry in command.entries:
                    await self._store.keep_adapters(entry)
            case Attach():
                await self._attach(command)
            case Detach():
                await self._servers.detach(command.url)
            case Submit() | Abort():
                await self._on_run_command(command, group)
            case ClearCaches():
                group.create_task(self._clear_caches(), name="clear-caches")
            case Shutdown():
                pass

    async def _on_run_command(self, command: Submit | Abort, group: asyncio.TaskGroup) -> None:
        """
        Begin or end a run; in order, so that an abort never overtakes its run. vLLM's client sends
        without waiting.
        """
        match command:
            case Submit() if (call := command.request.call) is not None:
                task = group.create_task(self._answer(command, call), name="answer a call")
                self._calls[command.request.request_id] = command.request.model, task
            case Submit():
                await self._submit(command)
            case Abort():
                await self._abort(command)

    async def _load(self, command: Activate | Warm) -> None:
        """
        Load a model and send the reply.

        Starting the active engine blocks the event loop; no other engine has work then.
        """
        try:
            async with self._loading:
                if isinstance(command, Activate):
                    engine = await self._store.activate(command)
                else:
                    engine = await self._store.warm(command)
        except Exception as error:  # any error of vLLM must reach the front as text
            log.exception("engine.failed", model=command.model)
            self._send(Reply(command.model, f"cannot load {command.model}: {error}"))
        else:
            host_bytes = engine_bytes(engine)
            self._send(Reply(command.model, host_bytes=host_bytes, choices=engine.choices))

    async def _attach(self, command: Attach) -> None:
        """Use a server of others, and send the reply."""
        url = command.remote.url
        try:
            await self._servers.attach(command)
        except Exception as error:  # any error of vLLM must reach the front as text
            log.exception("server.failed", url=url)
            self._send(Reply(url, f"cannot send requests for {command.model} to {url}: {error}"))
        else:
            self._send(Reply(url))

    def _engine_of(self, command: Submit) -> Engine | None:
        """The engine of a run; None if its model has none, or its server is not attached."""
        if command.server:
            return self._servers.get(command.server)
        return self._store.get(command.request.model)

    async def _drop(self, command: Drop) -> None:
        async with self._loading:
            for model in command.models:
                await self._store.drop(model)

    async def _submit(self, command: Submit) -> None:
        request = command.request
        engine = self._engine_of(command)
        if engine is None:
            self._send(RunFailed(request.request_id, "the model has no engine"))
            return
        try:
            run = await built_run(
                command,
                engine,
                self._numbers,
                on_output=self._on_output,
                on_error=self._on_error,
            )
        except EngineDeadError as error:
            self._report_death(request.model, str(error))
            return
        except Exception as error:  # noqa: BLE001 - the front gets every refusal of vLLM
            self._send(RunFailed(request.request_id, str(error)))
            return
        self._runs[run.run_id] = run
        try:
            await run.begin()
        except Exception as error:  # noqa: BLE001 - the front gets every failure of vLLM
            self._on_error(run, error)

    async def _answer(self, command: Submit, call: EngineCall) -> None:
        """Run a call, and send its response."""
        request = command.request
        engine = self._engine_of(command)
        if engine is None:
            self._send(RunFailed(request.request_id, "the model has no engine"))
            return
        run = CallRun(
            request,
            call,
            engine,
            self._numbers,
            adapter_path=command.adapter_path,
            parses=self._applications.parses(request.model, call),
            on_output=self._on_output,
            on_lost=self._on_error,
        )
        try:
            answered = await run.response(self._applications)
        except ContractError as error:
            self._on_error(run, error)
        except Exception as error:  # any error of vLLM's application must reach the front as text
            log.exception("call.failed", request_id=request.request_id)
            self._send(RunFailed(request.request_id, f"vLLM's application failed: {error}"))
        else:
            self._send(answered)
        finally:
            self._calls.pop(request.request_id, None)

    async def _abort(self, command: Abort) -> None:
        if (call := self._calls.pop(command.request_id, None)) is not None:
            call[1].cancel()
            return
        run = self._runs.pop(command.request_id, None)
        if run is not None:
            await run.abort()

    async def _clear_caches(self) -> None:
        try:
            await self._store.clear_caches()
        except Exception as error:  # any error must reach the front and end no engine
            log.exception("caches.failed")
            self._send(Reply(error=f"caches were not cleared: {error}"))
        else:
            self._send(Reply())

    def _on_output(self, output: RunOutput) -> None:
        """
        Collect *output* with all other outputs of this turn of the event loop, to send them
        together.
        """
        if output.finish:
            self._runs.pop(output.request_id, None)
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(output)

    def _on_error(self, run: EngineRun | CallRun, error: Exception) -> None:
        """End *run*, and report its failure or the death of its engine."""
        self._runs.pop(run.run_id, None)
        match error:
            case EngineDeadError():
                self._report_death(run.model, str(error))
            case NotActiveError():
                if (call := self._calls.pop(run.run_id, None)) is not None:
                    call[1].cancel()
                self._send(RunDisplaced(run.run_id, str(error)))
            case ContractError():
                self._send(
                    RunRefused(run.run_id, str(error), error.status, error.code, error.param)
                )
            case _:
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
            for of_model, task in tuple(self._calls.values()):
                if of_model == model:
                    task.cancel()
