"""The leader's side of learnt work classes: other edges when worth it, and the end of old lanes."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import structlog

from services.planner.settings import LeaderSettings
from services.planner.state import LeaderState
from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage, Settlement
from shared.broker.retry import send_softly
from shared.contracts.base import ModelName, UnixTime, encode, tag_of
from shared.contracts.errors import QueueNotFoundError
from shared.contracts.lanes import LaneLayout, work_version_of
from solver.planning.lanes import ALIVE_WORK_VERSIONS, is_bygone
from solver.planning.work_classes import RefitOptions, WorkHistogram, added, refitted

log = structlog.get_logger()
EMPTY_LOOKS = 3
"""At a closed lane, a round of planning apart, before it is deleted."""
_Sender = tuple[str, str, ModelName]
"""A grouper's name and incarnation, and what it counted."""


@dataclass(slots=True)
class WorkClasses:
    """
    Learns the edges between work classes, and tells groupers.

    The layout in force is soft state: groupers report what they classify by, and a new leader
    goes on from the newest version among them.
    """

    broker: Broker
    settings: LeaderSettings
    layout: LaneLayout
    """In force."""
    _judged_at: UnixTime | None = None
    _counted: dict[_Sender, WorkHistogram] = field(default_factory=dict)
    """Totals when the edges were last looked at."""
    _sent_at: UnixTime = -math.inf

    async def work(self, state: LeaderState, now: UnixTime) -> None:
        """One round: go on from what is heard, refit if it is time, and tell."""
        self._adopt(state)
        if self._judged_at is None:
            self._begin(state, now)
        elif now - self._judged_at >= self.settings.classes_period_s and _may_change(
            state, self.layout
        ):
            self._judge(state, now)
        if self.layout.work_version and now - self._sent_at >= self.settings.refresh_period_s:
            await self._tell(now)

    def _adopt(self, state: LeaderState) -> None:
        """Take over newer edges that groupers have from another leader."""
        for observed in state.lanes.values():
            same = observed.layout == self.layout.version
            if same and observed.work_version > self.layout.work_version:
                self.layout = msgspec.structs.replace(
                    self.layout,
                    work_version=observed.work_version,
                    work_edges=observed.work_edges,
                )

    def _begin(self, state: LeaderState, now: UnixTime) -> None:
        """Count from here on."""
        self._judged_at = now
        self._counted = _counts(state)

    def _judge(self, state: LeaderState, now: UnixTime) -> None:
        """Refit to what has come since the last time; too little of it goes on being counted."""
        recent = _since(self._counted, _counts(state))
        least = self.settings.classes_least_requests
        if not any(sum(histogram.values()) >= least for histogram in recent.values()):
            return
        options = RefitOptions(least_requests=least, gain=self.settings.classes_gain)
        better = refitted(self.layout, recent, options)
        self._begin(state, now)
        if better is not None:
            self.layout = better
            self._sent_at = -math.inf
            log.info("layout.refitted", work_version=better.work_version, edges=better.work_edges)

    async def _tell(self, now: UnixTime) -> None:
        self._sent_at = now
        message = OutMessage(body=encode(self.layout), kind=tag_of(LaneLayout), persistent=False)
        await send_softly(self.broker, topology.TELEMETRY, topology.LAYOUT_KEY, message)


@dataclass(slots=True)
class LaneRetirement:
    """
    Deletes lanes of learnt edges that are no longer in force.

    Quorum queues know no conditional delete, and deleting drops what is inside. So a lane is
    unbound first, after every grouper has reported newer edges: no grouper binds a lane of edges
    that it does not classify by. Once unbound nothing comes, and what is neither ready nor held
    by anyone is nothing. A queue that does not answer its broker for a quarter of a second is
    counted as if it had neither (RabbitMQ 3.10 and later): so it has to be found empty several
    times, and to answer. The operator's own lanes stay, and resume queues do: they have no class.
    """

    broker: Broker
    retire_s: float
    deleted: set[str] = field(default_factory=set)
    """Not to be counted again, though groupers and agents still tell of them."""
    _idle_since: dict[str, UnixTime] = field(default_factory=dict)
    _empty: dict[str, int] = field(default_factory=dict)
    """Of closed lanes, how many times in a row nothing was found in them."""

    async def work(self, state: LeaderState, work_version: int, now: UnixTime) -> None:
        """One step for each lane that is to go: wait, then close, then delete."""
        used = {observed.work_version for observed in state.lanes.values()} | {work_version}
        oldest_used = min(used - {0}, default=0)
        self.deleted = {queue for queue in self.deleted if not is_bygone(queue, oldest_used)}
        for queue, ready in tuple(state.waiting.items()):
            if not (version := work_version_of(queue)):
                continue
            if ready or version >= oldest_used:
                self._idle_since.pop(queue, None)
                self._empty.pop(queue, None)
            elif now - self._idle_since.setdefault(queue, now) >= self.retire_s:
                await self._retire(state, queue)

    async def _retire(self, state: LeaderState, queue: str) -> None:
        if queue not in self._empty:
            await topology.close_work_queue(self.broker, queue)
            self._empty[queue] = 0
            return
        self._empty[queue] = self._empty[queue] + 1 if await self._is_empty(queue) else 0
        if self._empty[queue] < EMPTY_LOOKS:
            return
        await self.broker.delete_queue(queue)
        self.deleted.add(queue)
        del self._empty[queue], self._idle_since[queue]
        state.waiting.pop(queue, None)
        state.known_queues.discard(queue)
        log.info("lane.deleted", queue=queue)

    async def _is_empty(self, queue: str) -> bool:
        """Whether nothing is there, ready or held by anyone; asked of the queue itself."""
        depth = await self.broker.depth(queue)
        if depth is None:
            return True
        if depth.ready or depth.consumers:
            return False
        with suppress(QueueNotFoundError):  # another leader has deleted it
            if (delivery := await self.broker.get(queue)) is not None:
                await delivery.settle(Settlement.REQUEUE)
                return False
        return True


def _may_change(state: LeaderState, layout: LaneLayout) -> bool:
    """Whether the oldest learnt lanes are gone that one more version would put out of sight."""
    learnt = (version for queue in state.waiting if (version := work_version_of(queue)))
    oldest = min(learnt, default=layout.work_version)
    return layout.work_version + 1 - oldest < ALIVE_WORK_VERSIONS


def _counts(state: LeaderState) -> dict[_Sender, WorkHistogram]:
    return {
        (*sender, total.model): dict(total.bins)
        for sender, observed in state.lanes.items()
        for total in observed.work
    }


def _since(
    before: Mapping[_Sender, WorkHistogram], now: Mapping[_Sender, WorkHistogram]
) -> dict[ModelName, WorkHistogram]:
    """By model, what was counted in between."""
    recent: dict[ModelName, list[WorkHistogram]] = {}
    for sender, histogram in now.items():
        known = before.get(sender, {})
        recent.setdefault(sender[-1], []).append(
            {number: count - known.get(number, 0) for number, count in histogram.items()}
        )
    return {model: added(histograms) for model, histograms in recent.items()}
