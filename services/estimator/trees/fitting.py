"""Fits trees to samples and evaluates them on the latest samples. Needs scikit-learn."""

from dataclasses import dataclass
from time import perf_counter

import msgspec
import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray

from services.estimator.telemetry_adapters import ProfileKey
from services.estimator.trees.artefacts import Artefact, HeldOut, LevelHeldOut
from services.estimator.trees.sample_files import Samples
from shared.contracts.base import Seconds, UnixTime
from solver.prediction.prefill.quantile_fit import fit_quantile_trees
from solver.prediction.prefill.quantile_judgement import (
    Judged,
    judge,
    num_training_of,
    relative_loss,
)
from solver.prediction.prefill.quantile_trees import decode, encode

WORSE_MARGIN = 0.05
"""
Margin by which the loss may exceed the loss of the trees in force, averaged over levels.

Between equally good trees the excess was at most 0.08 with 2500 samples (twelve simulated pairs)
and 0.02 with 5000 samples (six pairs).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Fitted trees, compared with the trees in force."""

    artefact: Artefact
    """The fitted trees with version 0; the version is assigned when the artefact is written."""
    in_force: tuple[Judged, ...]
    """
    Quality of the trees in force on the same held-out samples; empty if no trees are in force.
    """
    relative_loss: float | None
    """
    Loss of the fitted trees as a multiple of the loss of the trees in force, averaged over levels;
    None without trees in force.
    """
    num_bytes: int
    """Size of the encoded trees."""
    fit_s: Seconds

    @property
    def is_worse(self) -> bool:
        """True if the loss exceeds the loss of the trees in force by more than `WORSE_MARGIN`."""
        return self.relative_loss is not None and self.relative_loss > 1 + WORSE_MARGIN


def fit_samples(
    key: ProfileKey, samples: Samples, in_force: Artefact | None, *, now: UnixTime
) -> Fitted:
    """
    Trees fitted to all but the latest fifth of *samples*, and evaluated on that fifth.

    The evaluated trees are used as they are; they are not fitted again to all samples.

    Args:
        key: Key of the samples.
        samples: Samples in order of time, the latest last.
        in_force: Trees in force, evaluated on the same held-out samples, which arrived after the
            fit of these trees.
        now: Creation time of the artefact.

    Raises:
        TooFewSamplesError: There are fewer than `LEAST_SAMPLES` training samples.
    """
    split = num_training_of(len(samples.prefill_s))
    began = perf_counter()
    trees = fit_quantile_trees(samples.features[:split], samples.prefill_s[:split])
    fit_s = perf_counter() - began
    features, prefill_s = samples.features[split:], samples.prefill_s[split:]
    predicted = trees.predict(features)
    judged = judge(predicted.quantiles_s, prefill_s, trees.levels)
    constants_s = np.quantile(samples.prefill_s[:split], trees.levels).astype(np.float64)
    constant = judge(constants_s[np.newaxis], prefill_s, trees.levels)
    held_out = HeldOut(
        samples=len(prefill_s),
        levels=tuple(
            LevelHeldOut(**asdict(each), constant_loss_s=other.loss_s)
            for each, other in zip(judged, constant, strict=True)
        ),
        mean_ratio=float(predicted.mean_s.sum()) / float(prefill_s.sum()),
    )
    body = encode(trees)
    theirs: tuple[Judged, ...] = ()
    if in_force is not None:
        earlier = decode(bytes(in_force.trees))
        theirs = judge(earlier.predict(features).quantiles_s, prefill_s, earlier.levels)
    return Fitted(
        artefact=_artefact(key, samples.at[:split], body=body, held_out=held_out, now=now),
        in_force=theirs,
        relative_loss=relative_loss(judged, theirs),
        num_bytes=len(body),
        fit_s=fit_s,
    )


def _artefact(
    key: ProfileKey,
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
        samples=len(learnt_at),
        first_at=float(np.min(learnt_at)),
        last_at=float(np.max(learnt_at)),
        held_out=held_out,
        trees=msgspec.Raw(body),
    )
