"""Names whose requests are divided among several models."""

import hashlib
import math
from collections.abc import Mapping

from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelTask, TrafficSplit

_LARGEST = 2**64


def target_of(split: TrafficSplit, request_id: str) -> str:
    """
    Target of a request: equal for equal ids, in every process.

    Each target gets its share of the ids, and a changed weight moves no more ids than its change
    requires (weighted rendezvous hashing).
    """
    return max(split.weights, key=lambda target: (_score(split, target, request_id), target))


def _score(split: TrafficSplit, target: str, request_id: str) -> float:
    text = f"{split.name}\n{target}\n{request_id}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    uniform = (int.from_bytes(digest) + 1) / (_LARGEST + 1)  # inside (0, 1)
    return -split.weights[target] / math.log(uniform)


def check_split(split: TrafficSplit, tasks: Mapping[str, ModelTask]) -> None:
    """
    Check a split of a registry file.

    Args:
        split: The split.
        tasks: Task of each model by all its names.

    Raises:
        SettingsError: The split's name is that of a model, a target is not the name of a model, or
            the targets have different tasks.
    """
    if split.name in tasks:
        raise SettingsError(f"a model and a split have the name {split.name!r}")
    if not split.weights:
        raise SettingsError(f"split {split.name!r} has no targets in `weights`")
    targets = [*split.weights, *([] if split.fallback is None else [split.fallback])]
    for target in targets:
        if target not in tasks:
            raise SettingsError(f"split {split.name!r} has the unknown model {target!r}")
    if len(found := sorted({tasks[target] for target in targets})) > 1:
        raise SettingsError(
            f"the models of split {split.name!r} have different tasks: {', '.join(found)}"
        )
