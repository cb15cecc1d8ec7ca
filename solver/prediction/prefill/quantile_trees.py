"""Quantiles and mean of prefill times, from trees that a router evaluates for each request."""

from dataclasses import dataclass
from typing import Any, Self, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.contracts.errors import ContractError, SchemaMismatchError
from solver.prediction.prefill.features import FEATURES, SCHEMA_VERSION
from solver.prediction.prefill.tree_walk import (
    NUM_SCALE_TERMS,
    Floats,
    Forest,
    prefill_times,
    walk,
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted prefill times of one request at several candidate instances."""

    quantiles_s: NDArray[np.float64]
    """Quantiles of the prefill time, float64[num_candidates, num_levels]; no row decreases."""
    mean_s: NDArray[np.float64]
    """Mean prefill times in seconds, float64[num_candidates]."""

    def of(self, candidate: int) -> Self:
        """The prediction for one candidate, as a prediction with one row."""
        rows = slice(candidate, candidate + 1)
        return type(self)(self.quantiles_s[rows], self.mean_s[rows])


class QuantileTrees(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """
    Fitted trees as flat arrays: made by `quantile_fit`, sent in messages, evaluated by routers.

    Outputs are the quantiles of the levels in order, then the mean. Trees predict multiples of a
    scale: the seconds that a linear model predicts from prompt, cached prefix and load. Without a
    scale, trees would predict the same time for all prompts longer than the samples.

    Source: QUARTZ §3.2 and §4.2, "a compact decision tree evaluator on the router critical path".
    Differs: trees predict multiples of a scale instead of seconds.
    """

    schema_version: int
    features: tuple[str, ...]
    levels: tuple[float, ...]
    """Quantile levels of the trees, rising, 0..1."""
    scale: Floats
    """Seconds per term of `tree_walk.scale_terms`, float64[NUM_SCALE_TERMS]."""
    baselines: Floats
    """Start value of each output, to which the trees add, float64[num_outputs]."""
    forest: Forest
    """Trees of all outputs: the quantiles and the mean."""

    def predict(self, features: NDArray[np.float64]) -> Prediction:
        """
        Predict prefill times for each row of *features*, as made by `feature_matrix`.

        Rows are independent of one another; times are never negative.

        Args:
            features: float64[num_rows, num_features].
        """
        sums = walk(features, self.forest)
        times_s = np.empty_like(sums)
        prefill_times(features, self.scale, self.baselines, sums, times_s)
        return Prediction(times_s[:, :-1], times_s[:, -1])

    def column_of(self, level: float) -> int:
        """
        Column of `quantiles_s` that has the quantile of *level*.

        Raises:
            ValueError: *level* was not fitted; names the fitted levels.
        """
        if level not in self.levels:
            raise ValueError(f"no trees for level {level}; levels with trees: {self.levels}")
        return self.levels.index(level)


class _Header(msgspec.Struct):
    schema_version: int
    features: tuple[str, ...]


def encode(trees: QuantileTrees) -> bytes:
    """Encode the trees as JSON bytes; equal trees give equal bytes."""
    return msgspec.json.encode(trees, enc_hook=_listed)


def decode(body: bytes) -> QuantileTrees:
    """
    Decode the trees in *body*.

    Raises:
        SchemaMismatchError: The trees use other features; names the field and the difference.
        ContractError: The body is not JSON, or has no trees that can be evaluated.
    """
    try:
        header = msgspec.json.decode(body, type=_Header)
        SchemaMismatchError.check(
            schema_version=(SCHEMA_VERSION, header.schema_version),
            features=(FEATURES, header.features),
        )
        trees = msgspec.json.decode(body, type=QuantileTrees, dec_hook=_array)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ContractError(f"not valid quantile trees: {error}") from error
    _check(trees)
    return trees


def _listed(array: Any) -> Any:
    return array.tolist()


def _array(array_type: Any, values: Any) -> Any:
    """Copy *values* into a new array: kernels are compiled for writable, contiguous arrays."""
    element = get_args(get_args(array_type)[1])[0]
    if not isinstance(values, list):
        raise TypeError("expected a list of numbers")
    try:
        array = np.array(values, dtype=element)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"expected a list of numbers: {error}") from error
    if array.ndim != 1 or not np.all(np.isfinite(array)):
        raise ValueError("expected a list of finite numbers")
    return array


def _check(trees: QuantileTrees) -> None:
    """
    Check all indices of the trees once: an index out of range would crash a kernel, and kernels do
    not check.
    """
    outputs = len(trees.levels) + 1
    # Use signed integers, so that differences do not wrap around.
    starts, roots, depths, split, child = (
        indices.astype(np.int64) for indices in trees.forest[:-1]
    )
    nodes, own = len(child), np.arange(len(child))
    last = np.where(child == own, own, child + 1)
    sound = {
        "levels": np.all(np.diff([0.0, *trees.levels, 1.0]) > 0),
        "scale": len(trees.scale) == NUM_SCALE_TERMS and np.all(trees.scale >= 0),
        "baselines": len(trees.baselines) == outputs,
        "starts": len(starts) == outputs + 1
        and starts[0] == 0
        and starts[-1] == len(roots)
        and np.all(np.diff(starts) >= 0),
        "roots": np.all(roots < nodes),
        "depths": len(depths) == len(roots) and np.all(depths <= nodes),
        "split": len(split) == nodes and np.all(split < len(FEATURES)),
        "child": np.all(child >= own) and np.all(last < nodes),
        "value": len(trees.forest.value) == nodes,
    }
    for field, holds in sound.items():
        if not holds:
            raise ContractError(f"not valid quantile trees: {field} does not fit the other fields")
