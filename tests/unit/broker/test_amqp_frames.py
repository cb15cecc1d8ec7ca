"""Frames that Headway encodes itself are those of the AMQP library."""

from types import SimpleNamespace
from typing import Any

from aiormq import spec
from aiormq.abc import ChannelFrame
from hypothesis import given
from hypothesis import strategies as st
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from shared.broker.amqp.frames import ack_frame, get_frame, publish_frames
from shared.broker.amqp.publisher import _properties
from shared.broker.protocol import OutMessage

NUMBER, MOST = 7, 4
CHANNEL: Any = SimpleNamespace(number=NUMBER, max_content_size=MOST)
SHORT = st.text(max_size=40)
NAMES = st.text(alphabet="abc-_.:/0", max_size=40)
MAYBE = st.none() | SHORT
MESSAGES = st.builds(
    OutMessage,
    body=st.binary(max_size=3 * MOST),
    kind=SHORT,
    message_id=MAYBE,
    correlation_id=MAYBE,
    reply_to=MAYBE,
    user_id=MAYBE,
    persistent=st.booleans(),
    expiration_s=st.none() | st.floats(0, 1e6),
    headers=st.dictionaries(SHORT.filter(bool), st.text() | st.booleans(), max_size=3),
)


def of_library(*frames: Any) -> bytes:
    return ChannelFrame.marshall(channel_number=NUMBER, frames=frames).payload


@given(message=MESSAGES, exchange=NAMES, key=SHORT)
def test_published_message(message: OutMessage, exchange: str, key: str) -> None:
    body = message.body
    expected = of_library(
        spec.Basic.Publish(exchange=exchange, routing_key=key),
        ContentHeader(properties=_properties(message), body_size=len(body)),
        *(ContentBody(body[first : first + MOST]) for first in range(0, len(body), MOST)),
    )

    assert publish_frames(CHANNEL, exchange, key, message) == expected


@given(queue=NAMES, tag=st.integers(1, 2**63 - 1))
def test_get_and_acknowledgement(queue: str, tag: int) -> None:
    assert get_frame(CHANNEL, queue) == of_library(spec.Basic.Get(queue=queue))
    assert ack_frame(CHANNEL, tag) == of_library(spec.Basic.Ack(delivery_tag=tag))
