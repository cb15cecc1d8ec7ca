"""Compares the digests of this instance's models with those of the gateways."""

from collections.abc import Awaitable, Callable, Mapping

import structlog

from services.agent.state import AgentState
from shared.contracts.base import ModelName, Seconds, UnixTime
from shared.contracts.control import GATEWAY_PERIOD_S, GatewayModels
from shared.runtime.clock import Clock

log = structlog.get_logger()
MEMORY_S: Seconds = 5 * GATEWAY_PERIOD_S
"""Time without a report after which a gateway counts as stopped."""


class GatewayFiles:
    """
    Takes a model out of service on this instance while its files differ from every gateway's.

    If the gateways differ among each other, the instance serves the model as long as one gateway
    has the same files; requests of the other gateways are refused.

    Args:
        state: State of the agent; this class writes `differing`.
        digests: Base model -> digest on this instance; may change.
        hand_back: Returns the requests in the window to their queues.
    """

    def __init__(
        self,
        *,
        state: AgentState,
        digests: Mapping[ModelName, str],
        hand_back: Callable[[], Awaitable[None]],
        clock: Clock,
    ) -> None:
        self._state = state
        self._digests = digests
        self._hand_back = hand_back
        self._clock = clock
        self._gateways: dict[str, tuple[UnixTime, Mapping[ModelName, str]]] = {}

    async def observe(self, reported: GatewayModels) -> None:
        """Handle a gateway's report."""
        self._gateways[reported.gateway] = (self._clock.now(), reported.digests)
        await self.compare()

    async def compare(self) -> None:
        """Update `AgentState.differing`; call also periodically, because gateways stop."""
        since, state = self._clock.now() - MEMORY_S, self._state
        self._gateways = {name: each for name, each in self._gateways.items() if each[0] >= since}
        differing = frozenset(filter(self._differs, self._digests))
        if differing == state.differing:
            return
        if added := differing - state.differing:
            log.error(
                "models.differ",
                models=sorted(added),
                advice="make the registries and model directories of gateways and agents equal",
            )
        if removed := state.differing - differing:
            log.info("models.equal", models=sorted(removed))
        state.differing = differing
        if state.model in added:
            await self._hand_back()
        state.wake()

    def _differs(self, model: ModelName) -> bool:
        theirs = {each[model] for _, each in self._gateways.values() if model in each}
        return bool(theirs) and self._digests[model] not in theirs
