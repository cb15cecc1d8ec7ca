"""
Kernels that evaluate flat trees; compiled in advance, because the router runs them per request.

`solver.planning.search` describes the cache of compiled kernels.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from solver.jit import inlined, kernel
from solver.prediction.prefill.features import (
    BACKLOG_COLUMN,
    CACHED_COLUMN,
    FEATURES,
    PROMPT_COLUMN,
    RUNNING_COLUMN,
)

Floats = NDArray[np.float64]
Indices = NDArray[np.uint32]

NUM_SCALE_TERMS = 5
_MOST = 1e9
"""Limit of each feature in the scale, in tokens or sequences; keeps squares finite."""


@inlined
def _bounded(value: float) -> float:
    """*value* limited to 0.._MOST; NaN becomes 0."""
    if value > 0.0:
        return min(value, _MOST)
    return 0.0


@inlined
def _terms(row: Floats, terms: Floats) -> None:
    """
    Write float64[NUM_SCALE_TERMS] to *terms*: prefill time is approximately linear in these terms.
    """
    prompt = _bounded(row[PROMPT_COLUMN])
    cached = min(_bounded(row[CACHED_COLUMN]), prompt)
    tokens = prompt - cached + 1.0
    terms[0] = 1.0
    terms[1] = tokens
    terms[2] = tokens * (cached + tokens / 2)
    terms[3] = tokens * _bounded(row[RUNNING_COLUMN])
    terms[4] = min(tokens, _bounded(row[BACKLOG_COLUMN]))


@kernel
def scale_terms(features: Floats) -> Floats:
    """
    Terms of the scale of prefill times, without its coefficients.

    Terms: a constant for one iteration, tokens to compute, pairs of tokens in attention, tokens
    times running sequences, and prefill work of other requests in the same iterations.

    Args:
        features: float64[num_rows, num_features].

    Returns:
        float64[num_rows, NUM_SCALE_TERMS]; the first term is 1, none is negative.
    """
    terms = np.empty((len(features), NUM_SCALE_TERMS))
    for row in range(len(features)):
        _terms(features[row], terms[row])
    return terms


class Forest(NamedTuple):
    """Flat trees of several outputs."""

    starts: Indices
    """int32[num_outputs + 1]: an output's trees are from `starts[o]` up to `starts[o + 1]`."""
    roots: Indices
    """int32[num_trees], root nodes."""
    depths: Indices
    """int32[num_trees], maximum number of splits."""
    split: Indices
    """int32[num_nodes], the feature that is compared."""
    child: Indices
    """int32[num_nodes], the first of two adjacent children; of a leaf, itself."""
    value: Floats
    """
    float64[num_nodes], the threshold, above which the second child follows; of a leaf, the amount
    it adds.
    """


@kernel
def walk(features: Floats, forest: Forest) -> Floats:
    """
    Sums of the leaves that each row ends at: float64[num_rows, num_outputs].

    All rows descend a tree in lockstep, and rows at a leaf stay there: without a branch that
    depends on the data, several steps run in parallel.

    Args:
        features: float64[num_rows, num_features].
        forest: Trees with indices in range; the indices are not checked.
    """
    sums = np.zeros((len(features), len(forest.starts) - 1))
    nodes = np.empty(len(features), dtype=np.uint32)
    for output in range(len(forest.starts) - 1):
        for tree in range(forest.starts[output], forest.starts[output + 1]):
            nodes[:] = forest.roots[tree]
            for _ in range(forest.depths[tree]):
                for row in range(len(features)):
                    node = nodes[row]
                    child = forest.child[node]
                    above = features[row, forest.split[node]] > forest.value[node]
                    nodes[row] = child + np.uint32(above & (child != node))
            for row in range(len(features)):
                sums[row, output] += forest.value[nodes[row]]
    return sums


@kernel
def prefill_times(
    features: Floats, scale: Floats, baselines: Floats, sums: Floats, times_s: Floats
) -> None:
    """
    Seconds from sums of leaves, written to *times_s*: quantiles first, the mean last.

    Quantiles are of logarithms of multiples of the scale, the mean is of multiples. A quantile is
    never below that of a lower level, and nothing is negative.

    Args:
        features: float64[num_rows, num_features].
        scale: float64[NUM_SCALE_TERMS], seconds per term.
        baselines: float64[num_outputs], added to the sums.
        sums: float64[num_rows, num_outputs], as returned by `walk`.
        times_s: float64[num_rows, num_outputs].
    """
    mean = len(baselines) - 1
    terms = np.empty(NUM_SCALE_TERMS)
    for row in range(len(features)):
        _terms(features[row], terms)
        scale_s = 0.0
        for term in range(NUM_SCALE_TERMS):
            scale_s += scale[term] * terms[term]
        least_s = 0.0
        for output in range(mean):
            ratio = math.exp(baselines[output] + sums[row, output])
            least_s = max(least_s, scale_s * ratio)
            times_s[row, output] = least_s
        times_s[row, mean] = scale_s * max(0.0, baselines[mean] + sums[row, mean])


def compile_kernels() -> None:
    """Run each kernel once: immediate from the cache, a few seconds to compile."""
    features = np.zeros((1, len(FEATURES)))
    one, none = np.ones(1), np.zeros(1, dtype=np.uint32)
    sums = walk(features, Forest(np.array([0, 1], dtype=np.uint32), none, none, none, none, one))
    prefill_times(features, scale_terms(features)[0], one, sums, np.empty_like(sums))
