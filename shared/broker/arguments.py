"""Specs as RabbitMQ declares them; also what makes a spec impossible."""

from shared.broker.protocol import ExchangeSpec, QueueSpec, QueueType

Argument = str | int


def queue_arguments(spec: QueueSpec) -> dict[str, Argument]:
    """
    `x-` arguments of *spec*, the same whether a client or a definitions file declares it.

    Raises:
        ValueError: RabbitMQ has no such queue.
    """
    check_queue(spec)
    arguments: dict[str, Argument] = {"x-queue-type": spec.type.value}
    if spec.delivery_limit is not None:
        arguments["x-delivery-limit"] = spec.delivery_limit
    if spec.dead_letter_exchange is not None:
        arguments["x-dead-letter-exchange"] = spec.dead_letter_exchange
    if spec.dead_letter_routing_key is not None:
        arguments["x-dead-letter-routing-key"] = spec.dead_letter_routing_key
    if spec.max_length is not None:
        arguments["x-max-length"] = spec.max_length
    if spec.max_length_bytes is not None:
        arguments["x-max-length-bytes"] = spec.max_length_bytes
    bounded = spec.max_length is not None or spec.max_length_bytes is not None
    at_least_once = (
        spec.type is QueueType.QUORUM
        and spec.dead_letter_exchange is not None
        and not spec.drop_head
    )
    if at_least_once:
        # Loses no dead letter when the broker stops half-way; RabbitMQ insists on
        # reject-publish beside it, even on a queue without a bound.
        arguments["x-dead-letter-strategy"] = "at-least-once"
    if bounded or at_least_once:
        arguments["x-overflow"] = "drop-head" if spec.drop_head else "reject-publish"
    if spec.single_active_consumer:
        arguments["x-single-active-consumer"] = True
    if spec.expires_s is not None:
        arguments["x-expires"] = int(spec.expires_s * 1000)
    return arguments


def exchange_arguments(spec: ExchangeSpec) -> dict[str, Argument]:
    """`x-`-like arguments of *spec*."""
    return {} if spec.alternate is None else {"alternate-exchange": spec.alternate}


def check_queue(spec: QueueSpec) -> None:
    """
    Refuse combinations that RabbitMQ refuses.

    Raises:
        ValueError: Says which.
    """
    if not spec.name:
        raise ValueError("a queue needs a name; server-named queues change theirs on reconnect")
    if spec.type is QueueType.QUORUM and (spec.exclusive or not spec.durable):
        raise ValueError(f"quorum queue {spec.name!r} must be durable and not exclusive")
    if spec.type is QueueType.CLASSIC and spec.delivery_limit is not None:
        raise ValueError(f"classic queue {spec.name!r} does not count deliveries")
    if not spec.durable and not spec.exclusive:
        raise ValueError(f"queue {spec.name!r} must be durable or exclusive: RabbitMQ 4.3 refuses")
