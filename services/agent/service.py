"""Creates, connects and runs the agent's components."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from services.agent.admission import Admission
from services.agent.backends.base import EngineBackend
from services.agent.backends.registry import BACKENDS, create_backend
from services.agent.endings import Endings
from services.agent.gateway_files import GatewayFiles
from services.agent.handlers import HANDLERS, Context
from services.agent.lso.commands import LsoCommands
from services.agent.lso.executor import LsoExecutor
from services.agent.lso.leases import SwapLeases
from services.agent.lso.metrics import LsoMetrics
from services.agent.lso.operations import register_operations
from services.agent.lso.situation import Observer
from services.agent.metrics import AgentMetrics
from services.agent.orphans import Orphanhood
from services.agent.outbox import Outbox
from services.agent.puller import Puller
from services.agent.reporting import Reporter
from services.agent.residency import ModelResidency
from services.agent.runner import Runner
from services.agent.servable import ServableModels, servable_entries
from services.agent.settings import Settings
from services.agent.state import AgentState
from shared.broker import topology
from shared.broker.consumer import Dispatcher
from shared.broker.declaring import declare_topology
from shared.broker.protocol import BindingSpec, Broker
from shared.broker.work_queues import WorkQueues
from shared.contracts.base import InstanceId, ModelName
from shared.contracts.control import GATEWAY_PERIOD_S
from shared.contracts.errors import EngineError, SettingsError
from shared.contracts.lanes import inbox_name
from shared.contracts.models import ModelEntry
from shared.contracts.telemetry import source_name
from shared.models.additions import RegistryAdditions
from shared.models.registry import ModelRegistry
from shared.runtime.cli import Ports
from shared.runtime.tasks import every
from solver.planning.lso.operations import Activate, Rule, Warm, because
from solver.scheduling.pulling import PullOrder
from solver.scheduling.window import Window

log = structlog.get_logger()
INBOX_PERIOD_S = 1.0
"""
Period of declaring the instance's inbox again, equal to the status period.

A leader that considers the instance dead deletes the inbox. After the next status, routers send
requests to the inbox again.
"""
LEASE_CHECK_S = 0.1
PULLS_PERIOD_S = 0.2
"""Period of reporting pulls; the leader plans every 0.5 s."""


def check(settings: Settings) -> None:
    """
    Check that the agent can run with the settings.

    Raises:
        SettingsError: The backend or a model is unknown; the message lists the known ones.
    """
    if settings.engine.backend not in BACKENDS:
        known = ", ".join(sorted(BACKENDS))
        raise SettingsError(
            f"engine.backend {settings.engine.backend!r} does not exist; must be one of: {known}"
        )


async def serve(ports: Ports[Settings], stop: asyncio.Event) -> None:
    """
    Serve until *stop*, then drain: hand back the window, and finish or evict runs.

    The engine starts before the agent connects to the broker, so that starting it cannot block
    heartbeats.
    """
    settings = ports.settings
    check(settings)
    registry = ModelRegistry.load(Path(settings.registry))
    models = ServableModels(servable_entries(settings, registry))
    engine = create_backend(
        settings.engine.backend, models.entries.values(), settings.engine, ports.clock
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.close)
        await engine.start()
        broker = await stack.enter_async_context(
            ports.open_broker(f"headway-agent-{settings.instance_id}")
        )
        await declare_topology(broker)
        additions = RegistryAdditions(Path(settings.registry), registry)
        await _Agent(ports, broker, engine, models, additions).run(stop, stack)
    log.info("service.stopped", instance_id=settings.instance_id)


class _Agent:
    """The connected components of an agent."""

    def __init__(
        self,
        ports: Ports[Settings],
        broker: Broker,
        engine: EngineBackend,
        models: ServableModels,
        additions: RegistryAdditions,
    ) -> None:
        settings, clock = ports.settings, ports.clock
        self._ports, self._broker, self._engine = ports, broker, engine
        self._servable, self._additions = models, additions
        self._state = state = AgentState(
            instance_id=InstanceId(settings.instance_id),
            window=Window(aging_bound_s=settings.pull.aging_bound_s),
            order=PullOrder(poll_s=settings.pull.poll_s),
        )
        self._queues = WorkQueues(broker, source_name(state.instance_id, state.incarnation))
        self._outbox = Outbox(broker, self._queues, state.instance_id)
        observer = Observer(
            state=state,
            engine=engine,
            sizes=models.sizes,
            settings=settings.lso,
            bounds=settings.pull.bounds,
            drain_limit_s=settings.swap_drain_s,
            clock=clock,
        )
        self._reporter = Reporter(
            state=state,
            engine=engine,
            broker=broker,
            queues=self._queues,
            bounds=settings.pull.bounds,
            observer=observer,
            clock=clock,
        )
        metrics = AgentMetrics(ports.health.metrics, state=state, engine=engine)
        self._endings = Endings(
            state=state,
            outbox=self._outbox,
            clock=clock,
            engine=engine.identity.engine,
            device=engine.identity.device,
            observe=metrics.counting(self._reporter.observed),
            evict_hold_s=settings.pull.evict_hold_s,
            swap_lease_s=settings.lso.swap_lease_s,
        )
        runner = Runner(
            state=state,
            engine=engine,
            outbox=self._outbox,
            endings=self._endings,
            tokenizers=models.tokenizers,
            digests=models.digests,
            entries=models.entries,
            prefilled=self._reporter.prefilled,
            clock=clock,
        )
        self._executor = executor = LsoExecutor(LsoMetrics(ports.health.metrics))
        self._admission = Admission(
            state=state,
            engine=engine,
            runner=runner,
            executor=executor,
            observer=observer,
            settings=settings.pull,
            clock=clock,
        )
        self._puller = Puller(
            state=state,
            broker=broker,
            engine=engine,
            endings=self._endings,
            outbox=self._outbox,
            settings=settings.pull,
            clock=clock,
        )
        operations = register_operations(
            executor,
            state=state,
            engine=engine,
            endings=self._endings,
            admission=self._admission,
            puller=self._puller,
            observer=observer,
            reporter=self._reporter,
            clock=clock,
        )
        self._orphanhood = Orphanhood(
            state=state,
            broker=broker,
            servable=models.names,
            patience_s=settings.orphan_patience_s,
            clock=clock,
        )
        self._residency = ModelResidency(
            state=state,
            engine=engine,
            executor=executor,
            observer=observer,
            operations=operations,
            layout=settings.layout,
            servable=models.names,
            orphanhood=self._orphanhood,
            clock=clock,
        )
        self._gateway_files = GatewayFiles(
            state=state,
            digests=models.digests,
            hand_back=self._residency.hand_back_window,
            clock=clock,
        )
        self._leases = SwapLeases(
            state=state, executor=executor, lease_s=settings.lso.swap_lease_s, clock=clock
        )
        self._commands = LsoCommands(
            instance_id=state.instance_id,
            executor=executor,
            residency=self._residency,
            broker=broker,
            clock=clock,
        )

    async def run(self, stop: asyncio.Event, stack: AsyncExitStack) -> None:
        """Serve until *stop*, drain, and return when the agent holds no requests."""
        settings, state = self._ports.settings, self._state
        await self._listen(stop, stack)
        # Before the first pull: RabbitMQ closes a connection that queries a queue while it is
        # created.
        await self._declare_inbox()
        if settings.initial_model is not None:
            await self._load(ModelName(settings.initial_model))
        stopped = asyncio.Event()
        """Set after the drain; ends the loops that must run during the drain."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._orphanhood.watch(stop), name="orphanhood")
            tasks.create_task(self._residency.work(stop), name="residency")
            tasks.create_task(self._admission.work(stop, tasks), name="admission")
            for number in range(settings.pull.workers):
                tasks.create_task(self._puller.work(stop), name=f"pull.{number}")
            tasks.create_task(
                every(settings.flush_period_s, self._outbox.flush_all, stop=stopped), name="flush"
            )
            tasks.create_task(
                every(settings.status_period_s, self._reporter.report, stop=stopped), name="report"
            )
            tasks.create_task(
                every(PULLS_PERIOD_S, self._reporter.report_pulls, stop=stopped), name="pulls"
            )
            tasks.create_task(
                every(LEASE_CHECK_S, self._leases.check, stop=stop), name="swap_leases"
            )
            tasks.create_task(
                every(INBOX_PERIOD_S, self._declare_inbox, stop=stopped), name="inbox"
            )
            tasks.create_task(
                every(GATEWAY_PERIOD_S, self._gateway_files.compare, stop=stop),
                name="gateway-files",
            )
            tasks.create_task(self._additions.follow(stop, self._add), name="add-models")
            if settings.warm_models:
                self._ports.health.set("warm", f"loading {', '.join(settings.warm_models)}")
                tasks.create_task(self._warm(), name="warm-models")
            self._ports.health.started()
            log.info(
                "service.started", instance_id=state.instance_id, engine=settings.engine.backend
            )
            await stop.wait()
            state.draining = True
            log.info("service.draining", instance_id=state.instance_id, running=len(state.runs))
            await self._reporter.report()
            state.wake()
            await self._residency.empty(drain_s=settings.drain_timeout_s)
            await self._commands.close()
            await self._executor.close()
            await self._reporter.report()
            stopped.set()

    async def _add(self, entry: ModelEntry) -> None:
        """Add a model of the registry, unless the settings name the models to serve."""
        if not self._ports.settings.models:
            await self._servable.add(entry, self._engine)

    async def _load(self, model: ModelName) -> None:
        """
        Activate *model* at the start.

        Raises:
            EngineError: The engine cannot load the model.
        """
        initial = Activate(model=model, reason=because(Rule.INITIAL, model=model))
        (activated,) = await self._executor.run(initial)
        if not activated.ok:
            raise EngineError(f"model {model!r} cannot be loaded: {activated.message}")

    async def _warm(self) -> None:
        """
        Load the warm models of the settings while the instance serves; it is ready afterwards.

        A model that cannot be loaded is logged, and is loaded when it is activated.
        """
        for name in self._ports.settings.warm_models:
            model = ModelName(name)
            await self._executor.run(Warm(model=model, reason=because(Rule.SET_WARM, model=model)))
        self._ports.health.set("warm", None)

    async def _declare_inbox(self) -> None:
        """
        Declare the instance's inbox periodically, because a leader that considers the instance dead
        deletes it.
        """
        await topology.declare_work_queue(self._broker, inbox_name(self._state.instance_id))

    async def _listen(self, stop: asyncio.Event, stack: AsyncExitStack) -> None:
        """Consume plans, control messages and profiles, each kind on its own queue."""
        state = self._state
        context = Context(
            state=state,
            engine=self._engine,
            residency=self._residency,
            commands=self._commands,
            endings=self._endings,
            reporter=self._reporter,
            queues=self._queues,
            gateway_files=self._gateway_files,
            stop=stop,
        )
        handle = Dispatcher(HANDLERS, context).handle
        client = f"{state.instance_id}.{state.incarnation}"
        plans, plan_binding = topology.plan_queue(state.instance_id, client)
        control = topology.private_queue(f"agent.{client}")
        profiles = topology.private_queue(f"agent.{client}.profiles", max_length=1000)
        bindings = [
            plan_binding,
            BindingSpec(exchange=topology.PROFILES, queue=profiles.name, routing_key=""),
            *(
                BindingSpec(exchange=topology.CONTROL, queue=control.name, routing_key=key)
                for key in topology.control_keys(state.instance_id)
            ),
        ]
        for queue in (plans, control, profiles):
            await self._broker.declare_queue(queue)
        for binding in bindings:
            await self._broker.bind(binding)
        for queue in (plans, control, profiles):
            subscription = await self._broker.consume(queue.name, handle, prefetch=64)
            stack.push_async_callback(subscription.cancel)
