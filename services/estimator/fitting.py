"""Fits trees to samples and judges them by the latest ones. Needs scikit-learn."""

from dataclasses import dataclass
from time import perf_counter

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.estimator.artefacts import Artefact, HeldOut, LevelHeldOut
from services.estimator.observations import ProfileKey
from services.estimator.sample_files import Samples
from shared.contracts.base import Seconds, UnixTime
from solver.prediction.quantile_fit import fit_quantile_trees
from solver.prediction.quantile_judgement import (
    Judged,
    judge,
    judge_constant,
    num_learnt_of,
    relative_loss,
)
from solver.prediction.quantile_trees import Prediction, QuantileTrees, decode, encode

WORSE_MARGIN = 0.05
"""
Of the loss of the trees in force, in the mean over levels.

With equally good trees chance alone made it 0.08 at 2500 samples and 0.02 at 5000, at most, in
twelve and six simulated pairs: beyond it there is a reason.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Trees that may be put in force, and how they compare."""

    artefact: Artefact
    """Version 0: it gets its own where it is written."""
    in_force: tuple[Judged, ...]
    """The trees in force on the same samples; empty without any."""
    relative_loss: float | None
    """Of theirs, in the mean over levels; None without any."""
    num_bytes: int
    """Of the trees, as they travel."""
    fit_s: Seconds

    @property
    def is_worse(self) -> bool:
        """By more than `WORSE_MARGIN` than the trees in force."""
        return self.relative_loss is not None and self.relative_loss > 1 + WORSE_MARGIN


def fit_samples(
    key: ProfileKey, samples: Samples, in_force: Artefact | None, *, now: UnixTime
) -> Fitted:
    """
    Trees learnt of all but the latest fifth of *samples*, and judged by that.

    They are not fitted again to all of them: what was judged is what is used.

    Args:
        key: Whose samples these are.
        samples: The latest last.
        in_force: Its trees are judged by the same samples. Nor have they learnt of these, if they
            were fitted to the same files: what a later fit holds out came after what they learnt.
        now: When the artefact is made.

    Raises:
        TooFewSamplesError: There are fewer than `LEAST_SAMPLES` to learn from.
    """
    split = num_learnt_of(len(samples.prefill_s))
    began = perf_counter()
    trees = fit_quantile_trees(samples.features[:split], samples.prefill_s[:split])
    fit_s = perf_counter() - began
    features, prefill_s = samples.features[split:], samples.prefill_s[split:]
    predicted = trees.predict(features)
    judged = judge(predicted, prefill_s, trees.levels)
    constant = judge_constant(samples.prefill_s[:split], prefill_s, trees.levels)
    held_out = HeldOut(
        samples=len(prefill_s),
        levels=tuple(map(_level, judged, constant)),
        mean_ratio=_mean_ratio(predicted, float(prefill_s.sum())),
    )
    body = encode(trees)
    theirs: tuple[Judged, ...] = ()
    if in_force is not None:
        earlier = decode(bytes(in_force.trees))
        theirs = judge(earlier.predict(features), prefill_s, earlier.levels)
    return Fitted(
        artefact=_artefact(key, trees, samples.at[:split], body=body, held_out=held_out, now=now),
        in_force=theirs,
        relative_loss=relative_loss(judged, theirs),
        num_bytes=len(body),
        fit_s=fit_s,
    )


def _artefact(
    key: ProfileKey,
    trees: QuantileTrees,
    learnt_at: NDArray[np.float64],
    *,
    body: bytes,
    held_out: HeldOut,
    now: UnixTime,
) -> Artefact:
    model, engine, device = key
    return Artefact(
        model=model,
        engine=engine,
        device=device,
        version=0,
        created_at=now,
        schema_version=trees.schema_version,
        features=trees.features,
        levels=trees.levels,
        samples=len(learnt_at),
        first_at=float(np.min(learnt_at)),
        last_at=float(np.max(learnt_at)),
        held_out=held_out,
        trees=msgspec.Raw(body),
    )


def _level(judged: Judged, constant: Judged) -> LevelHeldOut:
    return LevelHeldOut(
        level=judged.level,
        loss_s=judged.loss_s,
        constant_loss_s=constant.loss_s,
        coverage=judged.coverage,
    )


def _mean_ratio(predicted: Prediction, measured_s: float) -> float:
    return float(predicted.mean_s.sum()) / measured_s
