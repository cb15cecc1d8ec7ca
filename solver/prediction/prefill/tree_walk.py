"""
Kernels that evaluate flat trees; the kernels are compiled in advance, because the router runs them
for each request.

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
"""
Upper bound of each feature in the scale, in tokens or sequences; with the bound, squares remain
finite.
"""


@inlined
def _bounded(value: float) -> float:
    """Limit *value* to the range 0.._MOST; NaN becomes 0."""
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
    """Trees of several outputs in flat arrays."""

    starts: Indices
    """
    Index of the first tree of each output o: its trees are from `starts[o]` up to `starts[o + 1]`,
    uint32[num_outputs + 1].
    """
    roots: Indices
    """Root node of each tree, uint32[num_trees]."""
    depths: Indices
    """Maximum number of splits on a path of each tree, uint32[num_trees]."""
    split: Indices
    """Feature that each node compares, uint32[num_nodes]."""
    child: Indices
    """
    First of the two adjacent children of each node, uint32[num_nodes]; a leaf is its own child.
    """
    value: Floats
    """
    Threshold of each node, float64[num_nodes]: the second child follows for larger values. For a
    leaf, the amount that it adds to the output.
    """


@kernel
def walk(features: Floats, forest: Forest) -> Floats:
    """
    Sum of the leaves that each row reaches, float64[num_rows, num_outputs].

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
    Convert sums of leaves to seconds, written to *times_s*: quantiles first, the mean last.

    Quantiles are of logarithms of multiples of the scale, the mean is of multiples. A quantile is
    never below the quantile of a lower level, and no time is negative.

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
    """Run each kernel once: immediate if compiled kernels are cached, otherwise a few seconds."""
    features = np.zeros((1, len(FEATURES)))
    one, none = np.ones(1), np.zeros(1, dtype=np.uint32)
    sums = walk(features, Forest(np.array([0, 1], dtype=np.uint32), none, none, none, none, one))
    prefill_times(features, scale_terms(features)[0], one, sums, np.empty_like(sums))
