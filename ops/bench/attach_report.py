"""The report of the bench of attached servers."""

import statistics
from collections.abc import Mapping, Sequence

from ops.bench.attach_rounds import NUM_BATCH, ORACLE, OURS, OWN, Round
from ops.bench.result import Line, Result

AT = (0.4, 0.5)
"""Shares at which the mesh has a bound."""
MOST_MISSED_RATIO, MOST_BATCH_RATIO = 0.6, 1 / 0.95
NO_BASELINES = (OURS, OWN, ORACLE)
Pair = tuple[Round, Round]
"""Rounds of the better baseline and of the mesh, one directly after the other."""
Rounds = dict[tuple[float, int], dict[str, Round]]
"""(Share of misses of the better baseline, number of the seed) -> arm -> its round."""


def report(
    result: Result, rounds: Rounds, pairs: Mapping[int, Sequence[Pair]], shares: Sequence[float]
) -> None:
    """
    Add figures and acceptance lines.

    Args:
        result: Result of the bench.
        rounds: Rounds of all arms.
        pairs: Number of open batch requests -> pairs of rounds.
        shares: Shares of misses of the better baseline.
    """
    for share in shares:
        of_share = [each for (at, _), each in rounds.items() if at == share]
        for name in of_share[0]:
            every = [each[name] for each in of_share]
            result.figures[f"missed at {share:.0%}, {name}"] = [round(e.missed, 3) for e in every]
            if name == ORACLE:  # it serves nothing else
                continue
            result.figures[f"missed at {share:.0%}, {name}, of what the oracle serves in time"] = [
                round(each[name].missed_of([not late for late in each[ORACLE].late]), 3)
                for each in of_share
            ]
            result.figures[f"Q2 missed at {share:.0%}, {name}"] = [
                round(each.missed_q2, 3) for each in every
            ]
            result.figures[f"batch tokens per CPU s at {share:.0%}, {name}"] = [
                round(each.batch_per_cpu_s, 1) for each in every
            ]
        result.figures[f"missed at {share:.0%}, oracle / better baseline"] = [
            round(each[ORACLE].missed / max(1e-9, _better(each).missed), 3) for each in of_share
        ]
        result.figures[f"mesh, cores at {share:.0%}"] = [
            round(each[OURS].mesh_cores, 2) for each in of_share
        ]
    for share in AT:
        ratios = [
            each[OURS].missed / max(1e-9, _better(each).missed)
            for (at, _), each in rounds.items()
            if at == share
        ]
        result.lines.append(
            Line(
                name=f"missed, headway / better baseline, where it misses {share:.0%}",
                value=statistics.median(ratios) if ratios else None,
                bound=MOST_MISSED_RATIO,
            )
        )
    for num_batch, each in pairs.items():
        result.figures[
            f"batch tokens per CPU s with {num_batch} open, better baseline / headway"
        ] = [round(batch_ratio(*pair), 3) for pair in each]
    found = [batch_ratio(_better(each), each[OURS]) for each in rounds.values()]
    found += [batch_ratio(*pair) for pair in pairs.get(NUM_BATCH, ())]
    result.lines.append(
        Line(
            name="batch tokens per CPU second of the servers, better baseline / headway",
            value=statistics.median(found),
            bound=MOST_BATCH_RATIO,
        )
    )


def batch_ratio(baseline: Round, ours: Round) -> float:
    """Batch tokens per CPU second of *baseline*, as a multiple of those of *ours*."""
    return baseline.batch_per_cpu_s / max(1e-9, ours.batch_per_cpu_s)


def _better(arms: Mapping[str, Round]) -> Round:
    """The round of the baseline that misses the fewest interactive targets."""
    return min(
        (each for name, each in arms.items() if name not in NO_BASELINES),
        key=lambda each: each.missed,
    )
