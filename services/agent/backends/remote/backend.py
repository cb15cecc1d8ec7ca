"""Backend for one server that others run."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import Protocol
from urllib.parse import urlsplit

import structlog

from services.agent.backends.answering import AnsweringBackend
from services.agent.backends.base import (
    EngineIdentity,
    EngineOutput,
    EngineRequest,
    EngineSnapshot,
    NewOutput,
    RunEnded,
    SchedulingParameters,
)
from services.agent.backends.checks import stop_tokens
from services.agent.backends.remote.body_run import ALL_FIELDS, PLAIN_FIELDS, BodyRun
from services.agent.backends.remote.server import LOST, Description, Server
from services.agent.backends.remote.telemetry import ServerIterations, ServerLoad, Streams, load_of
from services.agent.backends.remote.token_host import TokenHost
from services.agent.backends.remote.token_run import TokenRun
from services.agent.backends.residency import Footprint, ResidencyTable
from services.agent.backends.settings import RemoteSettings
from shared.contracts.base import ModelName, RequestId, Seconds
from shared.contracts.errors import (
    ConnectionBrokenError,
    EngineError,
    MeshError,
    NotActiveError,
    UnsupportedError,
)
from shared.contracts.models import ModelEntry
from shared.contracts.telemetry import ActivationPath, Capability, EngineIteration
from shared.runtime.http.failures import failure_reason
from solver.scheduling.concurrency import ConcurrencyLimit, FleetLimits
from solver.scheduling.server_priority import server_priority

log = structlog.get_logger()
WATCH_PERIOD_S = 0.5
"""Period of looking at the server's health and metrics."""
UNSURE_PERIOD_S = 0.1
"""The same while requests wait in a server whose number of places is not known."""
_MISSED = 2
"""Number of failed looks after which the server counts as dead."""
FIRST_LIMIT = 4
"""Limit of concurrent requests at a server until it is full for the first time."""


class _Run(Protocol):
    """One run at the server, as batches of outputs."""

    def outputs(self, server: Server) -> AsyncIterator[list[EngineOutput]]: ...


class RemoteEngine(AnsweringBackend):
    """
    One server with OpenAI's API, which serves one model of the registry.

    Its connection is its life: a server that does not answer is a dead engine.

    Args:
        entries: The model that the server serves; exactly one.
        settings: Address and limits of the server.
        host: Answers requests that vLLM's front has rendered, and calls, if the model takes tokens;
            None: they are refused.
        fleet: Limits of the servers of this process, which serve the same model.

    Raises:
        EngineError: There is not exactly one model.
    """

    def __init__(
        self,
        entries: Iterable[ModelEntry],
        settings: RemoteSettings,
        host: TokenHost | None = None,
        fleet: FleetLimits | None = None,
    ) -> None:
        entries = tuple(entries)
        if len(entries) != 1:
            names = ", ".join(entry.name for entry in entries) or "none"
            raise EngineError(f"a remote instance serves one model; set `models` (now: {names})")
        (self._entry,) = entries
        table = ResidencyTable(
            {self._entry.name: Footprint(weight_bytes=0, engine_bytes=0)},
            warm_bytes=0,
            prior_s={ActivationPath.COLD: 0.0},
        )
        super().__init__(entries, table)
        self._settings = settings
        self._host = None if self._entry.takes_bodies else host
        self._server = Server(settings)
        self._description: Description | None = None
        self._model = ""
        """Name of the model at the server."""
        self._orders = False
        """True if the server orders requests by priority."""
        self._alive = False
        self._has_metrics = False
        self._load = ServerLoad()
        self._streams = Streams()
        self._iterations = ServerIterations()
        self._limit = ConcurrencyLimit(most=settings.max_running, first=settings.max_running)
        self._fleet = FleetLimits() if fleet is None else fleet
        self._tasks: dict[RequestId, asyncio.Task[None]] = {}
        """Runs in this process, and lost runs whose server is asked for its health."""
        self._hosted: set[RequestId] = set()
        """Runs in the engine host."""
        self._watch: asyncio.Task[None] | None = None

    @property
    def identity(self) -> EngineIdentity:
        known = self._description
        address = urlsplit(self._server.url).netloc
        # A device of its own for each server, so that no profile mixes two kinds of devices.
        return EngineIdentity(
            engine="openai-server" if known is None else known.engine,
            device=self._settings.device or f"remote {address}",
            capabilities=frozenset(self._capabilities()),
        )

    def _capabilities(self) -> Iterable[Capability]:
        # Iterations are only estimated, so the backend lacks the capability `TELEMETRY`.
        if self._entry.takes_bodies:
            yield Capability.CALLS
        else:
            yield Capability.RESUME
        if self._host is not None:
            yield Capability.CALLS

    async def prepare(self) -> None:
        """No-op: the server runs already."""

    async def start(self) -> None:
        description = await self._server.describe()
        model = served_name(description, self._settings, self._entry)
        before = self._description
        if before is not None and (before.engine, self._model) != (description.engine, model):
            raise EngineError(
                f"{self._server.url} was {before.engine} with {self._model}, and is now "
                f"{description.engine} with {model}"
            )
        self._description, self._model = description, model
        self._orders = description.is_vllm and await self._server.orders(model)
        if self._host is not None:
            await self._host.attach(self._entry, self._settings, model)
        self._has_metrics = await self._measure()
        if before is None:
            self._limit = ConcurrencyLimit(most=self._settings.max_running, first=FIRST_LIMIT)
            self._fleet.join(description.engine, self._limit)
        self._alive = True
        if self._watch is None:
            self._watch = asyncio.create_task(self._watched(), name="watch the server")
        log.info("server.attached", url=self._server.url, model=model, engine=description.engine)

    async def remove(self, model: ModelName) -> None:
        self._require_known(model)
        self._require_alive()
        self._forget(model)
        self._residency.remove(model)

    async def activate(self, model: ModelName) -> Seconds:
        self._require_known(model)
        self._require_alive()
        activation = self._residency.activation(model)
        if activation is not None:
            self._residency.activated(activation, 0.0)
        return 0.0

    async def warm(self, model: ModelName) -> Seconds:  # noqa: ARG002 - as below
        raise UnsupportedError("a server of others keeps its model")

    async def cool(self, model: ModelName) -> None:  # noqa: ARG002 - as below
        raise UnsupportedError("a server of others keeps its model")

    async def set_scheduling(self, parameters: SchedulingParameters) -> None:  # noqa: ARG002 - same signature for all
        raise UnsupportedError("the limits of a server of others cannot be changed")

    async def clear_caches(self) -> None:
        raise UnsupportedError("the caches of a server of others cannot be dropped")

    async def preempt_now(self) -> bool:
        raise UnsupportedError("a server of others has no safepoints")

    def snapshot(self) -> EngineSnapshot:
        in_server = int(self._load.waiting) if self._has_metrics else 0
        waiting = min(in_server, self._streams.num_waiting)
        return EngineSnapshot(
            model=self._residency.active,
            running=len(self._runs) - waiting,
            waiting=waiting,
            kv_utilization=self._kv_utilization(),
            kv_capacity_tokens=self._load.kv_capacity_tokens,
            max_running=self._limit.limit,
            spare_running=self._limit.spare,
            most_run=self._streams.most_begun,
            longest_gap_s=self._streams.longest_gap_s,
            models=self._residency.states(),
        )

    def _kv_utilization(self) -> float:
        """Share of the KV in use: the last report, or what our requests take at least."""
        capacity = self._load.kv_capacity_tokens
        if not self._runs or not capacity:
            return self._load.kv_utilization
        return min(1.0, max(self._load.kv_utilization, self._streams.num_tokens / capacity))

    def drain_iterations(self) -> tuple[EngineIteration, ...]:
        estimated = self._streams.drain()
        return self._iterations.drain() if self._has_metrics else estimated

    @property
    def alive(self) -> bool:
        return self._alive

    async def close(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.wait({watch})
        self._die("the instance was closed")
        self._fleet.leave(self._limit)
        if self._host is not None:
            self._host.detach(self._settings.url)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._server.close()

    def _require_alive(self) -> Description:
        if self._description is None or not self._alive:
            raise EngineError(f"{self._server.url} does not answer", engine_dead=True)
        return self._description

    def _submit(self, request: EngineRequest) -> None:
        description = self._require_alive()
        if self._host is not None and request.call is not None:
            self._submit_to_host(request, self._host)
        else:
            self._start(request.request_id, self._run(request, self._run_of(request, description)))
        call = request.call
        self._streams.submitted(
            request.request_id,
            len(request.prompt),
            streams=call is None or call.streams,
            size=None if call is None else len(call.body),
        )

    def _submit_to_host(self, request: EngineRequest, host: TokenHost) -> None:
        if self._entry.pools:
            raise UnsupportedError(
                "a server of others computes pooled inputs from bodies: set `takes` of the model"
            )
        adapter = self._adapters[request.model].get(request.adapter or "", "")
        host.submit(
            request,
            url=self._settings.url,
            stops=stop_tokens(self._entry, request),
            adapter=adapter,
            report=self._on_host,
        )
        self._hosted.add(request.request_id)

    def _on_host(self, events: Sequence[NewOutput | RunEnded]) -> None:
        """Report outputs and ends of runs in the engine host."""
        for event in events:
            name = event.request_id
            if isinstance(event, NewOutput):
                self._received(name, [event.output])
                if event.output.is_last:
                    self._forget_run(name)
                continue
            self._forget_run(name)
            if isinstance(event.error, NotActiveError):
                self._start(name, self._lost(name, str(event.error)))
            else:
                self._report([event])

    def _start(self, name: RequestId, work: Coroutine[None, None, None]) -> None:
        task = self._tasks[name] = asyncio.create_task(work, name=f"run {name}")
        task.add_done_callback(lambda _task: self._forget_run(name))

    def _run_of(self, request: EngineRequest, description: Description) -> _Run:
        priority = server_priority(request.slo, request.arrived_at) if self._orders else None
        model = request.adapter or self._model
        if request.call is not None:
            return BodyRun(
                request.call,
                model=model,
                priority=priority,
                counts=description.is_vllm,
                honoured=self._honoured(description),
            )
        stops = stop_tokens(self._entry, request)
        return TokenRun(request, model=model, priority=priority, stops=stops)

    def _honoured(self, description: Description) -> tuple[str, ...]:
        if self._settings.fields is not None:
            return self._settings.fields
        return (ALL_FIELDS,) if description.is_vllm else PLAIN_FIELDS

    def _cancel(self, request_id: RequestId) -> None:
        if (task := self._tasks.get(request_id)) is not None:
            task.cancel()  # closes the connection, which ends the run at the server
        if self._host is not None and request_id in self._hosted:
            self._host.abort(request_id)
            self._forget_run(request_id)

    def _forget_run(self, request_id: RequestId) -> None:
        self._tasks.pop(request_id, None)
        self._hosted.discard(request_id)
        self._streams.ended(request_id)

    async def _run(self, request: EngineRequest, run: _Run) -> None:
        name = request.request_id
        try:
            async for outputs in run.outputs(self._server):
                self._received(name, outputs)
        except LOST as error:
            await self._lost(name, failure_reason(error))
        except MeshError as error:
            self._report([RunEnded(name, error)])
        except Exception as error:  # a bug or a surprising answer ends this run alone
            log.exception("run.broken", request_id=name)
            self._report([RunEnded(name, EngineError(f"the answer cannot be read: {error}"))])

    def _received(self, name: RequestId, outputs: list[EngineOutput]) -> None:
        num_tokens = sum(len(output.token_ids) for output in outputs)
        self._streams.received(name, num_tokens)
        self._report([NewOutput(name, output) for output in outputs])

    async def _lost(self, name: RequestId, reason: str) -> None:
        """The connection of one run broke: either the server is dead, or only this connection."""
        kind: type[NotActiveError] = ConnectionBrokenError
        if self._alive and not await self._server.alive():
            self._die(f"{self._server.url}: {reason}")
            kind = NotActiveError
        self._report([RunEnded(name, kind(f"the connection broke: {reason}"))])

    def _die(self, message: str) -> None:
        """End all runs, because the server does not answer."""
        if not self._alive:
            return
        self._alive = False
        self._residency.clear()
        self._lose(message)
        if self._host is not None:
            for name in tuple(self._hosted):
                self._host.abort(name)
                self._forget_run(name)
        for task in self._tasks.values():
            if task is not asyncio.current_task():
                task.cancel()

    async def _watched(self) -> None:
        """Look at the server's health and load, and more often at its load while it is unsure."""
        missed, looked_at = 0, time.monotonic()
        while True:
            is_unsure = self._streams.num_waiting and not self._limit.is_sure and not missed
            await asyncio.sleep(UNSURE_PERIOD_S if is_unsure else WATCH_PERIOD_S)
            if not self._alive:
                missed = 0
                continue
            if not self._has_metrics:
                self._estimate()
                if time.monotonic() - looked_at < WATCH_PERIOD_S:
                    continue
            looked_at = time.monotonic()
            try:
                await self._look()
                missed = 0
            except EngineError as error:
                missed += 1
                if missed >= _MISSED:
                    log.error("engine.died", reason=str(error))
                    self._die(str(error))

    async def _look(self) -> None:
        """
        Look at the server's metrics, or at its health if it has none or does not show them now.

        Raises:
            EngineError: The server does not answer.
        """
        if not (self._has_metrics and await self._measure()):
            await self._server.healthy()

    def _estimate(self) -> None:
        """Adapt to the queue in a server that does not report it, as our answers show it."""
        streams = self._streams
        num_waiting = streams.num_prefilling if streams.is_stuck else 0
        is_found = self._limit.queue_seen(
            running=streams.num_begun + streams.num_whole,
            waiting=num_waiting,
            ours=len(self._runs),
            ours_waiting=num_waiting,
            ours_prefilling=num_waiting,
            has_waited=True,
        )
        if is_found:
            self._fleet.found(self._limit)

    async def _measure(self) -> bool:
        """
        Take over the load in the server's metrics; return False if there are none.

        Raises:
            EngineError: The server does not answer.
        """
        if self._settings.shared_address:
            return False  # each answer comes from another server
        load = load_of(await self._server.text("/metrics"))
        if load is None:
            return False
        self._load = load
        self._iterations.seen(
            load,
            time.monotonic(),
            context_tokens=self._streams.mean_context_tokens,
            prompt_tokens=self._streams.mean_prompt_tokens,
        )
        is_found = self._limit.queue_seen(
            running=load.running,
            waiting=load.waiting,
            ours=len(self._runs),
            ours_waiting=self._streams.num_waiting,
            ours_prefilling=self._streams.num_prefilling,
            has_waited=self._streams.has_waited,
        )
        if is_found:
            self._fleet.found(self._limit)
        return True


def served_name(description: Description, settings: RemoteSettings, entry: ModelEntry) -> str:
    """
    Name of *entry*'s model at the server: that of the settings, else of the registry, else of the
    only model.

    Raises:
        EngineError: The server does not serve the model.
    """
    listed = [each.id for each in description.models]
    wanted = settings.model
    if not listed:
        return wanted or entry.name
    if wanted is None:
        bases = [each.id for each in description.bases]
        wanted = entry.name if entry.name in listed or len(bases) != 1 else bases[0]
    if wanted not in listed:
        raise EngineError(
            f"{settings.url} does not serve {wanted!r}; it serves {', '.join(listed)}: set "
            "engine.remote.model"
        )
    return wanted
