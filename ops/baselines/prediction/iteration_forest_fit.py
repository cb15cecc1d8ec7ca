"""Fits a random forest of iteration times (QoServe §3.6.1). Needs scikit-learn."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.ensemble import RandomForestRegressor
from threadpoolctl import threadpool_limits

from ops.baselines.prediction.iteration_forest import IterationForest, base_s, iteration_matrix
from shared.contracts.errors import TooFewSamplesError
from shared.contracts.telemetry import Iteration
from solver.prediction.latency.disturbances import kinds_of, trust
from solver.prediction.latency.latency_model import OnlineLatencyFit
from solver.prediction.prefill.tree_walk import Forest, Indices

LEAST_SAMPLES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ForestOptions:
    """Size of the random forest, and its safety margin towards small chunks."""

    num_trees: int = 50
    samples_per_leaf: int = 15
    level: float = 0.8
    """Quantile level over the trees by which chunks are chosen; 0.5 gives no margin."""


_DEFAULT = ForestOptions()


def fit_iteration_forest(
    iterations: Sequence[Iteration], *, seed: int = 0, options: ForestOptions = _DEFAULT
) -> IterationForest:
    """
    Fit a forest to the input of `OnlineLatencyFit`; disturbed iterations do not count.

    Args:
        iterations: Iterations to learn from; iterations without work or time are ignored.
        seed: Equal iterations and seeds give equal forests.

    Raises:
        TooFewSamplesError: There are fewer than `LEAST_SAMPLES`.
        ValueError: An option is out of its limits.
    """
    _check(options)
    usable = [
        each for each in iterations if each.compute_tokens > 0 and 0 < each.duration_s < math.inf
    ]
    if len(usable) < LEAST_SAMPLES:
        raise TooFewSamplesError(samples=len(usable), least=LEAST_SAMPLES)
    fit = OnlineLatencyFit(memory=len(usable))
    for each in usable:
        fit.observe(each)
    base = fit.fit()
    if base is None:
        raise TooFewSamplesError(samples=fit.count, least=LEAST_SAMPLES)
    features = iteration_matrix(usable)
    durations_s = np.array([each.duration_s for each in usable])
    targets = np.log(durations_s / base_s(base, features))
    trusted = trust(targets, kinds_of(features[:, 0]), np.ones(len(targets)))
    model = RandomForestRegressor(
        n_estimators=options.num_trees,
        min_samples_leaf=options.samples_per_leaf,
        max_features=1.0,
        random_state=seed,
    )
    # On a busy machine, threads wait for one another longer than they compute.
    with threadpool_limits(limits=1):
        model.fit(features[trusted > 0], targets[trusted > 0], sample_weight=trusted[trusted > 0])
    return IterationForest(
        base=base,
        forest=_forest_of([each.tree_ for each in model.estimators_]),
        level=options.level,
        most_tokens=int(features[trusted > 0, 0].max()),
    )


def _check(options: ForestOptions) -> None:
    if options.num_trees < 1:
        raise ValueError(f"num_trees must be at least 1; it is {options.num_trees}")
    if options.samples_per_leaf < 1:
        raise ValueError(f"samples_per_leaf must be at least 1; it is {options.samples_per_leaf}")
    if not 0 <= options.level <= 1:
        raise ValueError(f"level must be within 0..1; it is {options.level:g}")


def _forest_of(trees: list[Any]) -> Forest:
    """All trees of the fitted forest, concatenated; each tree has one output."""
    flat = [_breadth_first(tree) for tree in trees]
    roots = np.cumsum([0, *(len(order) for order, _ in flat)])[:-1]
    nodes = [(tree, order) for tree, (order, _) in zip(trees, flat, strict=True)]
    return Forest(
        starts=np.arange(len(trees) + 1, dtype=np.uint32),
        roots=roots.astype(np.uint32),
        depths=np.array([tree.max_depth for tree in trees], dtype=np.uint32),
        # A leaf tests no feature: the library gives it a negative feature index.
        split=np.concatenate([np.maximum(tree.feature[at], 0) for tree, at in nodes]).astype(
            np.uint32
        ),
        child=np.concatenate(
            [root + child for root, (_, child) in zip(roots, flat, strict=True)]
        ).astype(np.uint32),
        value=np.concatenate(
            [
                np.where(tree.children_left[at] < 0, tree.value[at, 0, 0], tree.threshold[at])
                for tree, at in nodes
            ]
        ),
    )


def _breadth_first(tree: Any) -> tuple[list[int], Indices]:
    """
    Node order of a tree with adjacent siblings, and each node's first child (a leaf: itself).
    """
    order = [0]
    child = np.arange(tree.node_count, dtype=np.uint32)
    for place in range(tree.node_count):
        node = order[place]
        if tree.children_left[node] >= 0:
            child[place] = len(order)
            order += [int(tree.children_left[node]), int(tree.children_right[node])]
    return order, child
