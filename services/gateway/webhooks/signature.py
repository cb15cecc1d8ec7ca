"""Signatures of the specification Standard Webhooks, which OpenAI's clients verify."""

import base64
import binascii
import hashlib
import hmac

from shared.contracts.base import UnixTime

PREFIX = "whsec_"
MIN_BYTES, MAX_BYTES = 24, 64
"""Sizes of a key in the specification."""


def key_of(secret: str) -> bytes:
    """
    The key in a secret.

    Raises:
        ValueError: It has another form; the message says which form it must have.
    """
    takes = f"must be {PREFIX} and {MIN_BYTES} to {MAX_BYTES} bytes in base64"
    if not secret.startswith(PREFIX):
        raise ValueError(takes)
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        raise ValueError(takes) from None
    if not MIN_BYTES <= len(key) <= MAX_BYTES:
        raise ValueError(takes)
    return key


def signed_headers(payload: bytes, *, event_id: str, secret: str, now: UnixTime) -> dict[str, str]:
    """
    Headers that prove the origin of *payload* and the time of the attempt.

    Source: Standard Webhooks 1.0.0, "Webhook headers" and "Signature scheme" (symmetric).
    """
    timestamp = str(int(now))
    signed = b".".join((event_id.encode(), timestamp.encode(), payload))
    digest = hmac.new(key_of(secret), signed, hashlib.sha256).digest()
    return {
        "content-type": "application/json",
        "user-agent": "headway",
        "webhook-id": event_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }
