"""The shell of an instance: gives it events, and executes its commands."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog

from services.agent.attached.shared_turns import SharedTurns
from services.agent.backends.base import EngineBackend, EngineEvent, SchedulingParameters
from services.agent.deliveries import Deliveries
from services.agent.departures import Departures
from services.agent.outbox import Outbox
from services.agent.recording import Recording
from services.agent.runs import Runs
from services.agent.servable import ServableModels
from services.agent.telemetry.reporting import Reporter
from services.agent.telemetry.request_log import RequestLog
from services.agent.telemetry.stored_starts import StoredStarts
from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage, Settlement
from shared.broker.retry import send_best_effort
from shared.broker.work_queues import WorkQueues
from shared.contracts.base import Seconds, UnixTime, tag_of
from shared.contracts.control import LsoAnswered, LsoCommand, LsoOutcome, LsoRun
from shared.contracts.errors import (
    BrokerConflictError,
    ContractError,
    MeshError,
    NoRoomError,
    UnsupportedError,
)
from shared.runtime.clock import Clock
from solver.instance import commands as do
from solver.instance import events as ev
from solver.instance.instance import Instance
from solver.planning.lso.operations import Lso

log = structlog.get_logger()
_REFUSALS = (UnsupportedError, NoRoomError, ContractError)
"""Errors of calls that changed nothing."""


MOST_EVENTS_AT_ONCE = 1000
"""
Number of events after which the rest is handled in the next turn of the event loop, so that the
heartbeats of connections continue whatever follows from an event.
"""
LOOK_PERIOD_S = 0.1
"""Least time between two looks at an engine in which runs wait."""
_Executor = Callable[[Any], Coroutine[Any, Any, None] | None]


class Shell:
    """
    Executes the commands of one instance, without decisions of its own.

    Each event is handled at once, or after those before it. Its commands are begun in order: those
    that wait for the broker or the engine run as tasks.

    Args:
        instance: The instance; only this class calls `handle`.
        models: Models that the engine serves.
        queues: The work queues of this process.
        outbox: Sends tokens.
        stored_starts: Sends starts of runs to the store.
        reporter: Publishes views of the instance.
        request_log: Logs and reports what happens to requests.
        turns: Turns of the instances of this process to pull; None: this one is alone.
        recording: Stores every event.
        knows_cancels: Returns whether all cancellations sent so far are known; otherwise no request
            is pulled, since a request that was cancelled must not begin.
    """

    def __init__(
        self,
        *,
        instance: Instance,
        engine: EngineBackend,
        models: ServableModels,
        broker: Broker,
        queues: WorkQueues,
        outbox: Outbox,
        stored_starts: StoredStarts,
        reporter: Reporter,
        request_log: RequestLog,
        clock: Clock,
        knows_cancels: Callable[[], bool],
        turns: SharedTurns | None = None,
        recording: Recording | None = None,
    ) -> None:
        self._instance = instance
        self._knows_cancels = knows_cancels
        self._turns = turns
        self._engine = engine
        self._models = models
        self._broker = broker
        self._reporter = reporter
        self._request_log = request_log
        self._clock = clock
        self._recording = recording
        self.runs = Runs(
            engine=engine,
            models=models,
            outbox=outbox,
            stored_starts=stored_starts,
            instance_id=instance.settings.instance_id,
            report=self.put,
            prefilled=lambda prefill: self._spawn(reporter.prefilled(prefill), "prefilled"),
            spawn=self._spawn,
            clock=clock,
        )
        self._departures = Departures(
            broker=broker,
            queues=queues,
            outbox=outbox,
            runs=self.runs,
            settings=instance.settings,
            clock=clock,
        )
        self._events: deque[ev.Event] = deque()
        self._handling = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._deliveries = Deliveries(
            broker=broker, departures=self._departures, request_log=request_log, clock=clock
        )
        self._timer: asyncio.TimerHandle | None = None
        self._look_at: UnixTime = 0.0
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._prepared: asyncio.Queue[do.Prepared] = asyncio.Queue()
        self.drained = asyncio.Event()
        """Set when the instance holds no requests any more, and pulls none."""
        self._executors = self._executors_of_commands()
        engine.listen(self._on_engine)
        broker.on_connection_lost(self._on_connection_lost)

    def _executors_of_commands(self) -> dict[type[do.Command], _Executor]:
        """Kind of command -> function that executes it, or returns the coroutine that does."""
        reporter = self._reporter
        return {
            do.Get: self._get,
            do.Submit: self.runs.submit,
            do.Abort: lambda command: self.runs.abort(command.run_id),
            do.Reserve: lambda command: self.runs.reserve(command.run_id, command.room_tokens),
            do.Depart: self._depart,
            do.Return: self._return,
            do.Renew: self._renew,
            do.Discard: lambda command: self._deliveries.settle(command.tags, Settlement.ACK),
            **dict.fromkeys(do.CALLS, self._call),
            do.Release: self._begin_release,
            do.Count: self._count,
            do.Claim: self._claim,
            do.Unclaim: self._unclaim,
            do.Answer: self._answer,
            do.Record: self._record,
            do.Say: self._say,
            do.Report: lambda _command: reporter.report(),
            do.ReportActivation: lambda command: reporter.activated(command.activated),
            do.WakeAt: self._wake_at,
            do.Prepared: self._prepared.put_nowait,
            do.Drained: lambda _command: self.drained.set(),
        }

    def put(self, event: ev.Event) -> None:
        """Handle *event*, after the events that are being handled."""
        self._events.append(event)
        if not self._handling:
            self._handle()

    def _handle(self) -> None:
        """Handle the events so far and those that follow from them."""
        if self._failure.done():
            return
        self._handling = True
        try:
            for _ in range(MOST_EVENTS_AT_ONCE):
                if not self._events:
                    return
                next_event, now = self._events.popleft(), self._clock.now()
                if self._recording is not None:
                    self._recording.append(next_event, now)
                for command in self._instance.handle(next_event, now):
                    self._begin(command)
            asyncio.get_running_loop().call_soon(self._handle)
        except Exception as error:  # the state of the instance may be inconsistent
            # End the process, so that the broker returns all unsettled requests.
            log.exception("instance.broken")
            self._fail(error)
        finally:
            self._handling = False

    def look(self) -> None:
        """Give the instance the present state of the engine and the lengths of answers."""
        engine = view_of(self._engine, self._reporter.pace_s)
        self.put(ev.Loaded(engine=engine, lengths=self.runs.lengths()))

    async def failure(self) -> None:
        """
        Wait until a command cannot be executed because of a bug.

        Raises:
            Exception: The error.
        """
        await self._failure

    async def next_prepared(self) -> do.Prepared:
        """
        Wait until the next stage of the start is over.

        Raises:
            Exception: A command cannot be executed because of a bug.
        """
        stage = asyncio.ensure_future(self._prepared.get())
        try:
            await asyncio.wait((stage, self._failure), return_when=asyncio.FIRST_COMPLETED)
            if not stage.done():
                await self._failure
            return stage.result()
        finally:
            stage.cancel()

    async def close(self) -> None:
        """Cancel all commands in progress."""
        if self._timer is not None:
            self._timer.cancel()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, command: do.Command) -> None:
        work = self._executors[type(command)](command)
        if work is not None:
            self._spawn(work, type(command).__name__)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("instance.broken", exc_info=error)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def _on_engine(self, events: Sequence[EngineEvent]) -> None:
        """Handle events of the engine; look at it also, while runs wait in it."""
        self.runs.on_events(events)
        now = self._clock.now()
        if now >= self._look_at:
            self._look_at = now + LOOK_PERIOD_S
            if self._engine.snapshot().waiting:
                self.look()

    def _on_connection_lost(self) -> None:
        self.put(ev.Lost(connection=self._deliveries.lose()))

    async def _get(self, command: do.Get) -> None:
        ended = await self._pulled(command.queue)
        self.put(ended)
        if isinstance(ended, ev.Delivered):
            self._log_pull(ended)
            await self._reporter.report_pulls()

    async def _pulled(self, queue: str) -> ev.Delivered | ev.PullEnded:
        if not self._knows_cancels():
            unreachable, asked_at = ev.PullOutcome.UNREACHABLE, self._clock.now()
            return ev.PullEnded(queue=queue, outcome=unreachable, asked_at=asked_at)
        if self._turns is None or queue == self._instance.inbox:
            return await self._deliveries.pull(queue)
        return await self._turns.pull(self._instance, queue, self._deliveries.pull)

    def _log_pull(self, delivered: ev.Delivered) -> None:
        """Report that this instance holds the request of a delivery, unless it held it before."""
        held = self._instance.requests.find(delivered.request.request_id)
        if held is not None and held.tags[:1] == [delivered.tag]:
            self._request_log.held(held.request, pulled_at=held.pulled_at)

    async def _depart(self, command: do.Depart) -> None:
        try:
            at = await self._departures.publish(command)
        except Exception:  # one outcome's error must not end the agent and all other requests
            log.exception("request.stranded", request_id=command.request.request_id)
            self.put(ev.Stranded(number=command.number))
            return
        await self._deliveries.settle(command.tags, Settlement.ACK)
        self.put(ev.Departed(number=command.number))
        await self._request_log.left(command, self.runs.last(command.number), at)
        self.runs.forget(command.number)

    async def _return(self, command: do.Return) -> None:
        self.runs.forget(command.number)
        await self._deliveries.settle(command.tags, Settlement.REQUEUE)

    async def _renew(self, command: do.Renew) -> None:
        number, is_renewed = command.number, False
        try:
            is_renewed = await self._departures.renew(command)
        except MeshError as error:
            log.warning("request.not_renewed", number=number, error=str(error))
        except Exception:  # one copy's error must not end the agent and all other requests
            log.exception("request.not_renewed", number=number)
        self.put(ev.Renewed(number=number) if is_renewed else ev.Unrenewed(number=number))

    async def _call(self, command: do.Call) -> None:
        """Execute a call of the engine, and report its result after the engine's new state."""
        begun_at = self._clock.now()
        try:
            if isinstance(command, do.Release):
                await self._release(command)
                duration_s, acted = None, True
            else:
                duration_s, acted = await _execute(self._engine, command)
        except MeshError as error:
            refused = isinstance(error, _REFUSALS)
            result: ev.Event = ev.Failed(
                command=command.command, message=str(error), refused=refused
            )
        except Exception as error:  # one broken operation must not end the agent
            log.exception("lso.broken", call=type(command).__name__)
            message = f"{type(error).__name__}: {error}"
            result = ev.Failed(command=command.command, message=message)
        else:
            duration_s = self._clock.now() - begun_at if duration_s is None else duration_s
            result = ev.Done(command=command.command, duration_s=duration_s, acted=acted)
        self.look()
        self.put(result)

    def _begin_release(self, command: do.Release) -> Coroutine[Any, Any, None]:
        # Set before the task begins: a model of the name must not be added from now on.
        self._models.releasing.add(command.model)
        return self._call(command)

    async def _release(self, command: do.Release) -> None:
        """
        Release a model for which no request waits.

        Raises:
            ContractError: A request waits; the message names its queue.
            EngineError: The engine cannot release the model now.
        """
        try:
            for queue in command.queues:
                depth = await self._broker.depth(queue)
                if depth is not None and depth.ready > 0:
                    raise ContractError(f"requests for {command.model} wait in {queue}")
            await self._engine.remove(command.model)
            self._models.remove(command.model)
        finally:
            self._models.releasing.discard(command.model)

    async def _count(self, command: do.Count) -> None:
        ready = []
        try:
            for queue in command.queues:
                # A queue counts as empty if the broker does not return its depth in time; this only
                # delays the detection.
                depth = await self._broker.depth(queue)
                if depth is not None and depth.ready > 0:
                    ready.append(queue)
        except MeshError as error:
            log.warning("orphan.look_failed", error=str(error))
            ready.clear()
        self.put(ev.Counted(ready=tuple(ready)))

    async def _claim(self, command: do.Claim) -> None:
        granted = False
        try:
            await self._broker.declare_queue(topology.claim_queue(command.model))
            granted = True
        except BrokerConflictError:
            pass  # another instance has the claim
        except MeshError as error:
            log.warning("orphan.claim_failed", model=command.model, error=str(error))
        self.put(ev.Claimed(model=command.model, granted=granted))

    async def _unclaim(self, command: do.Unclaim) -> None:
        try:
            await self._broker.delete_queue(topology.claim_queue(command.model).name)
        except MeshError as error:
            # The broker deletes the claim with the connection, or when it expires.
            log.warning("orphan.claim_failed", model=command.model, error=str(error))

    async def _answer(self, command: do.Answer) -> None:
        order, result = command.order, command.result
        if order.reply_to is None:
            return
        answered = LsoAnswered(
            instance_id=command.instance_id,
            command_id=order.command_id,
            lso=_name_of(order),
            outcome=result.outcome,
            message=result.message,
            duration_s=result.duration_s,
            num_bytes=result.num_bytes,
            at=self._clock.now(),
        )
        message = OutMessage.transient(answered, correlation_id=order.command_id or None)
        await send_best_effort(self._broker, topology.REPLIES, order.reply_to, message)

    def _record(self, command: do.Record) -> Coroutine[Any, Any, None] | None:
        lso, result = command.lso, command.result
        if result is None:
            log.info("lso.started", kind=lso.kind, why=lso.reason.text, **_named(lso))
            return None
        fields = {
            "kind": lso.kind,
            "outcome": result.outcome.value,
            "message": result.message,
            "duration_s": round(result.duration_s, 4),
            "num_bytes": result.num_bytes,
            **_named(lso),
        }
        if result.outcome is LsoOutcome.FAILED:
            log.error("lso.failed", **fields)
        elif result.outcome is LsoOutcome.REFUSED:
            log.warning("lso.refused", **fields)
        else:
            log.info("lso.completed", **fields)
        return self._reporter.executed(lso, result)

    def _say(self, command: do.Say) -> None:
        write = log.error if command.is_error else log.info
        write(command.event, **dict(command.fields))

    def _wake_at(self, command: do.WakeAt) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, command.at - self._clock.now())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.put, ev.Wake())


async def _execute(engine: EngineBackend, call: do.Call) -> tuple[Seconds | None, bool]:
    """
    Execute a call.

    Returns:
        The duration if the engine has measured it, and whether there was something to do.
    """
    match call:
        case do.Start():
            await engine.start()
        case do.Load(model=model):
            return await engine.activate(model), True
        case do.LoadWarm(model=model):
            return await engine.warm(model), True
        case do.Unload(model=model):
            await engine.cool(model)
        case do.Limit(token_budget=token_budget, max_running=max_running):
            await engine.set_scheduling(
                SchedulingParameters(token_budget=token_budget, max_running=max_running)
            )
        case do.DropCaches():
            await engine.clear_caches()
        case do.PreemptNow():
            return None, await engine.preempt_now()
    return None, True


def view_of(backend: EngineBackend, pace_s: Seconds) -> ev.EngineView:
    """State of the engine, in the form in which the instance gets it."""
    engine = backend.snapshot()
    copied = engine.checkpoints
    return ev.EngineView(
        alive=backend.alive,
        model=engine.model,
        waiting=engine.waiting,
        max_running=engine.max_running,
        spare_running=engine.spare_running,
        most_run=engine.most_run,
        longest_gap_s=engine.longest_gap_s,
        kv_capacity_tokens=engine.kv_capacity_tokens,
        models=engine.models,
        warm_capacity_bytes=engine.warm_capacity_bytes,
        host_kv_bytes=engine.host_kv_bytes,
        host_kv_capacity_bytes=engine.host_kv_capacity_bytes,
        restored_bytes_per_s=copied.restored_bytes / copied.restore_s if copied.restore_s else 0.0,
        pace_s=pace_s,
    )


def _named(lso: Lso) -> dict[str, object]:
    """Subject of an LLM serving operation, for logs."""
    return {
        name: value
        for name in ("request_id", "request_ids", "model")
        if (value := getattr(lso, name, None)) is not None
    }


def _name_of(order: LsoCommand) -> str:
    """Name of an operator's order: `swap_out` of `lso.swap_out.v1`, or that which a package has."""
    return order.operation if isinstance(order, LsoRun) else tag_of(type(order)).split(".")[1]
