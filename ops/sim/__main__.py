"""
`headway simulate`, also `python -m ops.sim`: computes the number of GPUs for a load, and SLO
misses.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.status import Status

from ops.sim.arguments import parser, scenario
from ops.sim.cluster import Outcome
from ops.sim.report import print_comparison, print_table
from ops.sim.scenario import Scenario
from ops.sim.search import highest_rate, least_replicas
from ops.sim.summary import summarize

_Number = TypeVar("_Number", int, float)
USAGE_ERROR = 2
_TOLERANCE = 0.02
"""Tolerance of the goodput that a search finds, as a share of `--qps`."""
_LONG_ENOUGH = 4
"""
Duration that a run should have, as a multiple of the longest target; in shorter runs, overload only
delays requests.
"""


class _SearchError(Exception):
    """A search found no value that meets the allowed share of misses."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulator; return 0 (success), 1 (a search found no value) or 2 (wrong usage)."""
    options = parser().parse_args(arguments)
    # Progress is shown on a terminal only.
    with Console(stderr=True).status("reading") as status:
        try:
            asked = scenario(options)
            if options.compare:
                title, rows = _compared(asked, options, status)
            else:
                title, figures, outcome, asked = _simulated(asked, options, status)
        except _SearchError as error:
            print(error, file=sys.stderr)
            return 1
        except (ValueError, OSError) as error:
            print(f"headway simulate: {error}", file=sys.stderr)
            return USAGE_ERROR
    if options.compare:
        if options.json:
            print(msgspec.json.encode({"compared": rows}).decode())
        else:
            print_comparison(rows, title)
        return 0
    _warn_of_short(asked, outcome)
    if options.json:
        print(msgspec.json.encode(figures).decode())
    else:
        for name in ("least_replicas", "goodput_rps_at_allowed"):
            if name in figures:
                print(f"{name}: {figures[name]:.4g} (at most {options.allowed:.2%} missed)")
        print_table(figures, title)
    return _drawn(asked, outcome, options, title) if options.plot else 0


def _simulated(
    asked: Scenario, options: argparse.Namespace, status: Status
) -> tuple[str, dict[str, Any], Outcome, Scenario]:
    """Title, figures, outcome and scenario of a simulation, after the requested search."""
    found, asked = _searched(asked, options, status)
    status.update(f"simulating {_title(asked)}")
    outcome = asked.run()
    described = {
        "policy": _policy(asked),
        "profile": asked.profile.name,
        "replicas": _num_replicas(asked),
        "dispatch": "round-robin" if asked.pull is None else "pull",
        "window": None if asked.pull is None else asked.pull.bounds.window,
    }
    return _title(asked), described | found | summarize(outcome), outcome, asked


def _compared(
    asked: Scenario, options: argparse.Namespace, status: Status
) -> tuple[str, list[dict[str, Any]]]:
    """Title, and figures of each compared policy."""
    if asked.silo or options.plot:
        raise ValueError("--compare excludes --silo and --plot")
    rows = []
    for name in options.compare.split(","):
        _, figures, _, _ = _simulated(replace(asked, policy=name.strip()), options, status)
        rows.append(figures)
    return f"{asked.rate_rps:g} requests/s, {asked.profile.name}", rows


def _drawn(asked: Scenario, outcome: Outcome, options: argparse.Namespace, title: str) -> int:
    """Draw the picture; return exit code 1 if the file cannot be written."""
    from ops.sim.picture import capacity_tokens_per_s, draw  # noqa: PLC0415 - slow to import

    if not outcome.requests:
        print("note: the plot is not written, since there are no requests", file=sys.stderr)
        return 0
    capacity = capacity_tokens_per_s(asked.profile.latency, _num_replicas(asked))
    try:
        draw(outcome, options.plot, title=title, capacity=capacity)
    except OSError as error:
        print(f"headway simulate: --plot: {error}", file=sys.stderr)
        return 1
    return 0


def _title(asked: Scenario) -> str:
    return f"{_policy(asked)} on {_num_replicas(asked)} x {asked.profile.name}"


def _policy(asked: Scenario) -> str:
    return "silo" if asked.silo else asked.policy


def _num_replicas(asked: Scenario) -> int:
    return sum(count for _, _, count in asked.silo) or asked.replicas


def _warn_of_short(asked: Scenario, outcome: Outcome) -> None:
    if asked.duration_s < _LONG_ENOUGH * max(_targets_s(outcome), default=0.0):
        print(
            "note: the run is short for its longest target; batch work can wait until after the "
            "end of the run, so a steady load needs more replicas, or allows a lower rate",
            file=sys.stderr,
        )


def _targets_s(outcome: Outcome) -> set[float]:
    """Set of the requests' targets in seconds, without best effort."""
    return {
        allowed_s
        for request in outcome.requests
        if (allowed_s := request.deadline_at - request.arrival.arrived_at) != float("inf")
    }


def _searched(
    asked: Scenario, options: argparse.Namespace, status: Status
) -> tuple[dict[str, Any], Scenario]:
    """Figures of the result of a search, and the scenario with this result."""
    if options.find_replicas:
        if options.find_goodput or asked.silo:
            raise ValueError("--find-replicas excludes --find-goodput and --silo")
        violations = _with_progress(asked.violations_with(), status, "replicas")
        least = least_replicas(violations, allowed=options.allowed, most=options.most)
        if least is None:
            raise _SearchError(f"{options.most} replicas are not enough")
        return {"least_replicas": least}, replace(asked, replicas=least)
    if options.find_goodput:
        if asked.wave or asked.trace_times:
            raise ValueError("--find-goodput needs a steady load")
        rate_rps = highest_rate(
            _with_progress(asked.violations_at(), status, "requests/s"),
            allowed=options.allowed,
            low_rps=0.0,
            high_rps=4 * asked.rate_rps,
            tolerance_rps=_TOLERANCE * asked.rate_rps,
        )
        if rate_rps <= 0:
            raise _SearchError("even the lowest rate has too many misses")
        return {"goodput_rps_at_allowed": rate_rps}, replace(asked, rate_rps=rate_rps)
    return {}, asked


def _with_progress(
    violations: Callable[[_Number], float], status: Status, unit: str
) -> Callable[[_Number], float]:
    """Function as *violations* that also prints progress for each step of a search."""

    def reporting(value: _Number) -> float:
        status.update(f"trying {value:.4g} {unit}")
        missed = violations(value)
        if status.console.is_terminal:
            status.console.print(f"{value:.4g} {unit}: {missed:.2%} missed", style="dim")
        return missed

    return reporting


if __name__ == "__main__":
    raise SystemExit(main())
