"""The in-process broker's server side: exchanges, queues and routing."""

from typing import Protocol

import structlog

from shared.broker.arguments import check_queue
from shared.broker.memory_message import StoredMessage, dead_letter
from shared.broker.memory_queue import MemoryQueue
from shared.broker.protocol import (
    BindingSpec,
    ExchangeSpec,
    ExchangeType,
    OutMessage,
    PublishOutcome,
    QueueSpec,
)
from shared.contracts.errors import (
    BrokerConflictError,
    BrokerUnavailableError,
    QueueNotFoundError,
)

log = structlog.get_logger()


class HubClient(Protocol):
    """What the server knows of a client."""

    def lose_connection(self) -> None: ...
    def reconnect(self) -> None: ...


class MemoryHub:
    """
    What all `MemoryBroker` clients of one process share. Belongs to one event loop.

    Differs from RabbitMQ: `expires_s` is ignored; bounds are exact, where quorum queues
    overshoot; a dead letter that its queue refuses is dropped with a log line.
    """

    def __init__(self) -> None:
        self._exchanges: dict[str, ExchangeSpec] = {}
        self._queues: dict[str, MemoryQueue] = {}
        self._bindings: dict[str, dict[BindingSpec, None]] = {}
        self._clients: list[HubClient] = []
        self._running = True

    def stop(self) -> None:
        """Go away, as a broker that restarts: connections end, transient messages are lost."""
        self._running = False
        for client in self._clients:
            client.lose_connection()
        for queue in self._queues.values():
            queue.forget_transient()

    def start(self) -> None:
        """Come back; clients reconnect."""
        self._running = True
        for client in self._clients:
            client.reconnect()

    @property
    def running(self) -> bool:
        return self._running

    def enter(self, client: HubClient) -> None:
        """
        A client connects.

        Raises:
            BrokerUnavailableError: Stopped.
        """
        if not self._running:
            raise BrokerUnavailableError("the in-process broker is stopped")
        self._clients.append(client)

    def leave(self, client: HubClient) -> None:
        if client in self._clients:
            self._clients.remove(client)

    def declare_exchange(self, spec: ExchangeSpec) -> None:
        if self._exchanges.setdefault(spec.name, spec) != spec:
            raise BrokerConflictError(f"exchange {spec.name!r} exists with other properties")

    def declare_queue(self, spec: QueueSpec, client: HubClient) -> None:
        check_queue(spec)
        existing = self._queues.get(spec.name)
        if existing is None:
            owner = client if spec.exclusive else None
            self._queues[spec.name] = MemoryQueue(spec, owner=owner, on_dead=self._bury)
            return
        self._check_owner(existing, client)
        if existing.spec != spec:
            raise BrokerConflictError(f"queue {spec.name!r} exists with other properties")

    def find(self, name: str, client: HubClient) -> MemoryQueue | None:
        """
        The queue, if there is one.

        Raises:
            BrokerConflictError: It is exclusive to another client.
        """
        queue = self._queues.get(name)
        if queue is not None:
            self._check_owner(queue, client)
        return queue

    def bind(self, spec: BindingSpec, client: HubClient) -> None:
        if spec.exchange not in self._exchanges:
            raise QueueNotFoundError(f"no exchange {spec.exchange!r}")
        if self.find(spec.queue, client) is None:
            raise QueueNotFoundError(f"no queue {spec.queue!r}")
        self._bindings.setdefault(spec.exchange, {})[spec] = None

    def unbind(self, spec: BindingSpec) -> None:
        self._bindings.get(spec.exchange, {}).pop(spec, None)

    def delete_queue(self, name: str) -> None:
        """Its messages and bindings go with it."""
        queue = self._queues.pop(name, None)
        if queue is not None:
            queue.purge()
        for bindings in self._bindings.values():
            for spec in [spec for spec in bindings if spec.queue == name]:
                del bindings[spec]

    def publish(self, exchange: str, routing_key: str, message: OutMessage) -> PublishOutcome:
        """
        Route to every queue bound, once each.

        Raises:
            BrokerConflictError: No such exchange.
        """
        if exchange and exchange not in self._exchanges:
            raise BrokerConflictError(f"no exchange {exchange!r}")
        queues = self._route(exchange, routing_key)
        if not queues:
            return PublishOutcome.UNROUTABLE
        accepted = True
        for queue in queues:
            stored = StoredMessage(
                seq=queue.next_seq(),
                exchange=exchange,
                routing_key=routing_key,
                message=message,
                headers=dict(message.headers),
            )
            # As on RabbitMQ, the other queues keep the message when one refuses it.
            accepted = queue.offer(stored) and accepted
        return PublishOutcome.CONFIRMED if accepted else PublishOutcome.REFUSED

    def _route(self, exchange: str, routing_key: str) -> list[MemoryQueue]:
        if not exchange:
            return [self._queues[routing_key]] if routing_key in self._queues else []
        seen: set[str] = set()
        at: str | None = exchange
        # Alternates may form a ring.
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

    def _bury(self, queue: MemoryQueue, stored: StoredMessage, reason: str) -> None:
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
    """Whether a topic binding takes *routing_key*: `*` is one word, `#` any number of them."""
    return _words_match(pattern.split("."), routing_key.split(".") if routing_key else [])


def _words_match(pattern: list[str], words: list[str]) -> bool:
    if not pattern:
        return not words
    head, *rest = pattern
    if head == "#":
        return any(_words_match(rest, words[n:]) for n in range(len(words) + 1))
    return bool(words) and head in ("*", words[0]) and _words_match(rest, words[1:])
