"""Executes the front's commands on vLLM engines. Runs in the engine host."""

import asyncio

import structlog
from vllm.inputs import TokensPrompt
from vllm.v1.engine.exceptions import EngineDeadError

from services.agent.backends.vllm.core.prefill_reports import reported_prefill_s
from services.agent.backends.vllm.host.engine_store import EngineStore
from services.agent.backends.vllm.host.sampling import sampling_params
from services.agent.backends.vllm.shared.qos import vllm_priority
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
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._pending: list[RunOutput] = []

    async def run(self) -> None:
        """Serve until the front ends or sends a stop."""
        async with asyncio.TaskGroup() as group:
            health = group.create_task(self._watch_engines(), name="watch-engines")
            async for command in self._connection.frames():
                if isinstance(command, Shutdown):
                    break
                self._on_command(command, group)
            health.cancel()
            for task in self._runs.values():
                task.cancel()

    def close(self) -> None:
        """Shut down all engines; blocks until their processes have ended."""
        self._store.close()

    def _on_command(self, command: HostCommand, group: asyncio.TaskGroup) -> None:
        match command:
            case Activate() | Warm():
                group.create_task(self._load(command), name=f"load-{command.model}")
            case Drop():
                group.create_task(self._drop(command), name="drop")
            case Submit():
                request_id = command.request.request_id
                task = group.create_task(self._generate(command), name=f"run-{request_id}")
                self._runs[request_id] = task
                task.add_done_callback(lambda done: self._forget(request_id, done))
            case Abort():
                task_or_none = self._runs.get(command.request_id)
                if task_or_none is not None:
                    task_or_none.cancel()
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

    async def _generate(self, command: Submit) -> None:
        request = command.request
        engine = self._store.get(request.model)
        if engine is None:
            self._send(RunFailed(request.request_id, "the model has no engine"))
            return
        prompt = TokensPrompt(prompt_token_ids=[*request.prompt, *request.progress])
        begun = False
        try:
            async for output in engine.generate(
                prompt,
                sampling_params(command, engine.vllm_config),
                request.request_id,
                priority=vllm_priority(request),
            ):
                part = output.outputs[0]
                self._emit(
                    RunOutput(
                        request.request_id,
                        tuple(part.token_ids),
                        part.finish_reason or "",
                        0 if begun else output.num_cached_tokens or 0,
                        0.0 if begun else reported_prefill_s(output.kv_transfer_params),
                    )
                )
                begun = True
        except EngineDeadError as error:
            self._report_death(request.model, str(error))
        except Exception as error:  # noqa: BLE001 - whatever vLLM dislikes goes to the front
            self._send(RunFailed(request.request_id, str(error)))

    async def _clear_caches(self) -> None:
        try:
            await self._store.clear_caches()
        except Exception as error:  # any error must reach the front and end no engine
            log.exception("caches.failed")
            self._send(Reply(error=f"caches were not cleared: {error}"))
        else:
            self._send(Reply())

    def _emit(self, output: RunOutput) -> None:
        """Send *output* together with all other outputs of the same turn of the event loop."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(output)

    def _flush(self) -> None:
        if self._pending:
            self._connection.send(Outputs(tuple(self._pending)))
            self._pending.clear()

    def _send(self, event: HostEvent) -> None:
        """Send *event* after all earlier outputs."""
        self._flush()
        self._connection.send(event)

    def _forget(self, request_id: str, task: asyncio.Task[None]) -> None:
        # A new run may have the same id by now.
        if self._runs.get(request_id) is task:
            del self._runs[request_id]

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
