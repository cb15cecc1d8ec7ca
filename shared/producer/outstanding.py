"""Requests of one producer that are in progress; passes replies to their generations without IO."""

from dataclasses import dataclass

from cachetools import LRUCache

from shared.contracts.base import RequestId
from shared.contracts.control import StopReason
from shared.contracts.requests import Reply, RunStarted, TokensEmitted
from shared.producer.assembly import RequestAssembly
from shared.producer.effects import Diverged, Effect, Finished, NewTokens, SendStop
from shared.producer.generation import Generation

FINISHED_MEMORY = 65_536
StopOrder = tuple[RequestId, SendStop]


@dataclass(frozen=True, slots=True)
class _Entry:
    assembly: RequestAssembly
    generation: Generation


class Outstanding:
    """
    Passes replies to their requests, and drops a request when it ends.

    Args:
        silence_s: See `RequestAssembly`.
    """

    def __init__(self, *, silence_s: float) -> None:
        self._silence_s = silence_s
        self._entries: dict[RequestId, _Entry] = {}
        self._failing: set[RequestId] = set()
        """Requests with a held-back failure, on which `tick` decides."""
        self._finished: LRUCache[RequestId, StopReason] = LRUCache(FINISHED_MEMORY)
        """Id of a recently ended request -> reason with which its late runs are stopped."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        return tuple(self._entries)

    def add(self, generation: Generation, *, streaming: bool) -> None:
        """Register the request of a generation, so that its replies are processed."""
        request_id = generation.request_id
        assembly = RequestAssembly(request_id, streaming=streaming, silence_s=self._silence_s)
        self._entries[request_id] = _Entry(assembly, generation)

    def forget(self, request_id: RequestId) -> None:
        """Drop a request that has not reached the mesh."""
        self._entries.pop(request_id, None)

    def observe(self, reply: Reply, now: float) -> list[StopOrder]:
        """
        Process one reply.

        Returns:
            Runs to stop; none for a reply about an unknown request.
        """
        if isinstance(reply, TokensEmitted):
            orders: list[StopOrder] = []
            for chunk in reply.chunks:
                if entry := self._entries.get(chunk.request_id):
                    orders += self._apply(entry, entry.assembly.observe_chunk(chunk, now))
            return orders
        if entry := self._entries.get(reply.request_id):
            return self._apply(entry, entry.assembly.observe(reply, now))
        return self._late(reply)

    def cancel(self, request_id: RequestId, now: float) -> bool:
        """End a request for its consumer; return whether it was in progress."""
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        self._apply(entry, entry.assembly.cancel(now))
        return True

    def tick(self, now: float) -> None:
        """Evaluate held-back failures again; called about once a second."""
        for request_id in tuple(self._failing):
            if entry := self._entries.get(request_id):
                self._apply(entry, entry.assembly.tick(now))

    def _late(self, reply: Reply) -> list[StopOrder]:
        """Stop a run that starts after the end of its request; ignore unknown requests."""
        if not isinstance(reply, RunStarted):
            return []
        reason = self._finished.get(reply.request_id)
        if reason is None:
            return []
        stop = SendStop(run_id=reply.run_id, instance_id=reply.instance_id, reason=reason)
        return [(reply.request_id, stop)]

    def _apply(self, entry: _Entry, effects: list[Effect]) -> list[StopOrder]:
        request_id = entry.assembly.request_id
        orders: list[StopOrder] = []
        for effect in effects:
            match effect:
                case NewTokens():
                    entry.generation.append(effect)
                case Diverged():
                    entry.generation.diverge()
                case SendStop():
                    orders.append((request_id, effect))
                case Finished():
                    self._finish(entry, effect)
        if entry.assembly.holds_failure:
            self._failing.add(request_id)
        return orders

    def _finish(self, entry: _Entry, finished: Finished) -> None:
        request_id = entry.assembly.request_id
        del self._entries[request_id]
        self._failing.discard(request_id)
        self._finished[request_id] = entry.assembly.finished or StopReason.COMPLETED
        entry.generation.finish(finished.final)
