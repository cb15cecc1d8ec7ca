"""Routed mode (QUARTZ): a router sends each request to the inbox of one instance."""

import asyncio
from zlib import crc32

import msgspec
import structlog

from services.planner.routed.model_router import ModelRouter
from services.planner.routed.routed_model import Held, RoutedModel
from services.planner.settings import RoutingSettings
from services.planner.state import identity
from shared.api.calls import prompt_of
from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.broker.retry import send_best_effort
from shared.contracts.base import (
    InstanceId,
    Message,
    ModelName,
    RequestId,
    Seconds,
    UnixTime,
    encode,
)
from shared.contracts.errors import ContractError, SchemaMismatchError
from shared.contracts.estimates import Profile
from shared.contracts.qos import QosClass
from shared.contracts.requests import QueuedRequest
from shared.contracts.routing import PrefillsObserved, PrefillTrees, RouterState
from shared.contracts.telemetry import InstanceStatus, RequestObserved
from shared.runtime.clock import Clock
from shared.runtime.stall_detector import StallDetector
from solver.prediction.prefill.latency_prefills import LatencyPrefills
from solver.prediction.prefill.quantile_trees import decode
from solver.routing.device_prefills import LEVELS
from solver.routing.options import VARIANTS, Prediction
from solver.routing.prefix_hashes import prefix_hashes

log = structlog.get_logger()
PULL = "pull"
"""Policy without routing: instances pull all requests from lanes."""
ROUTING_POLICIES = (
    PULL,
    *(name for name, each in VARIANTS.items() if each.prediction is not Prediction.ORACLE),
)
LEAST_ITERATIONS = 200
"""Minimum number of iterations in a latency model before the model predicts prefills."""
ROUTER_TIMEOUT_S = 5.0
"""Time without messages from a router after which its sent requests no longer count as work."""
SHARE_ALL_EVERY = 30
"""Number of sharing rounds between two publications of all residuals, which new routers need."""


class Routing:
    """
    The routers of one grouper, one for each model, and the state that they share.

    A request waits here until its router sends it to an instance. A request goes to its lane if no
    instance serves its model, if it has waited for `max_wait_s`, or if `max_waiting` requests
    already wait.

    Args:
        settings: Routing policy, which must not be `pull`, and bounds.
        sender: Name of this grouper's run.
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
        self._attention = StallDetector()
        self._rounds = 0
        self._closed = False
        self.num_routed = 0
        self.num_left_to_lanes = 0
        """
        Requests within the scope of routing that went to lanes because no instance served their
        model or too many requests were waiting.
        """

    @property
    def routers(self) -> list[ModelRouter]:
        """Routers of all models that at least one instance serves."""
        return [each.router for each in self._models.values()]

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait in this grouper to be sent."""
        return sum(len(each.held) for each in self._models.values())

    def stamped(self, request: QueuedRequest) -> QueuedRequest:
        """
        Copy of *request* with the prefix hashes by which its prefix is found in engines' caches;
        the inputs of a pooling model have no common prefix.
        """
        if request.pools or not self._takes(request):
            return request
        if request.call is None:
            prefix = prefix_hashes(request.prompt, request.messages)
        else:
            prefix = prefix_hashes(prompt_of(request.call), None)
        return msgspec.structs.replace(request, prefix=prefix)

    async def place(self, request: QueuedRequest) -> InstanceId | None:
        """
        Wait until the request can be sent; return the chosen instance, or None if the request goes
        to its lane.

        Raises:
            TransientError: The delivery was lost with its connection; the broker redelivers the
                request.
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
        """Handle the status of an instance."""
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
        """Handle an instance's report of first tokens."""
        model = self._models.get(observed.model)
        if model is not None:
            now = self._clock.now()
            for prefill in observed.prefills:
                model.router.on_prefill(observed.instance_id, prefill, now)
            model.dispatch(now)

    def on_ended(self, observed: RequestObserved) -> None:
        """Handle the end of a request in the request's router."""
        model = self._models.get(observed.model)
        if model is not None:
            key = RequestId(identity(observed.tenant, observed.request_id))
            model.router.router.finish(key, self._clock.now())

    def on_state(self, state: RouterState) -> None:
        """Handle the shared state of another grouper's router."""
        model = self._models.get(state.model)
        if model is not None and state.sender != self._sender:
            now = self._clock.now()
            model.heard[state.sender] = now
            model.router.adopt(state, now)

    def on_profile(self, profile: Profile) -> None:
        """
        Use the first latency model with enough samples to predict prefills; the trees replace it
        when they arrive.
        """
        model = self._models.get(profile.model)
        key = (profile.engine, profile.device)
        restored = profile.num_iterations == 0
        if model is None or profile.latency is None:
            return
        if model.router.prefills.version(key).startswith("prior") and (
            restored or profile.num_iterations >= LEAST_ITERATIONS
        ):
            # The version is a digest of the coefficients. Routers that started at other times use
            # other latency models, whose residuals do not apply here.
            content = crc32(encode(profile.latency))
            model.router.prefills.use(
                key, LatencyPrefills(profile.latency, LEVELS), f"latency {content:08x} {key}"
            )

    def on_trees(self, message: PrefillTrees) -> None:
        """Start to use quantile trees from the estimator, unless their schema is unknown."""
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
        """
        Send requests that are due, remove silent instances, and release overdue requests to lanes.
        """
        now = self._clock.now()
        if missed_s := self._attention.missed_s():
            self._extend_timeouts(missed_s)
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
        """
        Publish to other groupers immediately which requests this grouper has sent and which have
        ended.
        """
        now = self._clock.now()
        # Copied, since models may be added during an await.
        for model in list(self._models.values()):
            for sender in [s for s, at in model.heard.items() if at < now - ROUTER_TIMEOUT_S]:
                del model.heard[sender]
                model.router.forget(sender)
            if model.heard and (state := model.router.shared_work(now)) is not None:
                await self._send(topology.ROUTER_KEY, state)

    async def share(self) -> None:
        """Publish the state of routers to other groupers, and samples to the estimator."""
        now = self._clock.now()
        self._rounds += 1
        for model in list(self._models.values()):
            if self._rounds % SHARE_ALL_EVERY == 0:
                model.last_residual.clear()
            state = model.router.shared_state(now, model.last_residual)
            for each in state.calibrations:
                if each.residuals:
                    model.last_residual[each.model_version] = each.residuals[-1].number
            await self._send(topology.ROUTER_KEY, state)
            for sampled in model.router.take_samples(now):
                await self._send(topology.OBSERVED_SAMPLES_KEY, sampled)

    def on_connection_lost(self) -> None:
        """
        Drop waiting requests, which the broker redelivers to any grouper.

        Sent requests are dropped also, since this grouper may have missed their first tokens.
        """
        now = self._clock.now()
        for model in self._models.values():
            model.void(now)

    def close(self) -> None:
        """Release all waiting requests to their lanes."""
        self._closed = True
        for model in self._models.values():
            model.close()

    def _extend_timeouts(self, missed_s: Seconds) -> None:
        """
        Extend the timeouts of peers by *missed_s*, a time in which this process could not receive.
        """
        for instance_id, (served, heard_at) in self._seen.items():
            self._seen[instance_id] = (served, heard_at + missed_s)
        for model in self._models.values():
            for sender in model.heard:
                model.heard[sender] += missed_s

    def _takes(self, request: QueuedRequest) -> bool:
        in_scope = self._settings.scope == "all" or _is_interactive(request)
        return in_scope and not request.attempts.relegated

    def _is_full_for(self, request: QueuedRequest) -> bool:
        """
        True if the number of waiting requests from the same global queue has reached its limit.

        With the limit, waiting requests cannot use up the prefetch of the global queue.
        """
        interactive = _is_interactive(request)
        waiting = [
            held.request
            for model in self._models.values()
            for held in model.held.values()
            if _is_interactive(held.request) is interactive
        ]
        settings = self._settings
        return len(waiting) >= (settings.max_waiting if interactive else settings.max_waiting_rest)

    async def _send(self, key: str, message: Message) -> None:
        out = OutMessage.transient(message)
        await send_best_effort(self._broker, topology.TELEMETRY, key, out)


def _is_interactive(request: QueuedRequest) -> bool:
    return request.slo.qos_class is QosClass.INTERACTIVE
