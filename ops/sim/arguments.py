"""Command line of the simulator."""

import argparse
from pathlib import Path

from ops.sim import option_values as values
from ops.sim.lengths import MIXES, TARGETS
from ops.sim.policies import policy_names
from ops.sim.profiles import ALIASES, names
from ops.sim.pulling import PullOptions
from ops.sim.scenario import Scenario
from ops.sim.traces import checked_trace
from ops.sim.workload import with_shares
from shared.contracts.lanes import LaneLayout
from shared.runtime.arguments import TextHelpFormatter
from solver.scheduling.pull_room import DEFAULT_BOUNDS, PullBounds

_MAX_REQUESTS = 10**7
"""Maximum number of arrivals in one simulation, because of memory."""

_EXAMPLES = """
examples:
  How many GPUs serve 20 requests/s with at most 1 % missed targets?
    headway simulate --qps 20 --hours 2 --find-replicas

  Which targets are missed on four GPUs, and when?
    headway simulate --qps 20 --hours 2 --replicas 4 --plot misses.png

  Traffic of a trace, on an engine that the estimator has measured:
    headway-estimator show --json | head -1 > engine.json
    headway simulate --trace mine.csv --trace-times --profile engine.json --find-replicas

  Compare policies, one row each:
    headway simulate --qps 6 --compare sarathi-fcfs,sarathi-edf,qoserve,adaptive

  Replicas that pull late from shared lanes, as agents do, with a smaller window:
    headway simulate --qps 20 --replicas 5 --window 16

  How much load can three GPUs serve if 1 in 1000 requests may miss its target?
    headway simulate --replicas 3 --find-goodput --allowed 0.001 --qps 10

exit codes: 0 done, 1 a search found nothing, 2 wrong usage or an unreadable file
"""


def parser() -> argparse.ArgumentParser:
    """The parser of all options; times are in seconds unless an option says hours."""
    p = argparse.ArgumentParser(
        prog="headway simulate",
        usage="%(prog)s [options]",
        description="Estimates the GPUs that a workload needs and its SLO misses, by "
        "simulating replicas with the policies that agents and engines run.",
        epilog=_EXAMPLES,
        formatter_class=TextHelpFormatter,
    )
    load_group = p.add_argument_group("workload")
    load_group.add_argument(
        "--trace",
        type=Path,
        metavar="CSV",
        help="trace in Azure's format, from which lengths are taken",
    )
    load_group.add_argument(
        "--match",
        choices=sorted(TARGETS),
        help=("map the trace's lengths to the percentiles of this mix"),
    )
    load_group.add_argument(
        "--trace-times", action="store_true", help=("arrivals as in the trace instead of at --qps")
    )
    load_group.add_argument(
        "--workload", choices=sorted(MIXES), default="code", help="mix of lengths without --trace"
    )
    load_group.add_argument(
        "--qps", type=values.positive, default=3.0, metavar="N", help="total requests per second"
    )
    load_group.add_argument(
        "--hours", type=values.positive, default=1.0, metavar="N", help="duration of the arrivals"
    )
    load_group.add_argument(
        "--variation", type=values.from_to(0.01, 100), default=1.0, metavar="CV",
        help="coefficient of variation of the gaps between arrivals; 1: Poisson arrivals",
    )  # fmt: skip
    load_group.add_argument(
        "--wave", type=values.wave, metavar="LOW:HIGH[:HALF_PERIOD_S]",
        help="alternate between two rates in requests/s, each for HALF_PERIOD_S; replaces --qps",
    )  # fmt: skip
    load_group.add_argument(
        "--mix", type=values.mix, default="1:1:1", metavar="Q1:Q2:Q3",
        help="shares of classes: TTFT of 6 s, TTLT of 600 s, TTLT of 1800 s",
    )  # fmt: skip
    load_group.add_argument(
        "--low-share",
        type=values.from_to(0, 1),
        default=0.0,
        metavar="SHARE",
        help="share of requests of low importance, 0..1",
    )
    engine = p.add_argument_group("engine")
    engine.add_argument(
        "--profile", type=values.profile, default="28",
        metavar="NAME|FILE", help=(f"latency profile: {', '.join([*ALIASES, *names()])}, or a "
                                  "file"),
    )  # fmt: skip
    engine.add_argument(
        "--policy", type=values.policy, default="adaptive", metavar="NAME",
        help=f"policy of the engines: {', '.join(policy_names())}",
    )  # fmt: skip
    engine.add_argument(
        "--replicas",
        type=values.whole_from(1),
        default=1,
        metavar="N",
        help="number of engines, one GPU each",
    )
    engine.add_argument(
        "--dispatch", choices=("pull", "round-robin"),
        help="pull: replicas pull late from shared lanes, as agents do (default); round-robin: "
        "each engine sees all of its requests at once, which no agent offers (default with --silo)",
    )  # fmt: skip
    engine.add_argument(
        "--window", type=values.whole_from(1), metavar="N",
        help=f"limit of pulled requests that have not begun (default {DEFAULT_BOUNDS.window})",
    )  # fmt: skip
    engine.add_argument(
        "--work-classes", type=values.whole_from(1, 32), metavar="N",
        help=f"number of classes of predicted work, each with its own lanes (default "
        f"{LaneLayout().num_work_classes})",
    )  # fmt: skip
    engine.add_argument(
        "--silo", type=values.silo, default=(), metavar="Q1:Q2:Q3",
        help="separate replicas for each class, instead of shared replicas",
    )  # fmt: skip
    engine.add_argument(
        "--kv-tokens", type=values.whole_from(1), metavar="N",
        help="tokens of KV memory, instead of the profile's",
    )  # fmt: skip
    engine.add_argument(
        "--prefill-only", action="store_true", help="prefill only; decodes run elsewhere"
    )
    engine.add_argument(
        "--compare", type=values.policies, metavar="POLICY,POLICY",
        help="policies to compare, one row each, instead of --policy's table",
    )  # fmt: skip
    search = p.add_argument_group("search")
    search.add_argument(
        "--find-replicas",
        action="store_true",
        help="find the smallest sufficient number of replicas",
    )
    search.add_argument(
        "--find-goodput",
        action="store_true",
        help="find the highest rate with at most the --allowed share of missed requests",
    )
    search.add_argument(
        "--allowed", type=values.from_to(0, 1), default=0.01, metavar="SHARE",
        help="allowed share of missed requests, 0..1",
    )  # fmt: skip
    search.add_argument(
        "--most",
        type=values.whole_from(1),
        default=64,
        metavar="N",
        help="maximum number of replicas to try",
    )
    p.add_argument(
        "--seed",
        type=values.whole_from(0),
        default=0,
        metavar="N",
        help="seed of all random numbers",
    )
    p.add_argument("--drain", action="store_true", help="serve all requests to their end")
    p.add_argument("--json", action="store_true", help="print all figures as one line of JSON")
    p.add_argument(
        "--plot",
        type=values.picture,
        metavar="FILE",
        help=("draw misses, latencies and load to this file"),
    )
    return p


def scenario(options: argparse.Namespace) -> Scenario:
    """
    The scenario that *options* describe.

    Raises:
        ValueError: An option is invalid.
        OSError: A file cannot be read.
    """
    trace = checked_trace(options.trace, match=options.match) if options.trace else None
    if trace is None and (options.trace_times or options.match):
        raise ValueError("--trace-times and --match need --trace")
    classes = with_shares(options.mix)
    for traffic, (name, _, count) in zip(classes, options.silo, strict=False):
        if traffic.share > 0 and count == 0:
            raise ValueError(f"--silo has no replica for {name}, but --mix has a share of it")
    _check_size(options)
    return Scenario(
        profile=options.profile,
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
        classes=classes,
        low_share=options.low_share,
        prefill_only=options.prefill_only,
        drain=options.drain,
        kv_capacity_tokens=options.kv_tokens,
        seed=options.seed,
    )


def _pull(options: argparse.Namespace) -> PullOptions | None:
    if options.silo and options.dispatch == "pull":
        raise ValueError("--dispatch pull excludes --silo")
    if options.silo or options.dispatch == "round-robin":
        if options.window is not None or options.work_classes is not None:
            raise ValueError("--window and --work-classes need --dispatch pull")
        return None
    return PullOptions(
        bounds=PullBounds(window=options.window or DEFAULT_BOUNDS.window),
        layout=LaneLayout(num_work_classes=options.work_classes or LaneLayout().num_work_classes),
    )


def _check_size(options: argparse.Namespace) -> None:
    """
    Reject a scenario with more arrivals than fit into memory; a trace's arrivals are already in
    memory.
    """
    rate_rps = options.wave.high_rps if options.wave else options.qps
    num_requests = rate_rps * 3600 * options.hours
    if not options.trace_times and num_requests > _MAX_REQUESTS:
        raise ValueError(
            f"{'--wave' if options.wave else '--qps'} {rate_rps:g} for --hours {options.hours:g} "
            f"is {num_requests:.3g} requests, more than {_MAX_REQUESTS}"
        )
