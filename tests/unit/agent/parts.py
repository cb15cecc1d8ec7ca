"""Components of an agent over a broker, with a scripted engine unless a test passes another."""

import asyncio

from prometheus_client import CollectorRegistry

from services.agent.admission import Admission
from services.agent.backends.base import EngineBackend
from services.agent.endings import Endings
from services.agent.gateway_files import GatewayFiles
from services.agent.handlers import HANDLERS, Context
from services.agent.lso.commands import LsoCommands
from services.agent.lso.executor import LsoExecutor
from services.agent.lso.leases import SwapLeases
from services.agent.lso.metrics import LsoMetrics
from services.agent.lso.operations import register_operations
from services.agent.lso.situation import ModelSizes, Observer
from services.agent.orphans import Orphanhood
from services.agent.outbox import Outbox
from services.agent.puller import Puller
from services.agent.reporting import Reporter
from services.agent.residency import ModelResidency
from services.agent.runner import Runner
from services.agent.settings import LsoSettings, PullSettings
from services.agent.state import AgentState
from shared.broker.consumer import Dispatcher
from shared.broker.work_queues import WorkQueues
from shared.contracts.base import InstanceId, ModelName
from shared.contracts.lanes import LaneLayout
from shared.contracts.telemetry import source_name
from shared.models.registry import ModelRegistry
from shared.models.tokenizer import Tokenizer
from shared.runtime.clock import Clock
from solver.scheduling.pulling import PullOrder
from solver.scheduling.window import Window
from tests.clocks import FakeClock
from tests.deliveries import UnreliableBroker
from tests.queued import MODEL, OTHER
from tests.unit.agent.scripted_engine import ScriptedEngine

EVICT_HOLD_S = 2.0
PATIENCE_S = 10.0
LEASE_S = 30.0
DIGEST = "0123456789abcdef"
"""Digest of each model's files at the agent."""


class AgentParts:
    """
    The connected components of one agent; its loops do not run.

    Args:
        broker: The agent's client.
        registry: Models that the agent may serve.
        tokenizers: Tokenizers of these models.
        engine: Engine of the agent; by default a scripted engine.
        pull: Settings of pulls.
        lso: Settings of operations.
        sizes: Model sizes; by default those of the model files.
        swap_drain_s: Longest drain before a swap.
        evict_hold_s: Time for which the resume queue of an evicted request is not pulled from.
        clock: Clock of the agent; by default a constant clock.
        instance_id: Id of the instance, needed if there are several agents.
    """

    def __init__(
        self,
        *,
        broker: UnreliableBroker,
        registry: ModelRegistry,
        tokenizers: dict[ModelName, Tokenizer],
        engine: EngineBackend | None = None,
        pull: PullSettings | None = None,
        lso: LsoSettings | None = None,
        sizes: ModelSizes | None = None,
        swap_drain_s: float = 0.0,
        evict_hold_s: float = EVICT_HOLD_S,
        clock: Clock | None = None,
        instance_id: str = "i1",
    ) -> None:
        entries = {name: registry.entry(name) for name in registry.bases}
        lso = lso or LsoSettings(swap_lease_s=LEASE_S)
        self.broker = broker
        self.tokenizers = tokenizers
        self.engine = engine if isinstance(engine, ScriptedEngine) else ScriptedEngine()
        backend: EngineBackend = engine or self.engine
        self.clock = FakeClock()
        clock = clock or self.clock
        self.pull = pull or PullSettings()
        self.state = AgentState(
            instance_id=InstanceId(instance_id),
            window=Window(aging_bound_s=self.pull.aging_bound_s),
            order=PullOrder(poll_s=self.pull.poll_s),
            model=MODEL,
        )
        source = source_name(self.state.instance_id, self.state.incarnation)
        self.queues = WorkQueues(broker, source)
        self.outbox = Outbox(broker, self.queues, self.state.instance_id)
        self.observer = Observer(
            state=self.state,
            engine=backend,
            sizes=sizes or ModelSizes.of(entries[name] for name in (MODEL, OTHER)),
            settings=lso,
            bounds=self.pull.bounds,
            drain_limit_s=swap_drain_s,
            clock=clock,
        )
        self.reporter = Reporter(
            state=self.state,
            engine=backend,
            broker=broker,
            queues=self.queues,
            bounds=self.pull.bounds,
            observer=self.observer,
            clock=clock,
        )
        self.endings = Endings(
            state=self.state,
            outbox=self.outbox,
            clock=clock,
            engine="scripted",
            device="paper",
            observe=self.reporter.observed,
            evict_hold_s=evict_hold_s,
            swap_lease_s=lso.swap_lease_s,
        )
        self.digests = dict.fromkeys((MODEL, OTHER), DIGEST)
        self.runner = Runner(
            state=self.state,
            engine=backend,
            outbox=self.outbox,
            endings=self.endings,
            tokenizers=tokenizers,
            digests=self.digests,
            entries=entries,
            prefilled=self.reporter.prefilled,
            clock=clock,
        )
        self.metrics = CollectorRegistry()
        self.executor = LsoExecutor(LsoMetrics(self.metrics))
        self.admission = Admission(
            state=self.state,
            engine=backend,
            runner=self.runner,
            executor=self.executor,
            observer=self.observer,
            settings=self.pull,
            clock=clock,
        )
        self.puller = Puller(
            state=self.state,
            broker=broker,
            engine=backend,
            endings=self.endings,
            outbox=self.outbox,
            settings=self.pull,
            clock=clock,
        )
        operations = register_operations(
            self.executor,
            state=self.state,
            engine=backend,
            endings=self.endings,
            admission=self.admission,
            puller=self.puller,
            observer=self.observer,
            reporter=self.reporter,
            clock=clock,
        )
        self.stall_clock = FakeClock()
        self.orphanhood = Orphanhood(
            state=self.state,
            broker=broker,
            servable=(MODEL, OTHER),
            patience_s=PATIENCE_S,
            clock=clock,
            stall_clock=self.stall_clock.now,
        )
        self.residency = ModelResidency(
            state=self.state,
            engine=backend,
            executor=self.executor,
            observer=self.observer,
            operations=operations,
            layout=LaneLayout(),
            servable=(MODEL, OTHER),
            orphanhood=self.orphanhood,
            clock=clock,
        )
        self.leases = SwapLeases(
            state=self.state, executor=self.executor, lease_s=lso.swap_lease_s, clock=clock
        )
        self.commands = LsoCommands(
            instance_id=self.state.instance_id,
            executor=self.executor,
            residency=self.residency,
            broker=broker,
            clock=clock,
        )
        self.gateway_files = GatewayFiles(
            state=self.state,
            digests=self.digests,
            hand_back=self.residency.hand_back_window,
            clock=clock,
        )
        self.stop = asyncio.Event()
        self.handler = Dispatcher(
            HANDLERS,
            Context(
                state=self.state,
                engine=backend,
                residency=self.residency,
                commands=self.commands,
                endings=self.endings,
                reporter=self.reporter,
                queues=self.queues,
                gateway_files=self.gateway_files,
                stop=self.stop,
            ),
        )
