"""Creates, connects and runs the agent's components."""

import asyncio
import contextlib
import secrets
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import structlog

from services.agent.attached.common import Common, opened_common
from services.agent.attached.replicas import serve_replicas
from services.agent.backends.base import EngineBackend
from services.agent.backends.policies import check_added
from services.agent.backends.registry import REMOTE, MakeEngine, check_backend, create_backend
from services.agent.cancels import Cancels
from services.agent.control import CANCEL_HANDLERS, HANDLERS, Context
from services.agent.devices.locks import lock_directory, taken
from services.agent.devices.own import engine_settings, has_devices, own_devices
from services.agent.metrics import AgentMetrics
from services.agent.outbox import Outbox
from services.agent.recording import Begin, Recording
from services.agent.servable import ServableModels, servable_entries
from services.agent.settings import Settings
from services.agent.shell import Shell
from services.agent.telemetry.reporting import Reporter
from services.agent.telemetry.request_log import RequestLog
from services.agent.telemetry.stored_starts import StoredStarts
from shared.broker import topology
from shared.broker.consumer import Dispatcher
from shared.broker.declaring import claim_instance, declare_topology
from shared.broker.protocol import BindingSpec, Broker
from shared.broker.stories import PERIOD_S as GATHER_PERIOD_S
from shared.broker.stories import StoryOutbox
from shared.broker.work_queues import WorkQueues
from shared.contracts.base import InstanceId, ModelName
from shared.contracts.errors import EngineError, MeshError, SettingsError
from shared.contracts.lanes import inbox_name
from shared.contracts.models import ModelEntry
from shared.contracts.telemetry import source_name
from shared.models.registry import ModelRegistry
from shared.models.watch import RegistryWatch
from shared.runtime import extensions
from shared.runtime.cli import Ports
from shared.runtime.stall_detector import StallDetector
from shared.runtime.tasks import drained, every, pause
from solver.instance.events import Added, Connected, Draining, Removed, Stalled, Started
from solver.instance.instance import Instance
from solver.instance.state import InstanceSettings
from solver.planning.added_operations import AddedOperation

log = structlog.get_logger()
INBOX_PERIOD_S = 5.0
"""
Period of declaring the instance's inbox again.

A leader that considers the instance dead deletes the inbox. This happens after a stall or a lost
connection, after which the inbox is declared at once.
"""
WATCH_PERIOD_S = 0.5
"""Period of looking for stalls of this process and for new connections."""


def check(settings: Settings) -> None:
    """
    Check that the agent can run with the settings.

    Raises:
        SettingsError: The backend is unknown, and the message lists the known ones; or the policy
            of a package cannot be used.
    """
    check_backend(settings.engine.backend)
    policies = {"simulated": settings.engine.simulated.policy, "vllm": settings.engine.vllm.policy}
    if (policy := policies.get(settings.engine.backend)) is not None:
        check_added(policy)
    if settings.engine.backend == REMOTE and len(settings.models) != 1:
        raise SettingsError("engine.backend `remote` needs `models` with the server's one model")
    if settings.engine.backend == REMOTE and settings.devices:
        raise SettingsError("devices are of no use to engine.backend `remote`: leave them out")


async def serve(ports: Ports[Settings], stop: asyncio.Event) -> None:
    """
    Serve until *stop*, then drain: hand back the window, and finish or evict runs.

    Each server behind the address of the backend `remote` is an instance.
    """
    check(ports.settings)
    if ports.settings.engine.backend != REMOTE:
        await serve_instance(ports, stop)
        return
    # Imported only where it is used, as backends are.
    from services.agent.attached.engines import attached_engines  # noqa: PLC0415

    async with attached_engines(ports.settings) as make_engine, opened_common(ports) as common:
        serve_one = partial(serve_instance, make_engine=make_engine, common=common)
        await serve_replicas(ports, common.broker, stop, serve_one)


async def serve_instance(
    ports: Ports[Settings],
    stop: asyncio.Event,
    make_engine: MakeEngine = create_backend,
    common: Common | None = None,
) -> None:
    """
    Serve one instance until *stop*, then drain.

    The engine starts before the agent connects to the broker, so that starting it cannot block
    heartbeats.

    Args:
        ports: Settings, clock and health of the instance.
        stop: Ends the instance.
        make_engine: Creates its engine.
        common: What the instances of this process share; None: this one is alone.

    Raises:
        SettingsError: Another agent has the id of the instance.
    """
    settings = ports.settings
    registry = ModelRegistry.load(Path(settings.registry))
    models = ServableModels(servable_entries(settings, registry))
    async with AsyncExitStack() as stack:
        devices = own_devices(settings, models.entries.values())
        stack.enter_context(taken(devices, settings.instance_id, lock_directory()))
        engine = make_engine(
            settings.engine.backend,
            models.entries.values(),
            engine_settings(settings, devices),
            ports.clock,
        )
        stack.push_async_callback(engine.close)
        await engine.start()
        broker = await stack.enter_async_context(
            ports.open_broker(f"headway-agent-{settings.instance_id}")
        )
        await declare_topology(broker)
        if common is None:  # else claims of servers exclude each other
            await claim_instance(broker, settings.instance_id)
        agent = Agent(ports, broker, engine, models, registry, common=common)
        if common is not None:
            stack.enter_context(common.turns.joined(agent.instance))
        await agent.run(stop, stack)
    log.info("service.stopped", instance_id=settings.instance_id)


class Agent:
    """
    The connected components of an agent.

    Args:
        ports: Settings, clock and health.
        broker: The agent's client.
        engine: The engine, which was started.
        models: Models that the engine knows.
        registry: The registry, as loaded from its file.
        common: As in `serve_instance`.
    """

    def __init__(
        self,
        ports: Ports[Settings],
        broker: Broker,
        engine: EngineBackend,
        models: ServableModels,
        registry: ModelRegistry,
        *,
        common: Common | None = None,
    ) -> None:
        settings, clock = ports.settings, ports.clock
        self._ports, self._broker, self._engine = ports, broker, engine
        self._servable = models
        self._watch_registry = RegistryWatch(Path(settings.registry), registry, self)
        constants = instance_settings(settings, engine)
        self._instance_id, incarnation = constants.instance_id, constants.incarnation
        operations = extensions.load_all(extensions.OPERATIONS, AddedOperation)
        self.instance = instance = Instance(constants, models.facts(), clock.now(), operations)
        self._recording = None
        if settings.record is not None:
            self._recording = Recording(Path(settings.record))
            self._recording.append(Begin(constants, models.facts()), clock.now())
        self._queues = WorkQueues(broker, source_name(self._instance_id, incarnation))
        self._common = common
        own = Outbox(broker, settings.flush_period_s)
        self._outbox = own if common is None else common.outbox
        self._stored_starts = StoredStarts(broker, self._instance_id)
        self._reporter = Reporter(
            instance=instance,
            engine=engine,
            broker=broker,
            queues=self._queues,
            metrics=AgentMetrics(ports.health.metrics, instance=instance, engine=engine),
            clock=clock,
            registry=lambda: self._watch_registry.state,
        )
        self._stories = StoryOutbox(broker, self._instance_id) if settings.stories else None
        self._cancels = Cancels(broker)
        self._shell = Shell(
            instance=instance,
            engine=engine,
            models=models,
            broker=broker,
            queues=self._queues,
            outbox=self._outbox,
            stored_starts=self._stored_starts,
            reporter=self._reporter,
            request_log=RequestLog(
                settings=constants,
                reporter=self._reporter,
                tracer=ports.tracer,
                stories=self._stories,
            ),
            clock=clock,
            knows_cancels=lambda: self._cancels.known,
            turns=None if common is None else common.turns,
            recording=self._recording,
        )

    async def run(self, stop: asyncio.Event, stack: AsyncExitStack) -> None:
        """Serve until *stop*, drain, and return when the agent holds no requests."""
        settings, shell, health = self._ports.settings, self._shell, self._ports.health
        stack.push_async_callback(self._queues.close)
        stack.push_async_callback(shell.close)
        if self._recording is not None:
            stack.callback(self._recording.close)
        context = Context(
            instance_id=self._instance_id,
            kind=(self._engine.identity.engine, self._engine.identity.device),
            shell=shell,
            reporter=self._reporter,
            cancels=self._cancels,
            queues=self._queues,
            stop=stop,
        )
        await self._listen(context, stack)
        on_cancel = Dispatcher(CANCEL_HANDLERS, context).handle
        stack.push_async_callback(self._cancels.close)
        await self._cancels.start(on_cancel)
        # Before the first pull: RabbitMQ closes a connection that queries a queue while it is
        # created.
        await self._declare_inbox()
        shell.look()
        if settings.warm_models:
            health.set("warm", f"loading {', '.join(settings.warm_models)}")
        initial = None if settings.initial_model is None else ModelName(settings.initial_model)
        shell.put(Started(initial=initial, warm=tuple(map(ModelName, settings.warm_models))))
        if initial is not None:
            await self._until_active(initial)
        health.started()
        log.info("service.started", instance_id=self._instance_id, engine=settings.engine.backend)
        stopped = asyncio.Event()
        """Set after the drain; ends the loops that must run during the drain."""
        async with asyncio.TaskGroup() as tasks:
            endless = (
                tasks.create_task(shell.failure(), name="failure"),
                tasks.create_task(self._cancels.follow(on_cancel), name="cancels"),
                tasks.create_task(self._until_warm(), name="warm-models"),
            )
            for name, work in {
                "watch": self._watch(stopped),
                "gathered": every(GATHER_PERIOD_S, self._send_gathered, stop=stopped),
                "report": every(settings.status_period_s, self._report, stop=stopped),
                "inbox": every(INBOX_PERIOD_S, self._declare_inbox, stop=stopped),
                "follow-registry": self._watch_registry.follow(stop),
            }.items():
                tasks.create_task(work, name=name)
            if self._common is None:
                tasks.create_task(self._outbox.work(stopped), name="outbox")
            await stop.wait()
            log.info("service.draining", instance_id=self._instance_id)
            shell.put(Draining(drain_s=settings.drain_timeout_s))
            if await drained(shell.drained.is_set, lambda: self._broker.connected):
                await self._report()
                await self._send_gathered()
            else:
                log.warning("drain.broker_gone", instance_id=self._instance_id)
            stopped.set()
            self._outbox.stop()
            for task in endless:
                task.cancel()

    async def _until_active(self, model: ModelName) -> None:
        """
        Wait until the first model is active.

        Raises:
            EngineError: The engine cannot load the model.
        """
        activated = (await self._shell.next_prepared()).result
        if activated is not None and not activated.ok:
            raise EngineError(f"model {model!r} cannot be loaded: {activated.message}")

    async def _until_warm(self) -> None:
        """
        Report that the agent is ready once the warm models of the settings are loaded.

        A model that cannot be loaded is logged, and is loaded when it is activated.
        """
        await self._shell.next_prepared()
        self._ports.health.set("warm", None)

    async def _watch(self, stop: asyncio.Event) -> None:
        """Report stalls of this process and new connections."""
        stalls = StallDetector()
        num_lost = self.instance.totals.connections_lost
        while not await pause(stop, WATCH_PERIOD_S):
            missed_s, lost = stalls.missed_s(), self.instance.totals.connections_lost
            is_new = lost != num_lost and self._broker.connected
            if missed_s:
                self._shell.put(Stalled(missed_s=missed_s))
            if is_new:
                num_lost = lost
                self._shell.put(Connected())
            if missed_s or is_new:
                with contextlib.suppress(MeshError):
                    await self._declare_inbox()

    async def _send_gathered(self) -> None:
        """Send what is gathered for the store and for the records of finished requests."""
        await self._stored_starts.send()
        if self._stories is not None:
            await self._stories.send()

    async def _report(self) -> None:
        self._shell.look()
        await self._reporter.report()

    async def add(self, entry: ModelEntry) -> None:
        """
        Add a model of the registry, unless the settings name the models to serve, servers of
        others serve it, or it needs more devices.

        Raises:
            SettingsError: The model has no tokenizer, or this instance still serves a model of the
                name that was removed.
        """
        settings = self._ports.settings
        if settings.models or entry.takes_bodies or not has_devices(settings, entry):
            return
        self._shell.put(Added(model=await self._servable.add(entry, self._engine)))

    async def replace(self, entry: ModelEntry) -> None:
        """Serve other adapters of a model."""
        if entry.name in self._servable.entries:
            self._servable.replace(entry, self._engine)

    async def remove(self, model: ModelName) -> None:
        """Begin to release a model."""
        self._shell.put(Removed(model=model))

    async def _declare_inbox(self) -> None:
        """
        Declare the instance's inbox periodically, because a leader that considers the instance dead
        deletes it.
        """
        await topology.declare_work_queue(self._broker, inbox_name(self._instance_id))

    async def _listen(self, context: Context, stack: AsyncExitStack) -> None:
        """Consume plans, control messages and profiles, each kind on its own queue."""
        handle = Dispatcher(HANDLERS, context).handle
        client = f"{self._instance_id}.{self.instance.settings.incarnation}"
        plans, plan_binding = topology.plan_queue(self._instance_id, client)
        control = topology.private_queue(f"agent.{client}")
        profiles = topology.private_queue(f"agent.{client}.profiles", max_length=1000)
        bindings = [
            plan_binding,
            BindingSpec(exchange=topology.PROFILES, queue=profiles.name, routing_key=""),
            *(
                BindingSpec(exchange=topology.CONTROL, queue=control.name, routing_key=key)
                for key in topology.control_keys(self._instance_id)
            ),
        ]
        for queue in (plans, control, profiles):
            await self._broker.declare_queue(queue)
        for binding in bindings:
            await self._broker.bind(binding)
        for queue in (plans, control, profiles):
            subscription = await self._broker.consume(
                queue.name, handle, prefetch=64, gathers_acks=True
            )
            stack.push_async_callback(subscription.cancel)


def instance_settings(settings: Settings, engine: EngineBackend) -> InstanceSettings:
    """Constants of the instance, for an engine that was started."""
    pull, identity = settings.pull, engine.identity
    return InstanceSettings(
        instance_id=InstanceId(settings.instance_id),
        incarnation=secrets.token_hex(6),
        run_secret=secrets.token_hex(16),
        engine=identity.engine,
        device=identity.device,
        capabilities=identity.capabilities,
        layout=settings.layout,
        bounds=pull.bounds,
        best_effort_running_share=pull.best_effort_running_share,
        poll_s=pull.poll_s,
        pulls=pull.workers,
        evict_hold_s=pull.evict_hold_s,
        aging_bound_s=pull.aging_bound_s,
        swap_lease_s=settings.lso.swap_lease_s,
        transfer_bytes_per_s=settings.lso.transfer_bytes_per_s,
        drain_limit_s=settings.swap_drain_s,
        consumer_timeout_s=settings.consumer_timeout_s,
        patience_s=settings.orphan_patience_s,
    )
