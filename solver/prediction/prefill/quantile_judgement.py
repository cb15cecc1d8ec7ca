"""Quality of prefill-time quantiles on held-out requests."""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

HELD_OUT = 5
"""
Inverse of the share of samples that are held out: the latest samples, which resemble future
requests most.
"""


class Judged(msgspec.Struct, frozen=True):
    """Quality of the quantiles of one level, compared with measured times."""

    level: float
    loss_s: float
    """Mean pinball loss in seconds; the true quantile minimises the loss."""
    coverage: float
    """Share of requests whose measured time is within the quantile, 0..1."""


def num_training_of(num_samples: int) -> int:
    """
    Number of the oldest of *num_samples* samples that are used for training; the others are held
    out.
    """
    return num_samples - num_samples // HELD_OUT


def pinball_loss_s(quantile_s: Floats, prefill_s: Floats, level: float) -> float:
    """
    Pinball loss in s: mean of level · excess over the quantile + (1 - level) · distance below it.

    Args:
        quantile_s: float64[num_samples], or one value for all samples.
        prefill_s: float64[num_samples], measured; at least one.
        level: Level of the quantile, 0..1.

    Source: QUARTZ §3.2; Koenker and Bassett 1978.
    """
    over_s = prefill_s - quantile_s
    return float(np.mean(np.maximum(level * over_s, (level - 1.0) * over_s)))


def judge(quantiles_s: Floats, prefill_s: Floats, levels: Sequence[float]) -> tuple[Judged, ...]:
    """
    Compare each level's quantiles with measured times.

    Args:
        quantiles_s: float64[num_samples, num_levels]; one row is a constant for all samples.
        prefill_s: float64[num_samples]; at least one.
        levels: Levels of the columns.
    """
    return tuple(
        Judged(
            level=level,
            loss_s=pinball_loss_s(quantile_s, prefill_s, level),
            coverage=float(np.mean(prefill_s <= quantile_s)),
        )
        for level, quantile_s in zip(levels, quantiles_s.T, strict=True)
    )


def relative_loss(judged: Sequence[Judged], other: Sequence[Judged]) -> float | None:
    """
    Mean ratio of the losses of *judged* and *other* over common levels; None without common levels.

    Ratios are averaged, because losses of different levels differ by a factor of a few.
    """
    theirs = {each.level: each.loss_s for each in other}
    multiples = [
        _multiple(each.loss_s, theirs[each.level]) for each in judged if each.level in theirs
    ]
    return float(np.mean(multiples)) if multiples else None


def _multiple(loss_s: float, other_s: float) -> float:
    if loss_s == other_s:
        return 1.0
    return loss_s / other_s if other_s > 0 else np.inf
