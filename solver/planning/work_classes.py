"""Edges between short and long work, clustered from what has come lately (QLM algorithm 1)."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from shared.contracts.base import ModelName
from shared.contracts.lanes import LaneLayout

BINS_PER_OCTAVE = 4
"""Edges lie between bins, so that one is at most 9 % from where it is best."""
WorkHistogram = Mapping[int, int]
"""Requests by bin of their work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitOptions:
    """When other edges are worth new lanes."""

    least_requests: int = 500
    """Of a model; fewer say too little."""
    gain: float = 0.2
    """Share of the variance inside classes by which it must fall, 0..1."""


_DEFAULT = RefitOptions()


def bin_of(work_tokens: float) -> int:
    """The bin of a request's prefill + decode tokens."""
    return math.floor(BINS_PER_OCTAVE * math.log2(max(1.0, work_tokens)) + 1e-9)


def lower_edge_tokens(number: int) -> int:
    """Least whole number of tokens in the bin *number* or above."""
    return math.ceil(math.exp2(number / BINS_PER_OCTAVE) - 1e-6)


def best_edge_tokens(histogram: WorkHistogram) -> int | None:
    """
    The edge at which two classes have the least variance inside them.

    Returns:
        Tokens, from which work is long; none when all work is in one bin.

    Source: QLM algorithm 1, line 1: k-means of the requests, here by their work.
    Differs: exact instead of Lloyd's iterations: in one dimension clusters are intervals, and two
    of them have one border, which is tried everywhere. The other parameters of QLM's clusters,
    model and SLO, are divided before (`solver.planning.lanes`). Distances are those of cube
    roots, by which skewed lengths are near normal (Wilson and Hilferty), as k-means takes its
    clusters to be: of tokens, the tail alone would be a class.
    """
    numbers = sorted(number for number, count in histogram.items() if count > 0)
    edges = [lower_edge_tokens(number) for number in numbers[1:]]
    return min(edges, key=lambda edge: variance_inside(histogram, edge), default=None)


def variance_inside(histogram: WorkHistogram, edge_tokens: float) -> float:
    """Variance of cube roots of tokens around the mean of their class, with that edge."""
    classes: tuple[list[tuple[float, int]], list[tuple[float, int]]] = ([], [])
    edge = math.cbrt(edge_tokens)
    for number, count in histogram.items():
        root = math.exp2((number + 0.5) / BINS_PER_OCTAVE / 3)
        classes[root >= edge].append((root, count))
    total = sum(count for count in histogram.values())
    return sum(_squares(members) for members in classes) / total if total else 0.0


def refitted(
    layout: LaneLayout,
    recent: Mapping[ModelName, WorkHistogram],
    options: RefitOptions = _DEFAULT,
) -> LaneLayout | None:
    """
    *layout* with the next version of edges, if that is worth it for a model at least.

    Args:
        layout: In force.
        recent: Work that has come since the edges were last looked at.
        options: What it takes.

    Returns:
        None to leave it; the edges of models for which it is not worth it stay.
    """
    better = {
        model: edge
        for model, histogram in recent.items()
        if sum(histogram.values()) >= options.least_requests
        and (edge := best_edge_tokens(histogram)) is not None
        and variance_inside(histogram, edge)
        < (1 - options.gain) * variance_inside(histogram, layout.work_edge_of(model))
    }
    if not better:
        return None
    return msgspec.structs.replace(
        layout, work_version=layout.work_version + 1, work_edges={**layout.work_edges, **better}
    )


def added(histograms: list[WorkHistogram]) -> WorkHistogram:
    """The sum of *histograms*."""
    total: dict[int, int] = {}
    for number, count in itertools.chain.from_iterable(each.items() for each in histograms):
        total[number] = total.get(number, 0) + count
    return total


def _squares(members: list[tuple[float, int]]) -> float:
    """Sum of squared distances from the mean."""
    count = sum(weight for _, weight in members)
    mean = sum(tokens * weight for tokens, weight in members) / max(1, count)
    return sum(weight * (tokens - mean) ** 2 for tokens, weight in members)
