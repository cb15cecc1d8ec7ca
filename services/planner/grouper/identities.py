"""Identity of a message: its id, and whether a repeat of the id means the same request."""

import secrets
from typing import Any

import msgspec
from msgspec import Raw

from shared.broker.protocol import Delivery
from shared.contracts.base import Decoder, RequestId
from shared.contracts.errors import ContractError
from shared.contracts.ingress import IDEMPOTENT_HEADER

MAX_ID_BYTES = 128


class Probe(msgspec.Struct):
    """Fields that are needed to answer a request, even if its body is invalid."""

    id: Any = None
    tenant: Any = None
    payload: Raw = Raw()
    """Not decoded, since it may be most of the body."""
    endpoint: Any = None

    @property
    def is_item(self) -> bool:
        """True if the message has the form of a queue item."""
        return bytes(self.payload) not in (b"", b"null")


_decode_probe: Decoder[Probe] = Decoder(Probe)


def probe_of(body: bytes) -> Probe:
    """
    The fields of a body that identify its request.

    Raises:
        ContractError: The body is not a JSON object.
    """
    return _decode_probe(body)


def request_id_of(delivery: Delivery) -> RequestId:
    """Request id with which *delivery* is answered, even if its body is invalid."""
    try:
        probe = probe_of(delivery.body)
    except ContractError:
        probe = Probe()
    return id_of(delivery, probe)


def id_of(delivery: Delivery, probe: Probe) -> RequestId:
    """Request id of *delivery*, whose body has *probe*; a new one if it has none."""
    body_id = probe.id if isinstance(probe.id, str) and probe.id else None
    known = body_id or delivery.message_id or delivery.correlation_id
    if not known:
        return RequestId(f"req-{secrets.token_hex(12)}")
    # Limit the id in bytes: it becomes part of a message id, which AMQP limits to 255 bytes.
    return RequestId(known.encode()[:MAX_ID_BYTES].decode(errors="ignore"))


def is_idempotent(delivery: Delivery) -> bool:
    """
    Return whether the id of a message means something.

    Raises:
        ContractError: The header is neither true nor false.
    """
    value = delivery.headers.get(IDEMPOTENT_HEADER, False)
    known = {True: True, False: False, "true": True, "false": False}
    if not isinstance(value, str | bool) or value not in known:
        raise ContractError(
            f"header {IDEMPOTENT_HEADER} must be true or false",
            code="invalid_header",
            param=IDEMPOTENT_HEADER,
        )
    return known[value]


def is_storable(delivery: Delivery, request_id: RequestId) -> bool:
    """
    False if the id or the reply queue has a character that PostgreSQL refuses: the transaction
    would fail for all requests that it has, again and again.
    """
    return "\0" not in f"{request_id}{delivery.reply_to or ''}"
