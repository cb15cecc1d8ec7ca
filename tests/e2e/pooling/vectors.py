"""Texts for pooling models, and the comparison of responses that have their vectors."""

from typing import Any

TEXTS = ["The queue waits", "our engine", "a request returns", "über 日本"]
TOLERANCE = 1e-5
"""Absolute difference of numbers that counts as equal."""
VOLATILE = {"id", "created", "headway"}
"""Fields that differ between two responses to one body."""


def close(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal, numbers up to `TOLERANCE`."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = (one.keys() | other.keys()) - VOLATILE
        return all(close(one.get(key), other.get(key)) for key in keys)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= TOLERANCE
    return bool(one == other)
