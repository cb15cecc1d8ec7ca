"""Regimes that are calibrated separately: prompt size, locality, load (QUARTZ §4.2)."""

from bisect import bisect_right
from enum import IntEnum
from typing import NamedTuple

from solver.prediction.prefill.features import (
    InstanceFeatures,
    Locality,
    RequestFeatures,
    locality_of,
)

_PROMPT_EDGES_TOKENS = (512, 2048, 8192)
"""
Limits of the prompt classes: one chunk, a few chunks, a few seconds. Each limit is four times the
limit before.
"""
_HEAVY_BACKLOG_TOKENS = 4096
"""Prefill backlog from which load is heavy: about eight chunks."""


class Load(IntEnum):
    """Load by other prefills that share the instance's iterations."""

    LIGHT = 0
    SHARED = 1
    HEAVY = 2


class Bucket(NamedTuple):
    """
    Class of similar requests (regime), as a tuple. A prefix of the tuple is a coarser regime; the
    empty tuple is all requests.
    """

    prompt: int
    """Class of the prompt's size; class 0 has the shortest prompts."""
    locality: Locality
    load: Load


def bucket_of(request: RequestFeatures, instance: InstanceFeatures) -> Bucket:
    """
    The regime of *request* on *instance*.

    Source: QUARTZ §4.2, "discretized by prompt/locality/load".
    Decided: load is the prefill backlog, which causes the largest differences between prefills of
    the same prompt. The paper gives no edges of buckets; here edges are chunks of 512 tokens times
    powers of four or two.
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
