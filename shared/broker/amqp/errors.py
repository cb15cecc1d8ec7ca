"""Translation of the AMQP library's exceptions to Headway's errors."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager

from aiormq.exceptions import (
    AMQPError,
    ChannelAccessRefused,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
)
from pamqp.exceptions import PAMQPException

from shared.contracts.errors import (
    BrokerAccessError,
    BrokerConflictError,
    BrokerUnavailableError,
    MeshError,
    MessageTooLargeError,
    QueueNotFoundError,
)

_SIZES = re.compile(r"message size (?P<size>\d+) .*?max size (?P<limit>\d+)")
"""RabbitMQ's reason for refusing a large message."""


@contextmanager
def amqp_errors(what: str) -> Iterator[None]:
    """
    Context that translates the AMQP library's exceptions; *what* names the operation.

    A cancellation that arrives while the operation ends is raised in place of its result. aiormq
    loses it otherwise, since `asyncio.wait_for` of Python 3.11 does, and the caller would continue.

    Raises:
        QueueNotFoundError: AMQP reply code 404.
        MessageTooLargeError: AMQP reply code 406 because of the size of a message.
        BrokerConflictError: AMQP reply code 405 (locked) or 406 (precondition failed).
        BrokerAccessError: AMQP reply code 403.
        BrokerUnavailableError: Any failure of the connection or channel, and timeouts.
    """
    before = _num_cancellations()
    try:
        with _translated(what):
            yield
    except MeshError as error:
        if _num_cancellations() > before:
            raise asyncio.CancelledError from error
        raise
    if _num_cancellations() > before:
        raise asyncio.CancelledError


def _num_cancellations() -> int:
    """Number of requests to cancel the current task."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except asyncio.CancelledError as error:
        # aiormq raises CancelledError in tasks that wait on a dying connection. Without this check,
        # the error would end a service's task like a real cancellation.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise BrokerUnavailableError(f"{what}: the connection was lost") from error
    except ChannelNotFoundEntity as error:
        raise QueueNotFoundError(f"{what}: {error}") from error
    except ChannelAccessRefused as error:
        raise BrokerAccessError(f"{what}: {error}") from error
    except ChannelPreconditionFailed as error:
        # RabbitMQ reports a forged user id as a failed precondition.
        if "user_id" in str(error):
            raise BrokerAccessError(f"{what}: {error}") from error
        if (sizes := _SIZES.search(str(error))) is not None:
            raise MessageTooLargeError(
                f"{what}: the message has {sizes['size']} bytes, and the broker's limit "
                f"max_message_size is {sizes['limit']}; shorten the request, or raise the limit"
            ) from error
        raise BrokerConflictError(f"{what}: {error}") from error
    except ChannelLockedResource as error:
        raise BrokerConflictError(f"{what}: {error}") from error
    # RuntimeError: raised by aiormq and aio-pika for "closed in the meantime".
    except (TimeoutError, AMQPError, PAMQPException, OSError, RuntimeError) as error:
        detail = str(error) or type(error).__name__
        raise BrokerUnavailableError(f"{what}: {detail}") from error
