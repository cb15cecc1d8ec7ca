"""The latency model fitted to samples of a grid, and its prediction errors."""

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from ops.profiling.grid import Sample
from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients
from solver.prediction.latency import latency_model
from solver.prediction.latency.iteration_fit import IterationFit
from solver.prediction.latency.latency_model import PredictionErrors
from solver.scheduling.engine.latency import LatencyTable

_PRIOR = LatencyCoefficients(
    constant_s=0.01, linear_s=1e-4, attention_s=1e-8, cross_s=1e-8, context_s=1e-7
)
"""
Ratios of the prior's coefficients; `_prior` sets their scale. The prior has the weight of 1/20 of
an iteration.
"""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Measured and predicted time of the iterations with equal work."""

    chunk_tokens: int
    before_tokens: int
    num_decodes: int
    decode_context_tokens: int
    """Prompt tokens of each decoding request."""
    samples: int
    measured_s: Seconds
    """Median of the measured iteration times."""
    predicted_s: Seconds


def fitted(samples: Sequence[Sample]) -> LatencyCoefficients:
    """
    Fit the latency model to all samples by robust least squares.

    Source: ConServe §4.2, a grid of (P, C).
    Decided: the samples state the context of each prefill, so that decodes in the same iteration do
        not count as its context.
    """
    fit = IterationFit(_prior(samples), window=max(1, len(samples)))
    for each in samples:
        fit.observe(each.work, each.duration_s)
    return fit.fit()


def _prior(samples: Sequence[Sample]) -> LatencyCoefficients:
    """The prior, scaled to the samples' times: a prior that is far too fast would bias the fit."""
    if not samples:
        return _PRIOR
    table = _table(_PRIOR, samples)
    pace = statistics.median(each.duration_s / _predicted_s(table, each) for each in samples)
    return LatencyCoefficients(
        **{name: pace * getattr(_PRIOR, name) for name in _PRIOR.__struct_fields__}
    )


def errors_of(repeats: Sequence[Sequence[Sample]]) -> PredictionErrors | None:
    """
    Prediction errors on the last repeat of a latency model that was fitted to the earlier repeats.
    """
    known = [each for repeat in repeats[:-1] for each in repeat]
    judged = repeats[-1]
    if not known or not judged:
        return None
    table = _table(fitted(known), [*known, *judged])
    return latency_model.errors_of(
        [_predicted_s(table, each) / each.duration_s - 1 for each in judged]
    )


def cells_of(samples: Iterable[Sample], latency: LatencyCoefficients) -> list[Cell]:
    """
    Medians of samples with equal work, sorted by batch size, context of decodes, and chunk size.
    """
    by_kind: dict[tuple[int, int, int, int], list[Sample]] = {}
    for each in samples:
        kind = (each.num_decodes, each.decode_context_tokens, each.chunk_tokens, each.before)
        by_kind.setdefault(kind, []).append(each)
    table = _table(latency, [each for alike in by_kind.values() for each in alike])
    return [
        Cell(
            num_decodes=num_decodes,
            chunk_tokens=chunk,
            before_tokens=before,
            decode_context_tokens=context,
            samples=len(alike),
            measured_s=statistics.median(each.duration_s for each in alike),
            predicted_s=statistics.median(_predicted_s(table, each) for each in alike),
        )
        for (num_decodes, context, chunk, before), alike in sorted(by_kind.items())
    ]


def _table(latency: LatencyCoefficients, samples: Sequence[Sample]) -> LatencyTable:
    most = max((each.work.tokens for each in samples), default=1)
    return LatencyTable.from_coefficients(latency, max_tokens=most)


def _predicted_s(table: LatencyTable, sample: Sample) -> Seconds:
    work = sample.work
    return table.predict_s(work.tokens, work.pairs, work.context_tokens)
