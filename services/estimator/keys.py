"""Names of files of a (model, engine, device)."""

import hashlib
import re

from services.estimator.observations import ProfileKey

_UNSAFE = re.compile(r"[^A-Za-z0-9.]+")
_MOST = 40
"""Characters of each part; the rest is in the digest."""


def directory_name(key: ProfileKey) -> str:
    """The same for equal keys, another for others, and legible: `tiny-llama-vllm-cpu-1f0c9a3b`."""
    parts = [_UNSAFE.sub("-", part).strip("-.")[:_MOST] for part in key]
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:8]
    return "-".join([*(part for part in parts if part), digest])


def told(key: ProfileKey) -> str:
    """For people."""
    model, engine, device = key
    return f"{model} on {engine} {device}"
