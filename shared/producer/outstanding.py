"""Requests of one producer that are in progress; passes replies to their generations without IO."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from shared.contracts.base import RequestId, UnixTime
from shared.contracts.control import StopReason
from shared.contracts.errors import ContractError
from shared.contracts.requests import (
    Final,
    Reply,
    RequestCompleted,
    RequestFailed,
    RunStarted,
    TokensEmitted,
)
from shared.producer.assembly import CANCELLED, RequestAssembly
from shared.producer.effects import Diverged, Effect, Finished, NewTokens, SendStop
from shared.producer.generation import Generation

FINISHED_MEMORY = 65_536
ID_CONFLICT = "id_conflict"
StopOrder = tuple[RequestId, SendStop]
T = TypeVar("T")


class _Recent(OrderedDict[RequestId, T]):
    """Facts about the requests that ended last, at most `FINISHED_MEMORY`."""

    def __setitem__(self, request_id: RequestId, fact: T) -> None:
        super().__setitem__(request_id, fact)
        if len(self) > FINISHED_MEMORY:
            self.popitem(last=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was asked under an id that may be asked again."""

    tenant: str | None
    digest: str


@dataclass(slots=True)
class _Entry:
    assembly: RequestAssembly
    generation: Generation | None
    """Access of the first caller, which gets the answer as it comes; None after it has left."""
    asked: Asked | None = None
    """None if the id may not be asked again while the request is in progress."""
    joined: list[Generation] = field(default_factory=list)
    """Access of later callers, which get the whole answer with the final."""

    def callers(self) -> Iterator[Generation]:
        """All callers that wait for the request."""
        if self.generation is not None:
            yield self.generation
        yield from self.joined


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
        self._finished: _Recent[StopReason] = _Recent()
        """Id of a recently ended request -> reason with which its late runs are stopped."""
        self._left: _Recent[Asked] = _Recent()
        """
        Id of a request that continues without callers -> what was asked. Its final may still come,
        and must not answer another request under the same id.
        """

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        return tuple(self._entries)

    def add(self, generation: Generation, *, streaming: bool, asked: Asked | None = None) -> None:
        """Register the request of a generation, so that its replies are processed."""
        request_id = generation.request_id
        assembly = RequestAssembly(request_id, streaming=streaming, silence_s=self._silence_s)
        self._entries[request_id] = _Entry(assembly, generation, asked)
        self._left.pop(request_id, None)

    def join(self, generation: Generation, asked: Asked) -> bool:
        """
        Let a generation wait for a request in progress.

        Returns:
            False if no request with this id is in progress.

        Raises:
            ContractError: The request in progress with this id is another one.
        """
        request_id = generation.request_id
        entry = self._entries.get(request_id)
        known = self._left.get(request_id) if entry is None else entry.asked
        if known != asked and (entry is not None or known is not None):
            raise ContractError(
                f"another request with the id {request_id} is in progress",
                code=ID_CONFLICT,
                param="id",
                status=409,
            )
        if entry is not None:
            entry.joined.append(generation)
        return entry is not None

    def leave(self, generation: Generation, now: UnixTime) -> None:
        """End a request for one of its callers; it continues in the mesh."""
        entry = self._entries.get(generation.request_id)
        if entry is None:
            return
        if entry.generation is generation:
            entry.generation = None
        elif generation in entry.joined:
            entry.joined.remove(generation)
        else:
            return
        generation.finish(_cancelled(generation.request_id, now))
        if next(entry.callers(), None) is None:
            self._drop(entry)

    def forget(self, request_id: RequestId) -> None:
        """Drop a request that has not reached the mesh."""
        self._entries.pop(request_id, None)
        self._left.pop(request_id, None)

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
        """
        End a request for its callers.

        Returns:
            True if it was in progress and is also to be cancelled in the mesh; a request whose id
            may be asked again continues.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        if entry.asked is None:
            self._apply(entry, entry.assembly.cancel(now))
            return True
        for generation in tuple(entry.callers()):
            self.leave(generation, now)
        return False

    def tick(self, now: float) -> None:
        """Evaluate held-back failures again; called about once a second."""
        for request_id in tuple(self._failing):
            if entry := self._entries.get(request_id):
                self._apply(entry, entry.assembly.tick(now))

    def _late(self, reply: Reply) -> list[StopOrder]:
        """Stop a run that starts after the end of its request; ignore unknown requests."""
        if isinstance(reply, RequestCompleted | RequestFailed):
            self._left.pop(reply.request_id, None)
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
                case NewTokens() if entry.generation is not None:
                    entry.generation.append(effect)
                case Diverged() if entry.generation is not None:
                    entry.generation.diverge()
                case SendStop():
                    orders.append((request_id, effect))
                case Finished():
                    self._finish(entry, effect)
        if entry.assembly.holds_failure:
            self._failing.add(request_id)
        return orders

    def _finish(self, entry: _Entry, finished: Finished) -> None:
        request_id, final = entry.assembly.request_id, finished.final
        self._entries.pop(request_id)
        self._failing.discard(request_id)
        if entry.asked is None or isinstance(final, RequestCompleted):
            # A failure may be about another message with the same id, whose request continues.
            self._finished[request_id] = entry.assembly.finished or StopReason.COMPLETED
        if entry.generation is not None:
            entry.generation.finish(final)
        for generation in entry.joined:
            for part in _whole(final):
                generation.append(part)
            generation.finish(final)

    def _drop(self, entry: _Entry) -> None:
        """Drop a request that continues without callers."""
        request_id = entry.assembly.request_id
        del self._entries[request_id]
        self._failing.discard(request_id)
        if entry.asked is not None:
            self._left[request_id] = entry.asked


def _cancelled(request_id: RequestId, now: UnixTime) -> RequestFailed:
    return RequestFailed(request_id=request_id, error=CANCELLED, at=now)


def _whole(final: Final) -> list[NewTokens]:
    """The answers of a final, each as one part."""
    assembly = RequestAssembly(final.request_id, streaming=False)
    effects = assembly.observe(final, 0.0)
    return [effect for effect in effects if isinstance(effect, NewTokens)]
