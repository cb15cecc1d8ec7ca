"""Which instances are scored for a request (QUARTZ §3.3)."""

from collections.abc import Mapping, Sequence

import numpy as np

from shared.contracts.base import InstanceId


def candidate_set(
    instances: Sequence[InstanceId],
    *,
    cached_tokens: Mapping[InstanceId, int],
    num_candidates: int | None,
    random: np.random.Generator,
) -> list[InstanceId]:
    """
    Instances to score, in the order of *instances*.

    Args:
        instances: All that may serve the request; at least one.
        cached_tokens: Of its prompt on some of them.
        num_candidates: K; none is all.
        random: Draws those that are not chosen for their prefix.

    Source: QUARTZ §3.3, power of two choices.
    Decided: the instance with the longest prefix match, if any has one, is always among the K,
    so that K = 2 does not lose half of all prefix hits with four instances.
    """
    if num_candidates is None or num_candidates >= len(instances):
        return list(instances)
    best = max(instances, key=lambda instance: cached_tokens.get(instance, 0))
    kept = [best] if cached_tokens.get(best, 0) > 0 else []
    others = [instance for instance in instances if instance not in kept]
    missing = max(0, num_candidates - len(kept))
    drawn = {others[i] for i in random.permutation(len(others))[:missing]}
    return [instance for instance in instances if instance in drawn or instance in kept]
