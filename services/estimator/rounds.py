"""What an estimator does again and again: it publishes profiles, trees and alarms."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import structlog

from services.estimator.alarms import raise_alarms
from services.estimator.profiles import ProfileStore
from services.estimator.state import EstimatorState, Learner
from services.estimator.trees.active_trees import publish_trees
from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.broker.retry import send_best_effort
from shared.runtime.clock import Clock

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """
    Actions that are repeated, each with a period of its own.

    Args:
        state: What the estimator has learnt.
        store: Files of profiles.
    """

    broker: Broker
    clock: Clock
    state: EstimatorState
    store: ProfileStore

    async def publish_changed(self) -> None:
        """Store and publish the profiles that have changed since they were published."""
        await self._publish([each for each in self.state.learners.values() if each.changed])

    async def publish_all(self) -> None:
        """Store and publish all profiles."""
        await self._publish(tuple(self.state.learners.values()))

    async def raise_alarms(self) -> None:
        """Publish alarms about slow instances."""
        await raise_alarms(self.broker, self.state.watch, self.clock.now())

    async def reload_trees(self) -> None:
        """Load new trees, and publish them."""
        # Run this in a thread: the first trees import modules for half a second.
        found = await asyncio.to_thread(self.state.trees.look)
        for artefact in found:
            log.info("trees.loaded", model=artefact.model, version=artefact.version)
        await publish_trees(self.broker, found)

    async def publish_trees(self) -> None:
        """Publish all trees that are used."""
        await publish_trees(self.broker, self.state.trees.in_force)

    async def _publish(self, learners: Iterable[Learner]) -> None:
        trees = self.state.trees
        for learner in learners:
            profile = msgspec.structs.replace(
                learner.profile(self.clock.now()), prefill_trees=trees.in_force_for(learner.key)
            )
            self.store.save(profile)
            message = OutMessage.transient(profile)
            await send_best_effort(self.broker, topology.PROFILES, "", message)
