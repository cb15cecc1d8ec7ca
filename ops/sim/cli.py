"""`headway simulate`: computes the number of GPUs for a load, and SLO misses."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rich.console import Console
from rich.status import Status

from ops.sim.cluster import Outcome
from ops.sim.options import SimulateOptions, scenario
from ops.sim.report import print_comparison, print_table
from ops.sim.scenario import Scenario
from ops.sim.search import highest_rate, least_replicas
from ops.sim.summary import summarize
from shared.contracts.errors import MeshError, SettingsError
from shared.runtime.cli import print_data
from shared.runtime.lifecycle import EXIT_OK
from shared.runtime.program import verb

_EXAMPLES = """\
Replicas are simulated with the policies that agents and engines run.

examples:
  How many GPUs serve 20 requests/s with at most 1 % missed targets?
    headway simulate --qps 20 --hours 2 --find-replicas

  Which targets are missed on four GPUs, and when?
    headway simulate --qps 20 --hours 2 --replicas 4 --plot misses.png

  Traffic of a trace, on an engine that the estimator has measured:
    headway-estimator show --json | head -1 > engine.json
    headway simulate --trace mine.csv --trace-times --profile engine.json \\
      --find-replicas

  Compare policies, one row each:
    headway simulate --qps 6 --compare sarathi-fcfs,sarathi-edf,qoserve,adaptive

  Replicas that pull late from shared lanes, as agents do, in a smaller window:
    headway simulate --qps 20 --replicas 5 --window 16

  How much load can three GPUs serve if 1 in 1000 requests may miss its target?
    headway simulate --replicas 3 --find-goodput --allowed 0.001 --qps 10

exit codes: 0 done, 1 a search found nothing, 2 usage or an unreadable file"""
_Number = TypeVar("_Number", int, float)
_DEFAULTS = SimulateOptions()
_TOLERANCE = 0.02
"""Tolerance of the goodput that a search finds, as a share of `--qps`."""
_LONG_ENOUGH = 4
"""
Duration that a run should have, as a multiple of the longest target; in shorter runs, overload only
delays requests.
"""


@dataclass(frozen=True, slots=True)
class _Simulated:
    """A simulation that has ended."""

    asked: Scenario
    outcome: Outcome
    figures: dict[str, Any]
    """What `--json` prints, with the result of a search."""


def simulate(*, options: SimulateOptions = _DEFAULTS) -> int:
    """
    Predict the number of GPUs that a workload needs, and its SLO violations.

    Raises:
        SettingsError: Options exclude each other, or a file cannot be read.
        MeshError: A search found no value, or the plot cannot be written.
    """
    if options.compare:
        _compare(options)
        return EXIT_OK
    with _progress() as status:
        done = _simulated(scenario(options), options, status)
    _warn_of_short(done.asked, done.outcome)
    if options.json:
        print_data(done.figures, as_json=True)
    else:
        for name in ("least_replicas", "goodput_rps_at_allowed"):
            if name in done.figures:
                print(f"{name}: {done.figures[name]:.4g} (at most {options.allowed:.2%} missed)")
        print_table(done.figures, _title(done.asked))
    _draw(done, options)
    return EXIT_OK


SIMULATE = verb("simulate", simulate, examples=_EXAMPLES)


def _compare(options: SimulateOptions) -> None:
    """Print figures of each compared policy."""
    with _progress() as status:
        asked = scenario(options)
        if asked.silo or options.plot:
            raise SettingsError("--compare excludes --silo and --plot")
        rows = [
            _simulated(replace(asked, policy=name), options, status).figures
            for name in options.compare
        ]
    if options.json:
        print_data({"compared": rows}, as_json=True)
    else:
        print_comparison(rows, f"{asked.rate_rps:g} requests/s, {asked.profile.name}")


@contextmanager
def _progress() -> Iterator[Status]:
    """
    Progress of a simulation, on a terminal only.

    Raises:
        SettingsError: The simulation cannot use a value or a file.
    """
    with Console(stderr=True).status("reading") as status:
        try:
            yield status
        except (ValueError, OSError) as error:
            raise SettingsError(str(error)) from error


def _simulated(asked: Scenario, options: SimulateOptions, status: Status) -> _Simulated:
    """A simulation after the requested search."""
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
    return _Simulated(asked, outcome, described | found | summarize(outcome))


def _draw(done: _Simulated, options: SimulateOptions) -> None:
    """
    Draw the plot, if one is requested.

    Raises:
        MeshError: The file cannot be written.
    """
    if options.plot is None:
        return
    from ops.sim.picture import capacity_tokens_per_s, draw  # noqa: PLC0415 - slow to import

    asked = done.asked
    if not done.outcome.requests:
        print("note: the plot is not written, since there are no requests", file=sys.stderr)
        return
    capacity = capacity_tokens_per_s(asked.profile.latency, _num_replicas(asked))
    try:
        draw(done.outcome, options.plot, title=_title(asked), capacity=capacity)
    except OSError as error:
        raise MeshError(f"--plot: {error}") from error


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
    asked: Scenario, options: SimulateOptions, status: Status
) -> tuple[dict[str, Any], Scenario]:
    """
    Figures of the result of a search, and the scenario with this result.

    Raises:
        SettingsError: The search excludes other options.
        MeshError: No value meets the allowed share of misses.
    """
    if options.find_replicas:
        if options.find_goodput or asked.silo:
            raise SettingsError("--find-replicas excludes --find-goodput and --silo")
        violations = _with_progress(asked.violations_with(), status, "replicas")
        least = least_replicas(violations, allowed=options.allowed, most=options.most)
        if least is None:
            raise MeshError(f"{options.most} replicas are not enough")
        return {"least_replicas": least}, replace(asked, replicas=least)
    if options.find_goodput:
        if asked.wave or asked.trace_times:
            raise SettingsError("--find-goodput needs a steady load")
        rate_rps = highest_rate(
            _with_progress(asked.violations_at(), status, "requests/s"),
            allowed=options.allowed,
            low_rps=0.0,
            high_rps=4 * asked.rate_rps,
            tolerance_rps=_TOLERANCE * asked.rate_rps,
        )
        if rate_rps <= 0:
            raise MeshError("even the lowest rate has too many misses")
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
