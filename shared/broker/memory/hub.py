"""Server of the in-process broker: exchanges, queues and routing."""

from typing import Protocol

import structlog

from shared.broker.arguments import check_queue
from shared.broker.memory.message import StoredMessage, dead_letter
from shared.broker.memory.queue import MemoryQueue
from shared.broker.memory.stream import MemoryStream
from shared.broker.memory.subscription import MemorySession
from shared.broker.protocol import (
    BindingSpec,
    ExchangeSpec,
    ExchangeType,
    OutMessage,
    PublishOutcome,
    QueueSpec,
    QueueType,
)
from shared.contracts.errors import (
    BrokerConflictError,
    BrokerUnavailableError,
    QueueNotFoundError,
)
from shared.runtime.clock import Clock, SystemClock

log = structlog.get_logger()


class HubClient(Protocol):
    """Methods of a client that the server calls."""

    def lose_connection(self) -> None: ...
    def reconnect(self) -> None: ...
    def declared(self, queue: str) -> None: ...


class MemoryHub:
    """
    Server that all `MemoryBroker` clients of one process share; used in one event loop only.

    Differs from RabbitMQ: `expires_s` and lifetimes of single messages are ignored; length limits
    are exact, while quorum queues and streams can exceed them; a dead letter that the target
    queue refuses is dropped and logged.

    Args:
        clock: Time by which messages of queues with `message_ttl_s` get old.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._exchanges: dict[str, ExchangeSpec] = {}
        self._queues: dict[str, MemoryQueue] = {}
        self._bindings: dict[str, dict[BindingSpec, None]] = {}
        self._clients: list[HubClient] = []
        self.running = True

    def stop(self) -> None:
        """
        Stop the in-process broker as in a broker restart: connections end, and transient messages
        are lost.
        """
        self.running = False
        for client in self._clients:
            client.lose_connection()
        for queue in self._queues.values():
            queue.forget_transient()

    def start(self) -> None:
        """Start the in-process broker again after `stop`; clients reconnect."""
        self.running = True
        for client in self._clients:
            client.reconnect()

    def enter(self, client: HubClient) -> None:
        """
        Connect a client to the in-process broker.

        Raises:
            BrokerUnavailableError: The broker is stopped.
        """
        if not self.running:
            raise BrokerUnavailableError("the in-process broker is stopped")
        self._clients.append(client)

    def leave(self, client: HubClient) -> None:
        """Disconnect a client, which will not reconnect."""
        if client in self._clients:
            self._clients.remove(client)

    def end(
        self, session: MemorySession, client: HubClient
    ) -> tuple[list[QueueSpec], list[BindingSpec]]:
        """
        End a session: requeue its unsettled deliveries and delete the client's exclusive queues.

        Returns:
            The deleted queues and their bindings.
        """
        session.open = False
        for queue in self._queues.values():
            queue.take_back(session)
        owned = [queue.spec for queue in self._queues.values() if queue.owner is client]
        bindings = [spec for each in owned for spec in self._bindings_of(each.name)]
        for spec in owned:
            self.delete_queue(spec.name)
        return owned, bindings

    def declare_exchange(self, spec: ExchangeSpec) -> None:
        if self._exchanges.setdefault(spec.name, spec) != spec:
            raise BrokerConflictError(f"exchange {spec.name!r} exists with other properties")

    def has_exchange(self, name: str) -> bool:
        return name in self._exchanges

    def declare_queue(self, spec: QueueSpec, client: HubClient) -> None:
        check_queue(spec)
        existing = self._queues.get(spec.name)
        if existing is None:
            owner = client if spec.exclusive else None
            make = MemoryStream if spec.type is QueueType.STREAM else MemoryQueue
            self._queues[spec.name] = make(
                spec, owner=owner, on_dead=self._dead_letter, clock=self._clock
            )
            for each in self._clients:
                each.declared(spec.name)
            return
        self._check_owner(existing, client)
        if existing.spec != spec:
            raise BrokerConflictError(f"queue {spec.name!r} exists with other properties")

    def find(self, name: str, client: HubClient) -> MemoryQueue | None:
        """
        Return the queue; None if it does not exist.

        Raises:
            BrokerConflictError: The queue is exclusive to another client.
        """
        queue = self._queues.get(name)
        if queue is not None:
            self._check_owner(queue, client)
        return queue

    def existing(self, name: str, client: HubClient) -> MemoryQueue:
        """
        Return the queue.

        Raises:
            QueueNotFoundError: The queue does not exist.
            BrokerConflictError: The queue is exclusive to another client.
        """
        queue = self.find(name, client)
        if queue is None:
            raise QueueNotFoundError(f"queue {name!r} does not exist")
        return queue

    def bind(self, spec: BindingSpec, client: HubClient) -> None:
        if spec.exchange not in self._exchanges:
            raise QueueNotFoundError(f"exchange {spec.exchange!r} does not exist")
        self.existing(spec.queue, client)
        self._bindings.setdefault(spec.exchange, {})[spec] = None

    def unbind(self, spec: BindingSpec) -> None:
        self._bindings.get(spec.exchange, {}).pop(spec, None)

    def delete_queue(self, name: str) -> None:
        """Delete a queue with its messages and bindings."""
        queue = self._queues.pop(name, None)
        if queue is not None:
            queue.close()
        for spec in self._bindings_of(name):
            self.unbind(spec)

    def _bindings_of(self, queue: str) -> list[BindingSpec]:
        return [spec for each in self._bindings.values() for spec in each if spec.queue == queue]

    def publish(self, exchange: str, routing_key: str, message: OutMessage) -> PublishOutcome:
        """
        Route a message to every queue with a matching binding, once per queue.

        Raises:
            BrokerConflictError: The exchange does not exist.
        """
        if exchange and exchange not in self._exchanges:
            raise BrokerConflictError(f"exchange {exchange!r} does not exist")
        queues = self._route(exchange, routing_key)
        if not queues:
            return PublishOutcome.UNROUTABLE
        accepted = True
        for queue in queues:
            # As on RabbitMQ, the other queues keep the message when one refuses it.
            accepted = queue.offer(exchange, routing_key, message) and accepted
        return PublishOutcome.CONFIRMED if accepted else PublishOutcome.REFUSED

    def _route(self, exchange: str, routing_key: str) -> list[MemoryQueue]:
        if not exchange:
            return [self._queues[routing_key]] if routing_key in self._queues else []
        seen: set[str] = set()
        at: str | None = exchange
        # Alternate exchanges may form a cycle.
        while at is not None and at not in seen and at in self._exchanges:
            seen.add(at)
            spec = self._exchanges[at]
            names = {
                binding.queue: None
                for binding in self._bindings.get(at, {})
                if _matches(spec.type, binding.routing_key, routing_key)
            }
            if names:
                return [self._queues[name] for name in names]
            at = spec.alternate
        return []

    def _dead_letter(self, queue: MemoryQueue, stored: StoredMessage, reason: str) -> None:
        spec = queue.spec
        exchange = spec.dead_letter_exchange
        if exchange is None or (exchange and exchange not in self._exchanges):
            return
        key = spec.dead_letter_routing_key
        outcome = self.publish(
            exchange,
            stored.routing_key if key is None else key,
            dead_letter(stored, queue=spec.name, reason=reason),
        )
        if outcome is not PublishOutcome.CONFIRMED:
            log.warning("dead_letter.dropped", queue=spec.name, outcome=outcome.value)

    @staticmethod
    def _check_owner(queue: MemoryQueue, client: HubClient) -> None:
        if queue.owner is not None and queue.owner is not client:
            raise BrokerConflictError(f"queue {queue.spec.name!r} is exclusive to another client")


def _matches(kind: ExchangeType, pattern: str, routing_key: str) -> bool:
    if kind is ExchangeType.FANOUT:
        return True
    if kind is ExchangeType.DIRECT:
        return pattern == routing_key
    return topic_matches(pattern, routing_key)


def topic_matches(pattern: str, routing_key: str) -> bool:
    """True if a topic pattern matches *routing_key*; `*` is one word, `#` any number of words."""
    return _words_match(pattern.split("."), routing_key.split(".") if routing_key else [])


def _words_match(pattern: list[str], words: list[str]) -> bool:
    if not pattern:
        return not words
    head, *rest = pattern
    if head == "#":
        return any(_words_match(rest, words[n:]) for n in range(len(words) + 1))
    return bool(words) and head in ("*", words[0]) and _words_match(rest, words[1:])
