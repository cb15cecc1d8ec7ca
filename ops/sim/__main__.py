"""`python -m ops.sim`: how many GPUs are needed, and who misses."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ops.sim.arguments import parser, scenario
from ops.sim.cluster import Outcome
from ops.sim.report import plot, print_table
from ops.sim.scenario import Scenario
from ops.sim.search import highest_rate, least_replicas
from ops.sim.summary import summarize

USAGE_ERROR = 2
_TOLERANCE = 0.02
"""Of a found goodput, as a share of `--qps`."""


_LONG_ENOUGH = 4
"""Targets that a run should last, so that work put off is not work saved."""


class _SearchError(Exception):
    """Nothing that was tried is good enough."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate; 0 ok, 1 a search found nothing, 2 wrong usage."""
    options = parser().parse_args(arguments)
    try:
        found, asked = _searched(scenario(options), options)
        outcome = asked.run()
    except _SearchError as error:
        print(error, file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR
    if asked.duration_s < _LONG_ENOUGH * max(_targets_s(outcome), default=0.0):
        print(
            "note: the run is short for its longest target; batch work can wait until after its "
            "end, so a steady load needs more than this says",
            file=sys.stderr,
        )
    replicas = sum(count for _, _, count in asked.silo) or asked.replicas
    policy = "silo" if asked.silo else asked.policy
    title = f"{policy} on {replicas} x {asked.profile.name}"
    figures = found | summarize(outcome)
    if options.plot:
        plot(outcome, options.plot, title)
    if options.json:
        described = {"policy": policy, "profile": asked.profile.name, "replicas": replicas}
        print(msgspec.json.encode(described | figures).decode())
        return 0
    for name, value in found.items():
        print(f"{name}: {value:.4g} (at most {options.allowed:.2%} missed)")
    print_table(figures, title)
    return 0


def _targets_s(outcome: Outcome) -> set[float]:
    """Times that requests may take, without best effort."""
    return {
        allowed_s
        for request in outcome.requests
        if (allowed_s := request.deadline_at - request.arrival.arrived_at) != float("inf")
    }


def _searched(asked: Scenario, options: argparse.Namespace) -> tuple[dict[str, Any], Scenario]:
    """What a search found, and the scenario with it."""
    if options.find_replicas:
        if options.find_goodput or asked.silo:
            raise ValueError("--find-replicas excludes --find-goodput and --silo")
        least = least_replicas(asked.violations_with(), allowed=options.allowed, most=options.most)
        if least is None:
            raise _SearchError(f"{options.most} replicas are not enough")
        return {"least_replicas": least}, replace(asked, replicas=least)
    if options.find_goodput:
        if asked.wave or asked.trace_times:
            raise ValueError("--find-goodput needs a steady load")
        rate_rps = highest_rate(
            asked.violations_at(),
            allowed=options.allowed,
            low_rps=0.0,
            high_rps=4 * asked.rate_rps,
            tolerance_rps=_TOLERANCE * asked.rate_rps,
        )
        if rate_rps <= 0:
            raise _SearchError("no rate is low enough")
        return {"goodput_rps_at_allowed": rate_rps}, replace(asked, rate_rps=rate_rps)
    return {}, asked


if __name__ == "__main__":
    raise SystemExit(main())
