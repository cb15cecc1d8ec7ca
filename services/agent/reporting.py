"""Status and telemetry of the agent, published without confirmation: losses are harmless."""

from services.agent.backends.base import Capability, EngineBackend
from services.agent.holding import may_pull, pull_state
from services.agent.lso.situation import Observer
from services.agent.state import AgentState
from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.broker.retry import send_best_effort
from shared.broker.work_queues import WorkQueues
from shared.contracts.base import Message, encode, tag_of
from shared.contracts.routing import Prefill, PrefillsObserved
from shared.contracts.telemetry import (
    InstanceStatus,
    IterationsObserved,
    LanesPulled,
    ModelActivated,
    RequestObserved,
    source_name,
)
from shared.runtime.clock import Clock
from solver.planning.lso.facts import facts_of
from solver.prediction.latency.service_time import tokens_s
from solver.scheduling.pull_room import PullBounds

MAX_ITERATIONS = 200


class Reporter:
    """
    Publishes the agent's status and events.

    Args:
        queues: The work queues of this process.
        bounds: Bounds of pulled work from the settings.
        observer: Provides the situation of the instance, from which operations are selected.
    """

    def __init__(
        self,
        *,
        state: AgentState,
        engine: EngineBackend,
        broker: Broker,
        queues: WorkQueues,
        bounds: PullBounds,
        observer: Observer,
        clock: Clock,
    ) -> None:
        self._state = state
        self._bounds = bounds
        self._observer = observer
        self._engine = engine
        self._broker = broker
        self._queues = queues
        self._clock = clock
        self._seq = 0
        self._pulled: dict[str, int] = {}
        """Queue -> number of pulls that were reported."""

    def status(self) -> InstanceStatus:
        """Current status of the agent."""
        self._seq += 1
        state, snapshot = self._state, self._engine.snapshot()
        identity = self._engine.identity
        running_tokens = sum(
            run.tokens_needed - run.request.prompt_tokens - run.answer.num_tokens
            for run in state.runs.values()
        )
        backlog_tokens = state.window.tokens + running_tokens
        return InstanceStatus(
            instance_id=state.instance_id,
            incarnation=state.incarnation,
            seq=self._seq,
            at=self._clock.now(),
            engine=identity.engine,
            device=identity.device,
            model=state.model,
            activating=state.activating,
            models=tuple(each for each in snapshot.models if each.model not in state.differing),
            differing=tuple(sorted(state.differing)),
            plan_epoch=state.plan.epoch if state.plan else 0,
            running=len(state.runs),
            waiting=state.num_waiting,
            max_running=snapshot.max_running,
            backlog_tokens=backlog_tokens,
            backlog_s=tokens_s(backlog_tokens, state.profile),
            kv_utilization=snapshot.kv_utilization,
            kv_capacity_tokens=snapshot.kv_capacity_tokens,
            draining=state.draining,
            takes_in=may_pull(state) and self._engine.alive,
            totals=state.totals.frozen(),
            pulled_by_lane=dict(state.totals.by_lane),
            put=dict(self._queues.put),
            released=tuple(name for name in self._queues.released if not state.uses(name)),
            pulled_to=dict(state.totals.pulled_to),
            capabilities=tuple(sorted(capability.value for capability in identity.capabilities)),
            swapped_out=len(state.swapped_out),
            host_kv_bytes=snapshot.host_kv_bytes,
            host_kv_capacity_bytes=snapshot.host_kv_capacity_bytes,
            prefill_backlog_tokens=sum(each.prompt_tokens for each in state.not_begun()),
            pull=pull_state(state, snapshot, self._bounds),
            lso=facts_of(self._observer.situation()),
        )

    async def report(self) -> None:
        """
        Publish the status of the agent, and the engine's iterations if the backend has reported
        any.
        """
        await self._send(topology.status_key(self._state.instance_id), self.status())
        iterations = self._engine.drain_iterations()
        if iterations:
            durations_s = [iteration.duration_s for iteration in iterations]
            self._state.pace_s = sum(durations_s) / len(durations_s)
        if (
            iterations
            and self._state.model is not None
            and Capability.TELEMETRY in self._engine.identity.capabilities
        ):
            sampled = iterations[:: -(-len(iterations) // MAX_ITERATIONS)]
            await self._send(
                topology.OBSERVED_ENGINE_KEY,
                IterationsObserved(
                    instance_id=self._state.instance_id,
                    model=self._state.model,
                    engine=self._engine.identity.engine,
                    device=self._engine.identity.device,
                    at=self._clock.now(),
                    iterations=tuple(each.timed() for each in sampled),
                    prefill_pairs=tuple(int(each.prefill_pairs) for each in sampled),
                ),
            )

    async def report_pulls(self) -> None:
        """Publish recent pulls, so that the leader plans no work that this agent already holds."""
        totals = self._state.totals.by_lane
        recent = {queue: num for queue, num in totals.items() if num != self._pulled.get(queue)}
        if recent:
            self._pulled.update(recent)
            source = source_name(self._state.instance_id, self._state.incarnation)
            message = LanesPulled(source=source, pulled=recent)
            await self._send(topology.LANES_PULLED_KEY, message)

    async def prefilled(self, prefill: Prefill) -> None:
        """Publish to routers that a request has its first token."""
        state = self._state
        if state.model is not None:
            await self._send(
                topology.PREFILLS_KEY,
                PrefillsObserved(
                    instance_id=state.instance_id,
                    incarnation=state.incarnation,
                    model=state.model,
                    at=self._clock.now(),
                    prefills=(prefill,),
                ),
            )

    async def observed(self, observation: RequestObserved) -> None:
        """Publish the observation of a finished request."""
        await self._send(topology.OBSERVED_REQUEST_KEY, observation)

    async def activated(self, event: ModelActivated) -> None:
        """Publish a model swap and the new status of the agent."""
        await self._send(topology.OBSERVED_ENGINE_KEY, event)
        await self._send(topology.status_key(self._state.instance_id), self.status())

    async def _send(self, key: str, message: Message) -> None:
        await send_best_effort(
            self._broker,
            topology.TELEMETRY,
            key,
            OutMessage(body=encode(message), kind=tag_of(type(message)), persistent=False),
        )
