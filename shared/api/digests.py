"""Digests of what was asked, which distinguish a repeat of an id from another request."""

import hashlib
from codecs import BOM_UTF8
from typing import Any

import msgspec

from shared.contracts.errors import ContractError

_PER_MESSAGE = frozenset({"id", "reply", "arrived_at", "prompt_tokens", "engine", "clamped"})
"""Fields that producers and gateways set again for each message."""


def body_digest(body: bytes) -> str:
    """
    Digest of the body of a message, without the fields that differ between two messages of the
    same request; neither the order of fields nor white space nor a byte order
    mark matters.

    Raises:
        ContractError: The body is not a JSON object.
    """
    try:
        fields = msgspec.json.decode(body.removeprefix(BOM_UTF8), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ContractError(
            f"the body must be a JSON object: {error}", code="invalid_json"
        ) from error
    asked = {name: value for name, value in fields.items() if name not in _PER_MESSAGE}
    encoded = msgspec.json.encode(asked, order="deterministic")
    return hashlib.sha256(encoded).hexdigest()


def call_digest(endpoint: str, body: bytes) -> str:
    """Digest of an HTTP request, whose body counts as it came."""
    return hashlib.sha256(f"{endpoint}\0".encode() + body).hexdigest()


def chained(digest: bytes, events: bytes) -> bytes:
    """Digest of the events of an answer so far, from that before its newest events."""
    return hashlib.blake2b(digest + events, digest_size=16).digest()
