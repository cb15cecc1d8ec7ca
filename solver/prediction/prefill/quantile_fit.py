"""Fits prefill-time quantiles to measured samples (QUARTZ §3.2). Needs scikit-learn."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits

from shared.contracts.errors import TooFewSamplesError
from solver.prediction.least_squares import non_negative
from solver.prediction.prefill.features import FEATURES, SCHEMA_VERSION
from solver.prediction.prefill.quantile_trees import QuantileTrees
from solver.prediction.prefill.tree_walk import Floats, Forest, Indices, scale_terms

LEAST_SAMPLES = 400
"""
Least samples of a fit: twenty samples are above the 0.95 quantile. With fewer samples the fit of
this quantile would be arbitrary.
"""
_LEAST_S = 1e-6
"""Least prefill time of a sample; shorter times are below the resolution of clocks."""


def fit_quantile_trees(
    features: NDArray[np.float64],
    prefill_s: NDArray[np.float64],
    *,
    levels: Sequence[float] = (0.5, 0.9, 0.95),
    seed: int = 0,
) -> QuantileTrees:
    """
    Fit trees for the quantile of each level, by pinball loss, and for the mean, by squared loss.

    The scale is fitted first, by non-negative least squares of relative errors. Then samples are
    divided by their scale. Quantiles are fitted to logarithms of these multiples, because quantiles
    commute with monotone functions. The mean is fitted to the multiples themselves, because a mean
    only commutes with the scale.

    Args:
        features: float64[num_samples, num_features], columns as in `FEATURES`.
        prefill_s: float64[num_samples], from first scheduled to first token, without the time
            that the request was preempted.
        levels: Rising, 0..1.
        seed: Seed of the fit; equal samples with equal seeds give equal trees.

    Raises:
        TooFewSamplesError: There are fewer than `LEAST_SAMPLES`.
        ValueError: Shapes do not fit, a value is not finite, or the levels do not rise.

    Source: QUARTZ §3.2: pinball loss (Bauer et al. 2024).
    Differs: trees are fitted to multiples of a scale, see `QuantileTrees`.
    """
    _check(features, prefill_s, levels)
    features = np.ascontiguousarray(features, dtype=np.float64)
    scale = _scale_of(features, np.maximum(prefill_s, _LEAST_S))
    ratios = np.maximum(prefill_s, _LEAST_S) / (scale_terms(features) @ scale)
    # Use one thread: on a busy machine, threads wait for one another a hundred times as long as
    # they compute.
    with threadpool_limits(limits=1):
        models = [
            _model(seed, loss="quantile", quantile=level).fit(features, np.log(ratios))
            for level in levels
        ]
        mean = _model(seed, loss="squared_error", quantile=None).fit(features, ratios)
    return _trees_of([*models, mean], tuple(levels), scale)


def _check(features: Floats, prefill_s: Floats, levels: Sequence[float]) -> None:
    if features.shape != (len(prefill_s), len(FEATURES)):
        raise ValueError(
            f"features have shape {features.shape}; expected {(len(prefill_s), len(FEATURES))}"
        )
    if len(prefill_s) < LEAST_SAMPLES:
        raise TooFewSamplesError(samples=len(prefill_s), least=LEAST_SAMPLES)
    if not (np.all(np.isfinite(features)) and np.all(np.isfinite(prefill_s))):
        raise ValueError("features and times must be finite")
    if not levels or np.any(np.diff([0.0, *levels, 1.0]) <= 0):
        raise ValueError(f"levels must rise between 0 and 1; they are {tuple(levels)}")


def _scale_of(features: Floats, prefill_s: Floats) -> Floats:
    """
    Fitted seconds per term of the scale, float64[NUM_SCALE_TERMS], none negative, the first term
    positive.
    """
    shares = scale_terms(features) / prefill_s[:, None]
    scale = non_negative(shares.T @ shares, shares.sum(axis=0), ridge=1e-9)
    scale[0] = max(scale[0], _LEAST_S)
    return scale


def _model(seed: int, *, loss: str, quantile: float | None) -> HistGradientBoostingRegressor:
    """
    Fit the trees of one output; trees of this size are evaluated for 16 candidates in tens of
    microseconds.

    The depth is limited, because the deepest path determines the time of all candidates. A leaf has
    enough samples that two of them are above the 0.95 quantile.
    """
    return HistGradientBoostingRegressor(
        loss=loss,
        quantile=quantile,
        max_iter=60,
        max_leaf_nodes=15,
        max_depth=5,
        min_samples_leaf=40,
        learning_rate=0.1,
        early_stopping=False,
        random_state=seed,
    )


def _trees_of(
    models: list[HistGradientBoostingRegressor], levels: tuple[float, ...], scale: Floats
) -> QuantileTrees:
    # There is no public access to a model's trees; a test compares with the model's own
    # predictions.
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
    """Concatenate all trees into flat arrays."""
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
    """
    Order of a tree's nodes with siblings adjacent, and for each node its first child; a leaf is its
    own child.
    """
    order = [0]
    child = np.arange(len(nodes), dtype=np.uint32)
    for place in range(len(nodes)):
        node = nodes[order[place]]
        if not node["is_leaf"]:
            child[place] = len(order)
            order += [int(node["left"]), int(node["right"])]
    return nodes[order], child
