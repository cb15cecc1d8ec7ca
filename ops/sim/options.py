"""Options of `headway simulate`, and the scenario that they describe."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from ops.sim import option_values as values
from ops.sim.lengths import MIXES, TARGETS
from ops.sim.policies import policy_names
from ops.sim.profiles import ALIASES, NamedProfile, load, names
from ops.sim.pulling import PullOptions
from ops.sim.scenario import Scenario, Wave
from ops.sim.traces import checked_trace
from ops.sim.workload import CLASSES, TrafficClass
from shared.contracts.errors import SettingsError
from shared.contracts.lanes import LaneLayout
from shared.runtime.options import File, Positive, read_by, whole
from solver.scheduling.pull_room import DEFAULT_BOUNDS, PullBounds

_MAX_REQUESTS = 10**7
"""Maximum number of arrivals in one simulation, because of memory."""
_PROFILE = "28"
_LOAD = Parameter(group=Group("Workload", sort_key=1))
_ENGINE = Parameter(group=Group("Engine", sort_key=2))
_SEARCH = Parameter(group=Group("Search", sort_key=3))
_AboveZero = Annotated[float, Parameter(validator=Number(gt=0, lt=math.inf), metavar="N")]
_Share = Annotated[float, Parameter(validator=Number(gte=0, lte=1), metavar="SHARE")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of `simulate`; times are in seconds unless an option says hours."""

    trace: Annotated[File | None, _LOAD, Parameter(metavar="CSV")] = None
    """Trace in Azure's format, from which lengths are taken."""
    match: Annotated[str | None, _LOAD, Parameter(choices=sorted(TARGETS))] = None
    """Map the trace's lengths to the percentiles of this mix."""
    trace_times: Annotated[bool, _LOAD] = False
    """Arrivals as in the trace instead of at --qps."""
    workload: Annotated[str, _LOAD, Parameter(choices=sorted(MIXES))] = "code"
    """Mix of lengths without --trace."""
    qps: Annotated[_AboveZero, _LOAD] = 3.0
    """Total requests per second."""
    hours: Annotated[_AboveZero, _LOAD] = 1.0
    """Duration of the arrivals."""
    variation: Annotated[
        float, _LOAD, Parameter(validator=Number(gte=0.01, lte=100), metavar="CV")
    ] = 1.0
    """Coefficient of variation of the gaps between arrivals; 1: Poisson arrivals."""
    wave: Annotated[
        Wave | None, _LOAD, read_by(values.wave, metavar="LOW:HIGH[:HALF_PERIOD_S]")
    ] = None
    """Alternate between two rates in requests/s, each for HALF_PERIOD_S; replaces --qps."""
    classes: Annotated[
        tuple[TrafficClass, ...],
        _LOAD,
        read_by(values.mix, name="--mix", metavar="Q1:Q2:Q3", show_default=False),
    ] = CLASSES
    """Shares of classes: TTFT of 6 s, TTLT of 600 s, TTLT of 1800 s; default: 1:1:1."""
    low_share: Annotated[_Share, _LOAD] = 0.0
    """Share of requests of low importance, 0..1."""
    profile: Annotated[
        NamedProfile | None,
        _ENGINE,
        read_by(
            values.profile,
            metavar="NAME|FILE",
            help=f"Latency profile: {', '.join([*ALIASES, *names()])}, or a file; "
            f"default: {_PROFILE}.",
        ),
    ] = None
    policy: Annotated[
        str,
        _ENGINE,
        read_by(
            values.policy,
            metavar="NAME",
            help=f"Policy of the engines: {', '.join(policy_names())}.",
        ),
    ] = "adaptive"
    replicas: Annotated[Positive, _ENGINE] = 1
    """Number of engines, one GPU each."""
    dispatch: Annotated[Literal["pull", "round-robin"] | None, _ENGINE] = None
    """
    pull: replicas pull late from shared lanes, as agents do (default); round-robin: each engine
    sees all of its requests at once, which no agent offers (default with --silo).
    """
    window: Annotated[
        Positive | None,
        _ENGINE,
        Parameter(
            help=f"Limit of pulled requests that have not begun; default: {DEFAULT_BOUNDS.window}."
        ),
    ] = None
    work_classes: Annotated[
        int | None,
        _ENGINE,
        whole(least=1, most=32),
        Parameter(
            help="Number of classes of predicted work, each with its own lanes; "
            f"default: {LaneLayout().num_work_classes}."
        ),
    ] = None
    silo: Annotated[tuple[values.Silo, ...], _ENGINE, read_by(values.silo, metavar="Q1:Q2:Q3")] = ()
    """Separate replicas for each class, instead of shared replicas."""
    kv_tokens: Annotated[Positive | None, _ENGINE] = None
    """Tokens of KV memory, instead of the profile's."""
    prefill_only: Annotated[bool, _ENGINE] = False
    """Prefill only; decodes run elsewhere."""
    compare: Annotated[
        tuple[str, ...], _ENGINE, read_by(values.policies, metavar="POLICY,POLICY")
    ] = ()
    """Policies to compare, one row each, instead of --policy's table."""
    find_replicas: Annotated[bool, _SEARCH] = False
    """Find the smallest sufficient number of replicas."""
    find_goodput: Annotated[bool, _SEARCH] = False
    """Find the highest rate with at most the --allowed share of missed requests."""
    allowed: Annotated[_Share, _SEARCH] = 0.01
    """Allowed share of missed requests, 0..1."""
    most: Annotated[Positive, _SEARCH] = 64
    """Maximum number of replicas to try."""
    seed: Annotated[int, whole(least=0)] = 0
    """Seed of all random numbers."""
    drain: bool = False
    """Serve all requests to their end."""
    json: bool = False
    """Print all figures as one line of JSON."""
    plot: Annotated[Path | None, read_by(values.picture, metavar="FILE")] = None
    """Draw misses, latencies and load to this file."""


def scenario(options: SimulateOptions) -> Scenario:
    """
    The scenario that *options* describe.

    Raises:
        SettingsError: Options exclude each other, or there are too many requests.
        ValueError: The trace is invalid.
        OSError: The trace cannot be read.
    """
    trace = checked_trace(options.trace, match=options.match) if options.trace else None
    if trace is None and (options.trace_times or options.match):
        raise SettingsError("--trace-times and --match need --trace")
    for traffic, (name, _, count) in zip(options.classes, options.silo, strict=False):
        if traffic.share > 0 and count == 0:
            raise SettingsError(f"--silo has no replica for {name}, but --mix has a share of it")
    _check_size(options)
    return Scenario(
        profile=options.profile or load(_PROFILE),
        policy=options.policy,
        replicas=options.replicas,
        silo=options.silo,
        pull=_pull(options),
        rate_rps=options.qps,
        duration_s=3600 * options.hours,
        lengths=options.workload,
        trace=trace,
        trace_times=options.trace_times,
        variation=options.variation,
        wave=options.wave,
        classes=options.classes,
        low_share=options.low_share,
        prefill_only=options.prefill_only,
        drain=options.drain,
        kv_capacity_tokens=options.kv_tokens,
        seed=options.seed,
    )


def _pull(options: SimulateOptions) -> PullOptions | None:
    if options.silo and options.dispatch == "pull":
        raise SettingsError("--dispatch pull excludes --silo")
    if options.silo or options.dispatch == "round-robin":
        if options.window is not None or options.work_classes is not None:
            raise SettingsError("--window and --work-classes need --dispatch pull")
        return None
    return PullOptions(
        bounds=PullBounds(window=options.window or DEFAULT_BOUNDS.window),
        layout=LaneLayout(num_work_classes=options.work_classes or LaneLayout().num_work_classes),
    )


def _check_size(options: SimulateOptions) -> None:
    """
    Reject a scenario with more arrivals than fit into memory; a trace's arrivals are already in
    memory.
    """
    rate_rps = options.wave.high_rps if options.wave else options.qps
    num_requests = rate_rps * 3600 * options.hours
    if not options.trace_times and num_requests > _MAX_REQUESTS:
        raise SettingsError(
            f"{'--wave' if options.wave else '--qps'} {rate_rps:g} for --hours {options.hours:g} "
            f"is {num_requests:.3g} requests, more than {_MAX_REQUESTS}"
        )
