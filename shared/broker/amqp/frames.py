"""AMQP frames that are sent for each message, encoded without the library's objects."""

import struct
from collections.abc import Iterator
from math import ceil

from aiormq.abc import ChannelFrame
from aiormq.channel import Channel
from aiormq.exceptions import ChannelInvalidStateError
from pamqp import encode

from shared.broker.protocol import OutMessage

_METHOD, _HEADER, _BODY = 1, 2, 3
_END = b"\xce"
_BASIC = 60
_PUBLISH = struct.pack(">HHH", _BASIC, 40, 0)
_GET = struct.pack(">HHH", _BASIC, 70, 0)
_ACK = struct.pack(">HH", _BASIC, 80)
_head = struct.Struct(">BHI").pack
_content = struct.Struct(">HHQH").pack
_tag = struct.Struct(">QB").pack
_TRANSIENT, _PERSISTENT = b"\x01", b"\x02"
_CONTENT_TYPE, _HEADERS, _DELIVERY_MODE = 1 << 15, 1 << 13, 1 << 12
_CORRELATION_ID, _REPLY_TO, _EXPIRATION = 1 << 10, 1 << 9, 1 << 8
_MESSAGE_ID, _TYPE, _USER_ID = 1 << 7, 1 << 5, 1 << 4
_JSON = b"\x10application/json"


async def write(channel: Channel, frames: bytes) -> None:
    """
    Send frames of a channel; returns once they wait for the socket.

    Raises:
        RuntimeError: The channel is closed.
    """
    if channel.is_closed:
        raise ChannelInvalidStateError(f"channel {channel.number} is closed")
    await channel.write_queue.put(ChannelFrame(payload=frames, should_close=False))


def publish_frames(channel: Channel, exchange: str, routing_key: str, message: OutMessage) -> bytes:
    """The frames that publish a message, not as mandatory."""
    number, body = channel.number, message.body
    method = b"".join((_PUBLISH, _short(exchange), _short(routing_key), b"\0"))
    flags, properties = _properties(message)
    header = _content(_BASIC, 0, len(body), flags) + properties
    most = channel.max_content_size
    parts = (body[first : first + most] for first in range(0, len(body), most))
    bodies = (_frame(_BODY, number, part) for part in parts)
    return b"".join((_frame(_METHOD, number, method), _frame(_HEADER, number, header), *bodies))


def get_frame(channel: Channel, queue: str) -> bytes:
    """The frame that asks for the first message of a queue."""
    return _frame(_METHOD, channel.number, b"".join((_GET, _short(queue), b"\0")))


def ack_frame(channel: Channel, tag: int) -> bytes:
    """The frame that acknowledges one delivery."""
    return _frame(_METHOD, channel.number, _ACK + _tag(tag, 0))


def milliseconds(seconds: float | None) -> str | None:
    """Lifetime of a message in AMQP's form."""
    return None if seconds is None else str(max(0, ceil(seconds * 1000)))


def _frame(kind: int, channel: int, payload: bytes) -> bytes:
    return b"".join((_head(kind, channel, len(payload)), payload, _END))


def _short(text: str) -> bytes:
    """A text of at most 255 bytes."""
    encoded = text.encode()
    return bytes((len(encoded),)) + encoded


def _properties(message: OutMessage) -> tuple[int, bytes]:
    """Properties of a message, in the order of their flags."""
    flags, parts = 0, []
    for flag, value in _present(message):
        flags |= flag
        parts.append(value)
    return flags, b"".join(parts)


def _present(message: OutMessage) -> Iterator[tuple[int, bytes]]:
    yield _CONTENT_TYPE, _JSON
    if message.headers:
        yield _HEADERS, encode.field_table(dict(message.headers))
    yield _DELIVERY_MODE, _PERSISTENT if message.persistent else _TRANSIENT
    if message.correlation_id:
        yield _CORRELATION_ID, _short(message.correlation_id)
    if message.reply_to:
        yield _REPLY_TO, _short(message.reply_to)
    if (expiration := milliseconds(message.expiration_s)) is not None:
        yield _EXPIRATION, _short(expiration)
    if message.message_id:
        yield _MESSAGE_ID, _short(message.message_id)
    if message.kind:
        yield _TYPE, _short(message.kind)
    if message.user_id:
        yield _USER_ID, _short(message.user_id)
