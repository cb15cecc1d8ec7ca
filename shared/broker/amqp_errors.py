"""What the AMQP library raises, in the project's words."""

import asyncio
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
    QueueNotFoundError,
)


@contextmanager
def amqp_errors(what: str) -> Iterator[None]:
    """
    Translate errors of *what*.

    Raises:
        QueueNotFoundError: 404.
        BrokerConflictError: 405 locked, 406 precondition failed.
        BrokerAccessError: 403.
        BrokerUnavailableError: Anything about the connection or channel, and time-outs.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        # aiormq ends those who wait on a dying connection with CancelledError; passed on, it
        # would end a service's task as though somebody had cancelled it.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise BrokerUnavailableError(f"{what}: the connection went away") from error
    except ChannelNotFoundEntity as error:
        raise QueueNotFoundError(f"{what}: {error}") from error
    except ChannelAccessRefused as error:
        raise BrokerAccessError(f"{what}: {error}") from error
    except ChannelPreconditionFailed as error:
        # A forged user id is a precondition to RabbitMQ.
        if "user_id" in str(error):
            raise BrokerAccessError(f"{what}: {error}") from error
        raise BrokerConflictError(f"{what}: {error}") from error
    except ChannelLockedResource as error:
        raise BrokerConflictError(f"{what}: {error}") from error
    # RuntimeError: aiormq's and aio-pika's word for "closed meanwhile".
    except (TimeoutError, AMQPError, PAMQPException, OSError, RuntimeError) as error:
        detail = str(error) or type(error).__name__
        raise BrokerUnavailableError(f"{what}: {detail}") from error
