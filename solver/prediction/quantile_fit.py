"""Learns prefill-time quantiles from what was measured (QUARTZ §3.2). Needs scikit-learn."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits

from shared.contracts.errors import TooFewSamplesError
from solver.prediction.least_squares import non_negative
from solver.prediction.prefill_features import FEATURES, SCHEMA_VERSION
from solver.prediction.quantile_trees import QuantileTrees
from solver.prediction.tree_walk import Floats, Forest, Indices, scale_terms

LEAST_SAMPLES = 400
"""Twenty above the 0.95 quantile: with fewer it is a guess, which calibration would undo."""
_LEAST_S = 1e-6
"""Shorter times are a clock's resolution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """Size of the trees. The defaults are evaluated for 16 candidates in tens of microseconds."""

    num_trees: int = 60
    """Of each output."""
    num_leaves: int = 15
    max_depth: int = 5
    """Of splits; the deepest one of a tree is what all candidates wait for."""
    samples_per_leaf: int = 40
    """At the 0.95 quantile two of them are above it."""
    learning_rate: float = 0.1


_DEFAULT = FitOptions()


def fit_quantile_trees(
    features: NDArray[np.float64],
    prefill_s: NDArray[np.float64],
    *,
    levels: Sequence[float] = (0.5, 0.9, 0.95),
    seed: int = 0,
    options: FitOptions = _DEFAULT,
) -> QuantileTrees:
    """
    Trees for each level's quantile, by pinball loss, and for the mean, by squared loss.

    The scale is fitted first: non-negative least squares of relative errors. Quantiles are then
    fitted to logarithms of multiples of it, since they commute with whatever is monotone. Means
    do not: they are fitted to the multiples themselves, and commute with the scale alone.

    Args:
        features: float64[num_samples, num_features], columns as in `FEATURES`.
        prefill_s: float64[num_samples], from first scheduled to first token, without the time
            that the request was preempted.
        levels: Rising, 0..1.
        seed: Equal samples and seeds give equal trees.
        options: Size of the trees.

    Raises:
        TooFewSamplesError: There are fewer than `LEAST_SAMPLES`.
        ValueError: Shapes do not fit, a value is not finite, or the levels do not rise.

    Source: QUARTZ §3.2: pinball loss (Bauer et al. 2024).
    Differs: fitted to multiples of a scale, see `QuantileTrees`.
    """
    _check(features, prefill_s, levels)
    features = np.ascontiguousarray(features, dtype=np.float64)
    scale = _scale_of(features, np.maximum(prefill_s, _LEAST_S))
    ratios = np.maximum(prefill_s, _LEAST_S) / (scale_terms(features) @ scale)
    # On a machine that is busy threads wait for one another a hundred times as long as they work.
    with threadpool_limits(limits=1):
        models = [
            _model(options, seed, loss="quantile", quantile=level).fit(features, np.log(ratios))
            for level in levels
        ]
        mean = _model(options, seed, loss="squared_error", quantile=None).fit(features, ratios)
    return _trees_of([*models, mean], tuple(levels), scale)


def _check(features: Floats, prefill_s: Floats, levels: Sequence[float]) -> None:
    if features.shape != (len(prefill_s), len(FEATURES)):
        raise ValueError(
            f"features are {features.shape}; {(len(prefill_s), len(FEATURES))} were expected"
        )
    if len(prefill_s) < LEAST_SAMPLES:
        raise TooFewSamplesError(samples=len(prefill_s), least=LEAST_SAMPLES)
    if not (np.all(np.isfinite(features)) and np.all(np.isfinite(prefill_s))):
        raise ValueError("features and times have to be finite")
    if not levels or np.any(np.diff([0.0, *levels, 1.0]) <= 0):
        raise ValueError(f"levels have to rise between 0 and 1; they are {tuple(levels)}")


def _scale_of(features: Floats, prefill_s: Floats) -> Floats:
    """float64[NUM_SCALE_TERMS]: s per term, none negative and the first one positive."""
    shares = scale_terms(features) / prefill_s[:, None]
    normal = shares.T @ shares
    size = np.sqrt(np.maximum(np.diag(normal), np.finfo(np.float64).tiny))
    matrix = normal / np.outer(size, size) + 1e-9 * np.eye(len(size))
    scale: Floats = non_negative(matrix, shares.sum(axis=0) / size) / size
    scale[0] = max(scale[0], _LEAST_S)
    return scale


def _model(
    options: FitOptions, seed: int, *, loss: str, quantile: float | None
) -> HistGradientBoostingRegressor:
    return HistGradientBoostingRegressor(
        loss=loss,
        quantile=quantile,
        max_iter=options.num_trees,
        max_leaf_nodes=options.num_leaves,
        max_depth=options.max_depth,
        min_samples_leaf=options.samples_per_leaf,
        learning_rate=options.learning_rate,
        early_stopping=False,
        random_state=seed,
    )


def _trees_of(
    models: list[HistGradientBoostingRegressor], levels: tuple[float, ...], scale: Floats
) -> QuantileTrees:
    # There is no public way to a model's trees; a test compares with the model's own predictions.
    outputs = [[tree.nodes for (tree,) in model._predictors] for model in models]  # noqa: SLF001
    baselines = [model._baseline_prediction.item() for model in models]  # noqa: SLF001
    return QuantileTrees(
        schema_version=SCHEMA_VERSION,
        features=FEATURES,
        levels=levels,
        scale=scale,
        baselines=np.array(baselines, dtype=np.float64),
        forest=_forest_of(outputs),
    )


def _forest_of(outputs: list[list[NDArray[np.void]]]) -> Forest:
    """All trees, one behind another."""
    trees = [tree for output in outputs for tree in output]
    flat = [_breadth_first(tree) for tree in trees]
    roots = np.cumsum([0, *(len(tree) for tree in trees)])[:-1]
    return Forest(
        starts=np.cumsum([0, *map(len, outputs)]).astype(np.uint32),
        roots=roots.astype(np.uint32),
        depths=np.array([tree["depth"].max() for tree in trees], dtype=np.uint32),
        split=np.concatenate([tree["feature_idx"] for tree, _ in flat]).astype(np.uint32),
        child=np.concatenate(
            [root + child for root, (_, child) in zip(roots, flat, strict=True)]
        ).astype(np.uint32),
        value=np.concatenate(
            [np.where(tree["is_leaf"], tree["value"], tree["num_threshold"]) for tree, _ in flat]
        ),
    )


def _breadth_first(nodes: NDArray[np.void]) -> tuple[NDArray[np.void], Indices]:
    """A tree's nodes so that siblings are neighbours; and of each its first child, or itself."""
    order = [0]
    child = np.arange(len(nodes), dtype=np.uint32)
    for place in range(len(nodes)):
        node = nodes[order[place]]
        if not node["is_leaf"]:
            child[place] = len(order)
            order += [int(node["left"]), int(node["right"])]
    return nodes[order], child
