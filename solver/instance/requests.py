"""All requests that an instance holds, with the room that they take."""

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shared.contracts.base import RequestId, RunId, Seconds, UnixTime
from shared.contracts.qos import QosClass
from solver.instance.events import Tag
from solver.instance.request import Ending, Held, Lease, Phase, Run
from solver.instance.room import Room
from solver.scheduling.engine.entry import Rank
from solver.scheduling.window import Window

_SLACK = 64
"""Number of ends below which those of requests that have left are not removed."""


@dataclass(slots=True)
class HeldEnds:
    """Ends of held requests, in their order; those of requests that have left are skipped."""

    _heap: list[tuple[UnixTime, int, Held]] = field(default_factory=list)
    _limit: int = _SLACK
    """Number of ends from which those of requests that have left are removed."""

    @property
    def next_at(self) -> UnixTime:
        """Time at which a request may have reached its end; infinite without ends."""
        return self._heap[0][0] if self._heap else math.inf

    def schedule(self, held: Held) -> None:
        """Note the end of a request that was pulled or replaced by a newer copy."""
        at = held.end.at
        if at == math.inf:
            return
        if len(self._heap) >= self._limit:
            self._heap = [entry for entry in self._heap if not entry[2].has_left]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + _SLACK
        heapq.heappush(self._heap, (at, held.number, held))

    def due(self, now: UnixTime) -> Iterator[Held]:
        """Remove and yield the requests that are past their ends; the others get their new ends."""
        while self.next_at <= now:
            held = heapq.heappop(self._heap)[2]
            if held.has_left:
                continue
            if held.end.at > now:
                self.schedule(held)
            else:
                yield held


class Requests:
    """
    Requests of an instance by id, by run and by phase; every change of a phase goes through here.

    Args:
        window: Order of the waiting requests.
        room: Sums that follow each change.
    """

    def __init__(self, window: Window, room: Room) -> None:
        self.window = window
        self.room = room
        self.ends = HeldEnds()
        self._by_id: dict[RequestId, Held] = {}
        self._by_run: dict[RunId, Held] = {}
        self._leases: dict[RequestId, Held] = {}
        self._leaving: dict[int, Held] = {}
        self._not_begun: dict[RunId, Held] = {}
        self.lengths: Mapping[RunId, int] = {}
        """Run -> number of tokens of its answer when the engine was last looked at."""
        self.num_suspects = 0
        """Number of runs whose requests are suspected of crashing engines."""

    def __iter__(self) -> Iterator[Held]:
        """All requests that do not leave."""
        return iter(tuple(self._by_id.values()))

    @property
    def runs(self) -> tuple[Held, ...]:
        """Requests on the engine, in the order of their submission."""
        return tuple(self._by_run.values())

    @property
    def not_begun(self) -> tuple[Held, ...]:
        """Requests on the engine without a token of their runs, in the order of submission."""
        return tuple(self._not_begun.values())

    @property
    def num_runs(self) -> int:
        return len(self._by_run)

    @property
    def swapped_out(self) -> tuple[Held, ...]:
        """Requests with a lease, in their rest and in the window."""
        return tuple(self._leases.values())

    @property
    def num_swapped_out(self) -> int:
        return len(self._leases)

    @property
    def num_waiting(self) -> int:
        """Number of requests that are not on the engine and do not leave."""
        return len(self._by_id) - len(self._by_run)

    def first_interactive(self) -> Held | None:
        """The regular interactive request of the window with the nearest deadline."""
        waiting = (self._by_id[request.request_id] for request in self.window)
        interactive = [
            held
            for held in waiting
            if held.rank is Rank.REGULAR and held.request.slo.qos_class is QosClass.INTERACTIVE
        ]
        return min(interactive, key=lambda held: held.request.deadline_at, default=None)

    @property
    def num_held(self) -> int:
        """Number of requests that do not leave."""
        return len(self._by_id)

    @property
    def leaving(self) -> tuple[Held, ...]:
        return tuple(self._leaving.values())

    @property
    def is_empty(self) -> bool:
        return not self._by_id and not self._leaving

    def find(self, request_id: RequestId) -> Held | None:
        """The request with this id, unless it leaves."""
        return self._by_id.get(request_id)

    def generated(self, held: Held) -> int:
        """Number of tokens of the answer so far, as far as known; progress included."""
        if held.run is None:
            return held.generated
        return max(held.generated, self.lengths.get(held.run.run_id, 0))

    def of_run(self, run_id: RunId) -> Held | None:
        """The request that this run executes."""
        return self._by_run.get(run_id)

    def head(self, now: UnixTime, *, unimportant_delay_s: Seconds) -> Held | None:
        """The request of the window that runs next; see `Window.peek`."""
        request = self.window.peek(now, unimportant_delay_s=unimportant_delay_s)
        return None if request is None else self._by_id[request.request_id]

    def head_of(self, rank: Rank, *, unimportant_delay_s: Seconds) -> Held | None:
        """The first request of one rank in the window; see `Window.peek_rank`."""
        request = self.window.peek_rank(rank, unimportant_delay_s=unimportant_delay_s)
        return None if request is None else self._by_id[request.request_id]

    def hold(self, held: Held) -> None:
        """Add a pulled request to the window."""
        self._by_id[held.request_id] = held
        self.window.add(held.request, held.rank)
        self.room.update(held)
        self.ends.schedule(held)

    def replace(self, held: Held, newer: Held) -> None:
        """Replace a waiting request by a newer copy with all deliveries of both."""
        self.window.remove(held.request_id)
        self.room.drop(held)
        held.request, held.tags = newer.request, held.tags + newer.tags
        held.generated, held.first_token_at = newer.generated, newer.first_token_at
        self.window.add(held.request, held.rank)
        self.room.update(held)
        self.ends.schedule(held)

    def submit(self, held: Held, run: Run) -> None:
        """Move a request from the window or its rest to the engine."""
        self.window.remove(held.request_id)
        self._leases.pop(held.request_id, None)
        held.submit(run)
        self._by_run[run.run_id] = self._not_begun[run.run_id] = held
        self.num_suspects += held.is_suspect
        self.room.update(held)

    def begin(self, held: Held) -> None:
        """Record the first token of a run."""
        if held.run is not None:
            held.run.begun = True
            self._not_begun.pop(held.run.run_id, None)
        self.room.update(held)

    def prefilled(self, held: Held) -> None:
        """Count the prompt of a run as computed, although no token has come."""
        if held.run is not None:
            held.run.prefilled = True
        self.room.update(held)

    def reserve(self, held: Held, room_tokens: int) -> None:
        """Change the KV that is reserved for a run."""
        if held.run is not None:
            held.run.room_tokens = room_tokens
        self.room.update(held)

    def abort(self, held: Held, ending: Ending, *, why: str = "", rest_s: Seconds = 0.0) -> None:
        """End a run early."""
        held.abort(ending, why=why, rest_s=rest_s)
        self.room.update(held)

    def swap_out(self, held: Held, lease: Lease, now: UnixTime) -> None:
        """Keep the request of a run that has ended."""
        self._forget_run(held)
        held.swap_out(lease, now)
        self._leases[held.request_id] = held
        self.room.changed(held)
        if held.phase is Phase.WAITING:
            self.window.add(held.request, held.rank)

    def wake(self, held: Held) -> None:
        """Return a resting request to the window."""
        held.wake()
        self.window.add(held.request, held.rank)
        self.room.update(held)

    def leave(self, held: Held) -> None:
        """Move a request to the leaving ones; its id is free for another copy."""
        if self._by_id.get(held.request_id) is held:
            # Otherwise another copy of the request is held, and this one was just pulled.
            del self._by_id[held.request_id]
            self._leases.pop(held.request_id, None)
            self.window.remove(held.request_id)
            self._forget_run(held)
        held.leave()
        self.room.update(held)
        self._leaving[held.number] = held

    def leaving_of(self, number: int) -> Held | None:
        """The leaving request with this number."""
        return self._leaving.get(number)

    def settled(self, number: int) -> Held | None:
        """Remove a leaving request, whose deliveries are settled."""
        held = self._leaving.pop(number, None)
        if held is not None:
            held.settled()
        return held

    def void(self, connection: int) -> None:
        """Drop the deliveries of a lost connection; the broker delivers them again."""
        for held in (*self._by_id.values(), *self._leaving.values()):
            held.tags = [tag for tag in held.tags if tag.connection != connection]

    def uses(self, queue: str) -> bool:
        """Return whether a request has an unsettled delivery from *queue*."""
        return any(
            tag.queue == queue
            for held in (*self._by_id.values(), *self._leaving.values())
            for tag in held.tags
        )

    def renew(self, held: Held, tag: Tag) -> tuple[Tag, ...]:
        """Replace the deliveries of a request by the one of its copy; return the earlier ones."""
        earlier = tuple(held.tags)
        held.tags = [tag]
        return earlier

    def join(self, held: Held, tags: list[Tag]) -> None:
        """Add deliveries of the same message to a request."""
        held.tags += tags

    def _forget_run(self, held: Held) -> None:
        if held.run is not None and self._by_run.pop(held.run.run_id, None) is not None:
            self._not_begun.pop(held.run.run_id, None)
            self.num_suspects -= held.is_suspect
