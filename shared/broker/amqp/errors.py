"""Translation of the AMQP library's exceptions to Headway's errors."""

import asyncio
import re
from types import TracebackType

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
    QueueDownError,
    QueueNotFoundError,
)

_DOWN = "is down or inaccessible"
"""RabbitMQ's reason for a queue that it knows, and whose only node is down."""
_SIZES = re.compile(r"message size (?P<size>\d+) .*?max size (?P<limit>\d+)")
"""RabbitMQ's reason for refusing a large message."""


class amqp_errors:  # noqa: N801 - used like a function; a generator costs more
    """
    Context that translates the AMQP library's exceptions; *what* names the operation.

    A cancellation that arrives while the operation ends is raised in place of its result. aiormq
    loses it otherwise, since `asyncio.wait_for` of Python 3.11 does, and the caller would continue.

    Raises:
        QueueDownError: AMQP reply code 404 for a queue whose node is down.
        QueueNotFoundError: AMQP reply code 404 otherwise.
        MessageTooLargeError: AMQP reply code 406 because of the size of a message.
        BrokerConflictError: AMQP reply code 405 (locked) or 406 (precondition failed).
        BrokerAccessError: AMQP reply code 403.
        BrokerUnavailableError: Any failure of the connection or channel, and timeouts.
    """

    __slots__ = ("_before", "_what")

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._before = _num_cancellations()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        failure = None if error is None else _failure(self._what, error)
        if error is not None and failure is None:
            return
        if _num_cancellations() > self._before:
            raise asyncio.CancelledError from failure
        if failure is not None and failure is not error:
            raise failure from error


def _num_cancellations() -> int:
    """Number of requests to cancel the current task."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def _failure(what: str, error: BaseException) -> MeshError | None:  # noqa: PLR0911 - one per kind
    """Headway's error for an error of the library; None for other errors and a cancelled task."""
    match error:
        case MeshError():
            return error
        # aiormq raises CancelledError in tasks that wait on a dying connection. Without this check,
        # the error would end a service's task like a real cancellation.
        case asyncio.CancelledError() if not _num_cancellations():
            return BrokerUnavailableError(f"{what}: the connection was lost")
        case ChannelNotFoundEntity() if _DOWN in str(error):
            return QueueDownError(f"{what}: {error}")
        case ChannelNotFoundEntity():
            return QueueNotFoundError(f"{what}: {error}")
        case ChannelAccessRefused():
            return BrokerAccessError(f"{what}: {error}")
        case ChannelPreconditionFailed():
            return _failed_precondition(what, str(error))
        case ChannelLockedResource():
            return BrokerConflictError(f"{what}: {error}")
        # RuntimeError: raised by aiormq and aio-pika for "closed in the meantime".
        case TimeoutError() | AMQPError() | PAMQPException() | OSError() | RuntimeError():
            return BrokerUnavailableError(f"{what}: {str(error) or type(error).__name__}")
        case _:
            return None


def _failed_precondition(what: str, reason: str) -> MeshError:
    # RabbitMQ reports a forged user id as a failed precondition.
    if "user_id" in reason:
        return BrokerAccessError(f"{what}: {reason}")
    if (sizes := _SIZES.search(reason)) is not None:
        return MessageTooLargeError(
            f"{what}: the message has {sizes['size']} bytes, and the broker's limit "
            f"max_message_size is {sizes['limit']}; shorten the request, or raise the limit"
        )
    return BrokerConflictError(f"{what}: {reason}")
