"""The report of the bench of attached servers."""

import statistics
from collections.abc import Mapping, Sequence

from ops.bench.attach_rounds import ORACLE, OURS, OWN, Round
from ops.bench.result import Line, Result

AT = (0.4, 0.5)
"""Shares at which the mesh has a bound."""
MOST_MISSED_RATIO, MOST_BATCH_RATIO = 0.6, 1 / 0.95
NO_BASELINES = (OURS, OWN, ORACLE)
Pair = tuple[Round, Round]
"""Rounds of a baseline and of the mesh, one directly after the other."""
Rounds = dict[tuple[float, int], dict[str, Round]]
"""(Share of misses of the baseline, number of the seed) -> arm -> its round."""


def report(result: Result, rounds: Rounds, pairs: Sequence[Pair], shares: Sequence[float]) -> None:
    """
    Add figures and acceptance lines.

    Misses are compared in the mean over the seeds: the better baseline of a single round would be
    the one that was lucky in it.

    Args:
        result: Result of the bench.
        rounds: Rounds of all arms.
        pairs: Further pairs for the batch work.
        shares: Shares of misses of the baseline.
    """
    missed_ratios: dict[float, float] = {}
    batch_ratios = [batch_ratio(*pair) for pair in pairs]
    if pairs:
        name = "batch tokens per CPU s of pairs, baseline / headway"
        result.figures[name] = _rounded(batch_ratios)
    for share in shares:
        of_share = [each for (at, _), each in rounds.items() if at == share]
        better = _better(of_share)
        result.figures[f"better baseline at {share:.0%}"] = better
        for name in of_share[0]:
            _add_arm(result, f"at {share:.0%}, {name}", name, of_share)
        result.figures[f"missed at {share:.0%}, oracle / better baseline"] = round(
            _missed_ratio(of_share, ORACLE, better), 3
        )
        cores = [each[OURS].mesh_cores for each in of_share]
        if any(cores):  # a simulated mesh uses none
            result.figures[f"mesh, cores at {share:.0%}"] = _rounded(cores)
        batch_ratios += [batch_ratio(each[better], each[OURS]) for each in of_share]
        missed_ratios[share] = _missed_ratio(of_share, OURS, better)
    for share in AT:
        result.lines.append(
            Line(
                name=f"missed, headway / better baseline, where it misses {share:.0%}",
                value=missed_ratios.get(share),
                bound=MOST_MISSED_RATIO,
            )
        )
    result.lines.append(
        Line(
            name="batch tokens per CPU second of the servers, better baseline / headway",
            value=statistics.median(batch_ratios),
            bound=MOST_BATCH_RATIO,
        )
    )


def batch_ratio(baseline: Round, ours: Round) -> float:
    """Batch tokens per CPU second of *baseline*, as a multiple of those of *ours*."""
    return baseline.batch_per_cpu_s / max(1e-9, ours.batch_per_cpu_s)


def _add_arm(result: Result, title: str, name: str, rounds: Sequence[Mapping[str, Round]]) -> None:
    """Add the figures of one arm under one load, one value for each seed."""
    every = [each[name] for each in rounds]
    result.figures[f"missed {title}"] = _rounded([each.missed for each in every])
    if name == ORACLE:  # it serves nothing else
        return
    result.figures[f"missed {title}, of what the oracle serves in time"] = _rounded(
        [each[name].missed_of([not late for late in each[ORACLE].late]) for each in rounds]
    )
    result.figures[f"Q2 missed {title}"] = _rounded([each.missed_q2 for each in every])
    result.figures[f"batch tokens per CPU s {title}"] = _rounded(
        [each.batch_per_cpu_s for each in every]
    )


def _missed_ratio(rounds: Sequence[Mapping[str, Round]], name: str, baseline: str) -> float:
    """Misses of an arm as a multiple of those of *baseline*, over all *rounds*."""
    return _missed(rounds, name) / max(1e-9, _missed(rounds, baseline))


def _missed(rounds: Sequence[Mapping[str, Round]], name: str) -> float:
    return statistics.mean([each[name].missed for each in rounds])


def _better(rounds: Sequence[Mapping[str, Round]]) -> str:
    """The baseline that misses the fewest interactive targets."""
    names = [name for name in rounds[0] if name not in NO_BASELINES]
    return min(names, key=lambda name: _missed(rounds, name))


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(each, 3) for each in values]
