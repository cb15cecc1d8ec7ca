"""Regimes that are calibrated apart: prompt size, locality, load (QUARTZ §4.2)."""

from bisect import bisect_right
from enum import IntEnum
from typing import NamedTuple

from solver.prediction.prefill_features import (
    InstanceFeatures,
    Locality,
    RequestFeatures,
    locality_of,
)

_PROMPT_EDGES_TOKENS = (512, 2048, 8192)
"""One chunk, a few, a few seconds, and more: each class is about four times the one before."""
_HEAVY_BACKLOG_TOKENS = 4096
"""About eight chunks: a prefill no longer finishes between two of others."""


class Load(IntEnum):
    """Whether others' prefills share the instance's iterations."""

    LIGHT = 0
    SHARED = 1
    HEAVY = 2


class Bucket(NamedTuple):
    """A regime; its prefixes are coarser ones, down to the empty tuple for all requests."""

    prompt: int
    """Class of the prompt's size, 0 is the shortest."""
    locality: Locality
    load: Load


def bucket_of(request: RequestFeatures, instance: InstanceFeatures) -> Bucket:
    """
    The regime of *request* on *instance*.

    Source: QUARTZ §4.2, "discretized by prompt/locality/load".
    Decided: load is the prefill backlog, which is what makes prefills of the same prompt differ
    most; where the paper gives no edges, they are chunks of 512 tokens, in powers of four or two.
    """
    return Bucket(
        prompt=bisect_right(_PROMPT_EDGES_TOKENS, request.prompt_tokens),
        locality=locality_of(instance.cached_tokens, request.prompt_tokens),
        load=_load_of(instance.prefill_backlog_tokens),
    )


def _load_of(prefill_backlog_tokens: int) -> Load:
    if prefill_backlog_tokens <= 0:
        return Load.LIGHT
    return Load.SHARED if prefill_backlog_tokens < _HEAVY_BACKLOG_TOKENS else Load.HEAVY
