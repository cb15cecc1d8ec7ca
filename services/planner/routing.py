"""Routed mode: requests go to the inbox of an instance that a router chose (QUARTZ)."""

import asyncio
from zlib import crc32

import msgspec
import structlog

from services.planner.model_router import ModelRouter
from services.planner.routed_model import Held, RoutedModel
from services.planner.settings import RoutingSettings
from services.planner.state import identity
from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.broker.retry import send_softly
from shared.contracts.base import (
    InstanceId,
    Message,
    ModelName,
    RequestId,
    Seconds,
    UnixTime,
    encode,
    tag_of,
)
from shared.contracts.errors import ContractError, SchemaMismatchError
from shared.contracts.estimates import Profile
from shared.contracts.qos import QosClass
from shared.contracts.requests import QueuedRequest
from shared.contracts.routing import PrefillsObserved, PrefillTrees, RouterState
from shared.contracts.telemetry import InstanceStatus, RequestObserved
from shared.runtime.attention import Attention
from shared.runtime.clock import Clock
from solver.prediction.latency_prefills import LatencyPrefills
from solver.prediction.quantile_trees import decode
from solver.routing.device_prefills import LEVELS
from solver.routing.options import VARIANTS, Prediction
from solver.routing.prefix_hashes import prefix_hashes

log = structlog.get_logger()
PULL = "pull"
"""No routing: instances pull from lanes."""
ROUTING_POLICIES = (
    PULL,
    *(name for name, each in VARIANTS.items() if each.prediction is not Prediction.ORACLE),
)
LEAST_ITERATIONS = 200
"""That a latency model has to rest on before prefills are told by it."""
ROUTER_TIMEOUT_S = 5.0
"""What a router had sent that has been silent for so long counts no longer."""
TELL_ALL_EVERY = 30
"""Rounds of sharing after which all residuals are told again, for routers that have just come."""


class Routing:
    """
    The routers of one grouper, one for each model, and what they are told.

    A request waits here until its router sends it, no longer than an instance is there for it and
    than `max_wait_s`, and no more than `max_waiting` at once; otherwise it goes to its lane, from
    which instances pull.

    Args:
        broker: The grouper's connection.
        settings: Policy and bounds; its policy is not `pull`.
        clock: Wall time.
        sender: This grouper's run.
    """

    def __init__(
        self, *, broker: Broker, settings: RoutingSettings, clock: Clock, sender: str
    ) -> None:
        self._broker = broker
        self._settings = settings
        self._options = VARIANTS[settings.policy]
        self._clock = clock
        self._sender = sender
        self._models: dict[ModelName, RoutedModel] = {}
        self._seen: dict[InstanceId, tuple[ModelName | None, UnixTime]] = {}
        self._attention = Attention()
        self._rounds = 0
        self._closed = False
        self.num_routed = 0
        self.num_left_to_lanes = 0
        """For want of an instance or of room here, though they were to be routed."""

    @property
    def routers(self) -> list[ModelRouter]:
        """Of the models that are served somewhere."""
        return [each.router for each in self._models.values()]

    @property
    def num_waiting(self) -> int:
        """Requests that wait here for their turn."""
        return sum(len(each.held) for each in self._models.values())

    def stamped(self, request: QueuedRequest) -> QueuedRequest:
        """*request* with the hashes that engines' caches are looked up by."""
        if not self._takes(request):
            return request
        prefix = prefix_hashes(request.prompt, request.messages)
        return msgspec.structs.replace(request, prefix=prefix)

    async def place(self, request: QueuedRequest) -> InstanceId | None:
        """
        Wait for the request's turn at the instance that suits it; None: to its lane.

        Raises:
            TransientError: Its delivery is void; it will be delivered again.
        """
        model = self._models.get(request.model.base)
        if not self._takes(request) or self._closed:
            return None
        if model is None or not model.router.router.instances or self._is_full_for(request):
            self.num_left_to_lanes += 1
            return None
        key = RequestId(identity(request.tenant, request.request_id))
        now = self._clock.now()
        held = Held(request, now, asyncio.get_running_loop().create_future())
        model.held[key] = held
        try:
            model.router.submit(key, request, now)
            model.dispatch(now)
            placed = await held.placed
        finally:
            model.withdraw(key, self._clock.now())
        self.num_routed += placed is not None
        self.num_left_to_lanes += placed is None
        return placed

    def on_status(self, status: InstanceStatus) -> None:
        """An instance tells how it is."""
        now = self._clock.now()
        served = status.model if status.takes_in and not status.draining else None
        before, _ = self._seen.get(status.instance_id, (None, now))
        self._seen[status.instance_id] = (served, now)
        if before is not None and before != served:
            self._models[before].lose(status.instance_id, now)
            self._models[before].router.forget_cache(status.instance_id)
        if served is not None:
            if served not in self._models:
                self._models[served] = RoutedModel(ModelRouter(served, self._options, self._sender))
            self._models[served].router.on_status(status, now)
            self._models[served].dispatch(now)

    def on_prefills(self, observed: PrefillsObserved) -> None:
        """First tokens of an instance."""
        model = self._models.get(observed.model)
        if model is not None:
            now = self._clock.now()
            for prefill in observed.prefills:
                model.router.on_prefill(observed.instance_id, prefill, now)
            model.dispatch(now)

    def on_ended(self, observed: RequestObserved) -> None:
        """A request ended somewhere."""
        model = self._models.get(observed.model)
        if model is not None:
            key = RequestId(identity(observed.tenant, observed.request_id))
            model.router.router.finish(key, self._clock.now())

    def on_state(self, state: RouterState) -> None:
        """Another grouper's router tells what it knows."""
        model = self._models.get(state.model)
        if model is not None and state.sender != self._sender:
            now = self._clock.now()
            model.heard[state.sender] = now
            model.router.adopt(state, now)

    def on_profile(self, profile: Profile) -> None:
        """The first latency model with enough behind it stands in for trees until there are any."""
        model = self._models.get(profile.model)
        key = (profile.engine, profile.device)
        restored = profile.num_iterations == 0
        if model is None or profile.latency is None:
            return
        if model.router.prefills.version(key).startswith("prior") and (
            restored or profile.num_iterations >= LEAST_ITERATIONS
        ):
            # By content: routers that began at other times have adopted other models, whose
            # residuals are none of this one's.
            content = crc32(encode(profile.latency))
            model.router.prefills.use(
                key, LatencyPrefills(profile.latency, LEVELS), f"latency {content:08x} {key}"
            )

    def on_trees(self, message: PrefillTrees) -> None:
        """Trees of the estimator; others than those that this router understands are refused."""
        model = self._models.get(message.model)
        if model is None:
            return
        key = (message.engine, message.device)
        if message.version <= model.trees.get(key, -1):
            return
        version = f"trees v{message.version} {key}"
        try:
            model.router.prefills.use(key, decode(bytes(message.trees)), version)
        except (SchemaMismatchError, ContractError, ValueError) as error:
            log.warning(
                "trees.refused", model=message.model, version=message.version, error=str(error)
            )
        else:
            model.trees[key] = message.version
            log.info("trees.adopted", model=message.model, version=message.version)

    async def dispatch(self) -> None:
        """Send what is due by time alone; give up silent instances, and waiting for too long."""
        now = self._clock.now()
        if missed_s := self._attention.missed_s():
            self._excuse(missed_s)
        silent_since = now - self._settings.instance_timeout_s
        for instance_id, (served, heard_at) in list(self._seen.items()):
            if heard_at < silent_since:
                del self._seen[instance_id]
                if served is not None:
                    self._models[served].lose(instance_id, now)
        for model in self._models.values():
            if model.held:
                model.dispatch(now)
                model.give_up(now - self._settings.max_wait_s, now)

    async def share_work(self) -> None:
        """Tell other groupers at once what was sent and what has ended, if there are any."""
        now = self._clock.now()
        # Models may come while this waits for the broker.
        for model in list(self._models.values()):
            for sender in [s for s, at in model.heard.items() if at < now - ROUTER_TIMEOUT_S]:
                del model.heard[sender]
                model.router.forget(sender)
            if model.heard and (state := model.router.tell_work(now)) is not None:
                await self._tell(topology.ROUTER_KEY, state)

    async def share(self) -> None:
        """Tell other groupers what is known here, and the estimator what was seen."""
        now = self._clock.now()
        self._rounds += 1
        for model in list(self._models.values()):
            if self._rounds % TELL_ALL_EVERY == 0:
                model.told.clear()
            state = model.router.tell(now, model.told)
            for each in state.calibrations:
                if each.residuals:
                    model.told[each.model_version] = each.residuals[-1].number
            await self._tell(topology.ROUTER_KEY, state)
            for sampled in model.router.take_samples(now):
                await self._tell(topology.OBSERVED_SAMPLES_KEY, sampled)

    def on_connection_lost(self) -> None:
        """What waits is delivered again, maybe to others; first tokens go unheard meanwhile."""
        now = self._clock.now()
        for model in self._models.values():
            model.void(now)

    def close(self) -> None:
        """What waits goes to lanes."""
        self._closed = True
        for model in self._models.values():
            model.close()

    def _excuse(self, missed_s: Seconds) -> None:
        """Nobody was heard for so long, since nobody listened here."""
        for instance_id, (served, heard_at) in self._seen.items():
            self._seen[instance_id] = (served, heard_at + missed_s)
        for model in self._models.values():
            for sender in model.heard:
                model.heard[sender] += missed_s

    def _takes(self, request: QueuedRequest) -> bool:
        in_scope = self._settings.scope == "all" or _is_interactive(request)
        return in_scope and not request.attempts.relegated

    def _is_full_for(self, request: QueuedRequest) -> bool:
        """Each global queue has a prefetch of its own, which may not all wait here."""
        interactive = _is_interactive(request)
        waiting = [
            held.request
            for model in self._models.values()
            for held in model.held.values()
            if _is_interactive(held.request) is interactive
        ]
        settings = self._settings
        return len(waiting) >= (settings.max_waiting if interactive else settings.max_waiting_rest)

    async def _tell(self, key: str, message: Message) -> None:
        out = OutMessage(body=encode(message), kind=tag_of(type(message)), persistent=False)
        await send_softly(self._broker, topology.TELEMETRY, key, out)


def _is_interactive(request: QueuedRequest) -> bool:
    return request.slo.qos_class is QosClass.INTERACTIVE
