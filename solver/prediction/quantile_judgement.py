"""How good quantiles of prefill times are, on requests that they were not learnt of."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver.prediction.quantile_trees import Prediction

Floats = NDArray[np.float64]

HELD_OUT = 5
"""One in so many samples is to judge by: the latest ones, since what comes next is like them."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Quantiles of one level, held against what came."""

    level: float
    loss_s: float
    """Mean pinball loss; only the true quantile has the least."""
    coverage: float
    """Share of requests within the quantile, 0..1."""


def num_learnt_of(num_samples: int) -> int:
    """How many of *num_samples*, the oldest, are to learn from; the rest is to judge by."""
    return num_samples - num_samples // HELD_OUT


def pinball_loss_s(quantile_s: Floats, prefill_s: Floats, level: float) -> float:
    """
    Mean of level · what exceeds the quantile plus (1 - level) · what stays below it, in s.

    Args:
        quantile_s: float64[num_samples], or one for all of them.
        prefill_s: float64[num_samples], measured; at least one.
        level: Of the quantile, 0..1.

    Source: QUARTZ §3.2; Koenker and Bassett 1978.
    """
    over_s = prefill_s - quantile_s
    return float(np.mean(np.maximum(level * over_s, (level - 1.0) * over_s)))


def judge(predicted: Prediction, prefill_s: Floats, levels: Sequence[float]) -> tuple[Judged, ...]:
    """
    Each level's quantiles against measured times.

    Args:
        predicted: Rows are samples, columns levels.
        prefill_s: float64[num_samples]; at least one.
        levels: Those of the columns.
    """
    columns = zip(levels, predicted.quantiles_s.T, strict=True)
    return tuple(_judged(level, quantile_s, prefill_s) for level, quantile_s in columns)


def judge_constant(
    learnt_s: Floats, prefill_s: Floats, levels: Sequence[float]
) -> tuple[Judged, ...]:
    """
    The same of who knows nothing of a request: the quantiles of *learnt_s*, for every one.

    Args:
        learnt_s: float64[num_learnt], times to learn from.
        prefill_s: float64[num_samples], times to judge by.
        levels: Rising, 0..1.
    """
    return tuple(
        _judged(level, np.quantile(learnt_s, level, keepdims=True), prefill_s) for level in levels
    )


def relative_loss(judged: Sequence[Judged], other: Sequence[Judged]) -> float | None:
    """
    Loss as a multiple of *other*'s, in the mean over the levels that both have; None without any.

    Multiples, since losses of high levels are a few times those of low ones, for no merit.
    """
    theirs = {each.level: each.loss_s for each in other}
    multiples = [
        _multiple(each.loss_s, theirs[each.level]) for each in judged if each.level in theirs
    ]
    return float(np.mean(multiples)) if multiples else None


def _judged(level: float, quantile_s: Floats, prefill_s: Floats) -> Judged:
    return Judged(
        level=level,
        loss_s=pinball_loss_s(quantile_s, prefill_s, level),
        coverage=float(np.mean(prefill_s <= quantile_s)),
    )


def _multiple(loss_s: float, other_s: float) -> float:
    if loss_s == other_s:
        return 1.0
    return loss_s / other_s if other_s > 0 else np.inf
