"""Features of a request and of a candidate instance, known to a router (QUARTZ table 2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

SCHEMA_VERSION = 1
"""Version of `FEATURES` and of their meanings; trees of other versions are rejected."""

FEATURES: tuple[str, ...] = (
    "prompt_tokens",
    "max_tokens",
    "temperature",
    "top_p",
    "is_interactive",
    "is_streaming",
    "cached_tokens",
    "locality",
    "running",
    "prefill_backlog_tokens",
    "kv_utilization",
)
"""Names of the columns of a feature matrix."""

PROMPT_COLUMN = FEATURES.index("prompt_tokens")
CACHED_COLUMN = FEATURES.index("cached_tokens")
RUNNING_COLUMN = FEATURES.index("running")
BACKLOG_COLUMN = FEATURES.index("prefill_backlog_tokens")
"""Column numbers of the features that are also read individually."""

_PARTIAL_SHARE = 0.1
"""
Cached share of a prompt from which its locality is PARTIAL. A shared system prompt usually reaches
this share, a shared first block alone does not.
"""
_HIGH_SHARE = 0.5
"""
Cached share of a prompt from which its locality is HIGH, because most of the prefill is saved.
"""


class Locality(IntEnum):
    """Class of the share of a prompt that is known to be in an instance's prefix cache."""

    NONE = 0
    PARTIAL = 1
    HIGH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFeatures:
    """Features of the request, the same for all candidates."""

    prompt_tokens: int
    max_tokens: int
    """Maximum number of tokens that the request may generate."""
    temperature: float = 1.0
    top_p: float = 1.0
    is_interactive: bool = True
    is_streaming: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceFeatures:
    """
    Features of one candidate instance for one request: the instance's last report, and the tokens
    that the router assumes to be cached.
    """

    cached_tokens: int = 0
    """Longest prefix of the prompt that is known to be cached on the instance."""
    running: int = 0
    """Number of active sequences of the instance."""
    prefill_backlog_tokens: int = 0
    """Number of the instance's prompt tokens, assigned or waiting, that are not computed yet."""
    kv_utilization: float = 0.0
    """Used share of the instance's KV cache, 0..1."""


def locality_of(cached_tokens: int, prompt_tokens: int) -> Locality:
    """
    Coarse locality class: PARTIAL from a tenth of the prompt, HIGH from half of it.

    Source: QUARTZ table 2, bucket(l, p).
    Decided: the paper gives three classes without thresholds; here thresholds are shares of the
    prompt.
    """
    if cached_tokens >= _HIGH_SHARE * max(1, prompt_tokens):
        return Locality.HIGH
    if cached_tokens >= _PARTIAL_SHARE * max(1, prompt_tokens):
        return Locality.PARTIAL
    return Locality.NONE


def feature_matrix(
    request: RequestFeatures, instances: Sequence[InstanceFeatures]
) -> NDArray[np.float64]:
    """
    Matrix of features with one row per candidate, float64[num_candidates, num_features], columns as
    in `FEATURES`.
    """
    prompt = request.prompt_tokens
    matrix = np.empty((len(instances), len(FEATURES)))
    matrix[:, :CACHED_COLUMN] = (
        prompt,
        request.max_tokens,
        request.temperature,
        request.top_p,
        request.is_interactive,
        request.is_streaming,
    )
    for row, instance in enumerate(instances):
        matrix[row, CACHED_COLUMN:] = (
            instance.cached_tokens,
            locality_of(instance.cached_tokens, prompt),
            instance.running,
            instance.prefill_backlog_tokens,
            instance.kv_utilization,
        )
    return matrix
