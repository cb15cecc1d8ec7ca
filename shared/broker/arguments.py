"""Converts specs to RabbitMQ arguments, and refuses specs that RabbitMQ does not support."""

from shared.broker.protocol import ExchangeSpec, QueueSpec, QueueType

Argument = str | int


def queue_arguments(spec: QueueSpec) -> dict[str, Argument]:
    """
    Return the `x-` arguments of *spec*, for clients and for the definitions file.

    Raises:
        ValueError: RabbitMQ does not support the spec.
    """
    check_queue(spec)
    at_least_once = (
        spec.type is QueueType.QUORUM
        and spec.dead_letter_exchange is not None
        and not spec.drop_head
    )
    is_queue = spec.type is not QueueType.STREAM
    bounded = spec.max_length is not None or spec.max_length_bytes is not None
    overflow = "drop-head" if spec.drop_head else "reject-publish"
    arguments: dict[str, Argument | None] = {
        "x-queue-type": spec.type.value,
        "x-delivery-limit": spec.delivery_limit,
        "x-dead-letter-exchange": spec.dead_letter_exchange,
        "x-dead-letter-routing-key": spec.dead_letter_routing_key,
        "x-max-length": spec.max_length,
        "x-max-length-bytes": spec.max_length_bytes,
        # The strategy at-least-once keeps dead letters if the broker stops halfway. RabbitMQ
        # requires reject-publish with this strategy, even on an unbounded queue.
        "x-dead-letter-strategy": "at-least-once" if at_least_once else None,
        "x-overflow": overflow if is_queue and (bounded or at_least_once) else None,
        "x-single-active-consumer": spec.single_active_consumer or None,
        "x-expires": None if spec.expires_s is None else int(spec.expires_s * 1000),
        "x-message-ttl": None if spec.message_ttl_s is None else round(spec.message_ttl_s * 1000),
        "x-max-age": None if spec.max_age_s is None else f"{round(spec.max_age_s)}s",
        "x-stream-max-segment-size-bytes": spec.segment_bytes,
    }
    return {name: value for name, value in arguments.items() if value is not None}


def exchange_arguments(spec: ExchangeSpec) -> dict[str, Argument]:
    """Return the optional arguments of the exchange *spec*."""
    return {} if spec.alternate is None else {"alternate-exchange": spec.alternate}


def check_queue(spec: QueueSpec) -> None:
    """
    Check that RabbitMQ supports the spec of the queue.

    Raises:
        ValueError: RabbitMQ does not support the spec; the message names the conflicting
            properties.
    """
    if not spec.name:
        raise ValueError("a queue needs a name: server-named queues change their name on reconnect")
    if spec.type is not QueueType.CLASSIC and (spec.exclusive or not spec.durable):
        raise ValueError(f"{spec.type.value} queue {spec.name!r} must be durable and not exclusive")
    if spec.type is QueueType.STREAM and not _is_plain_stream(spec):
        raise ValueError(
            f"stream {spec.name!r} can have max_length_bytes, max_age_s and segment_bytes only"
        )
    if spec.type is QueueType.CLASSIC and spec.delivery_limit is not None:
        raise ValueError(
            f"classic queue {spec.name!r} cannot have a delivery limit: it does "
            "not count deliveries"
        )
    if not spec.durable and not spec.exclusive:
        raise ValueError(
            f"queue {spec.name!r} must be durable or exclusive: RabbitMQ 4.3 refuses other queues"
        )


def _is_plain_stream(spec: QueueSpec) -> bool:
    plain = QueueSpec(
        name=spec.name,
        type=spec.type,
        max_length_bytes=spec.max_length_bytes,
        max_age_s=spec.max_age_s,
        segment_bytes=spec.segment_bytes,
    )
    return spec == plain
