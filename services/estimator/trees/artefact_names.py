"""File names and display names for a (model, engine, device)."""

import hashlib
import re

from services.estimator.telemetry_adapters import ProfileKey

_UNSAFE = re.compile(r"[^A-Za-z0-9.]+")
_MOST = 40
"""Maximum length of each part of the name in characters; a digest makes longer names unique."""


def directory_name(key: ProfileKey) -> str:
    """
    Readable and unique folder name of a (model, engine, device): `tiny-llama-vllm-cpu-1f0c9a3b`.
    """
    parts = [_UNSAFE.sub("-", part).strip("-.")[:_MOST] for part in key]
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:8]
    return "-".join([*(part for part in parts if part), digest])


def display_name(key: ProfileKey) -> str:
    """The (model, engine, device) as text for operators."""
    model, engine, device = key
    return f"{model} on {engine} {device}"
