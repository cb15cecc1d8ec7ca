"""Command line of the simulator."""

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from ops.sim.lengths import MIXES, TARGETS
from ops.sim.policies import policy_factory, policy_names
from ops.sim.profiles import ALIASES, NamedProfile, load, names
from ops.sim.pulling import PullOptions
from ops.sim.scenario import Scenario, Wave
from ops.sim.traces import checked_trace
from ops.sim.workload import CLASSES, with_shares
from shared.contracts.lanes import LaneLayout
from solver.scheduling.pull_room import DEFAULT_BOUNDS, PullBounds

_MAX_REQUESTS = 10**7
"""Arrivals of one simulation that memory should hold."""
_SILO_CHUNKS = (256, 2048, 2048)
"""QoServe's, by class: small where there is a TBT."""
_PICTURES = (".jpg", ".pdf", ".png", ".svg")

_EXAMPLES = """
examples:
  How many GPUs keep 99 % of 20 requests a second?
    headway simulate --qps 20 --hours 2 --find-replicas

  Who misses on four of them, and when?
    headway simulate --qps 20 --hours 2 --replicas 4 --plot misses.png

  My traffic as it came, on an engine that the estimator has measured:
    headway-estimator show --json | head -1 > engine.json
    headway simulate --trace mine.csv --trace-times --profile engine.json --find-replicas

  What does the policy matter? One row each:
    headway simulate --qps 6 --compare sarathi-fcfs,sarathi-edf,qoserve,adaptive

  Replicas that pull late from shared lanes, as agents do, with a smaller window:
    headway simulate --qps 20 --replicas 5 --dispatch pull --window 16

  How much load do three GPUs bear if 1 in 1000 may be late?
    headway simulate --replicas 3 --find-goodput --allowed 0.001 --qps 10

exit codes: 0 done, 1 a search found nothing, 2 wrong usage or an unreadable file
"""


def parser() -> argparse.ArgumentParser:
    """All options; times in hours where they say so, else seconds."""
    p = argparse.ArgumentParser(
        prog="headway simulate",
        usage="%(prog)s [options]",
        description="How many GPUs do I need, and who misses? Simulates replicas under a workload, "
        "with the policies that agents and engines run.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    load_group = p.add_argument_group("workload")
    load_group.add_argument("--trace", type=Path, help="Azure-format CSV; lengths are its own")
    load_group.add_argument(
        "--match", choices=sorted(TARGETS), help="map the trace's lengths to these percentiles"
    )
    load_group.add_argument(
        "--trace-times", action="store_true", help="arrive as in the trace instead of at --qps"
    )
    load_group.add_argument("--workload", choices=sorted(MIXES), default="code")
    load_group.add_argument(
        "--qps", type=_positive, default=3.0, help="requests per second, in all"
    )
    load_group.add_argument("--hours", type=_positive, default=1.0)
    load_group.add_argument(
        "--variation", type=_from_to(0.01, 100), default=1.0,
        help="of the gaps between arrivals; 1 is Poisson",
    )  # fmt: skip
    load_group.add_argument(
        "--wave", type=_wave, metavar="LOW:HIGH[:HALF_PERIOD_S]",
        help="a load that changes, instead of --qps",
    )  # fmt: skip
    load_group.add_argument(
        "--mix", type=_mix, default="1:1:1", metavar="Q1:Q2:Q3",
        help="shares of 6 s first tokens, 600 s answers and 1800 s answers",
    )  # fmt: skip
    load_group.add_argument(
        "--low-share", type=_from_to(0, 1), default=0.0, help="of low importance"
    )
    engine = p.add_argument_group("engine")
    engine.add_argument(
        "--profile", type=_profile, default="28",
        help=f"{', '.join([*ALIASES, *names()])}, or a file",
    )  # fmt: skip
    engine.add_argument(
        "--policy", type=_policy, default="adaptive", help=f"of {', '.join(policy_names())}"
    )
    engine.add_argument("--replicas", type=_whole_from(1), default=1)
    engine.add_argument(
        "--dispatch", choices=("round-robin", "pull"), default="round-robin",
        help="to each replica in turn, or pulled late from shared lanes as by agents",
    )  # fmt: skip
    engine.add_argument(
        "--window", type=_whole_from(1), metavar="N",
        help=f"requests pulled and not begun, at most (default {DEFAULT_BOUNDS.window})",
    )  # fmt: skip
    engine.add_argument(
        "--work-edge", type=_whole_from(1), metavar="TOKENS",
        help="lanes divide short from long requests here (default: the mesh's)",
    )  # fmt: skip
    engine.add_argument(
        "--silo", type=_silo, default=(), metavar="Q1:Q2:Q3",
        help="replicas of each class on its own, instead of shared",
    )  # fmt: skip
    engine.add_argument(
        "--kv-tokens", type=_whole_from(1), help="KV memory, instead of the profile's"
    )
    engine.add_argument("--prefill-only", action="store_true", help="decodes run elsewhere")
    engine.add_argument(
        "--compare", type=_policies, metavar="POLICY,POLICY",
        help="a row each instead of --policy's table",
    )  # fmt: skip
    search = p.add_argument_group("search")
    search.add_argument("--find-replicas", action="store_true", help="fewest that are enough")
    search.add_argument("--find-goodput", action="store_true", help="highest rate that is kept")
    search.add_argument("--allowed", type=_from_to(0, 1), default=0.01, help="share of violations")
    search.add_argument("--most", type=_whole_from(1), default=64, help="replicas to try at most")
    p.add_argument("--seed", type=_whole_from(0), default=0)
    p.add_argument("--drain", action="store_true", help="serve everything to its end")
    p.add_argument("--json", action="store_true", help="all figures as one line of JSON")
    p.add_argument(
        "--plot", type=_picture, metavar="FILE", help="misses, latencies, load: a picture"
    )
    return p


def scenario(options: argparse.Namespace) -> Scenario:
    """
    The scenario that *options* describe.

    Raises:
        ValueError: One of them makes no sense.
        OSError: A file cannot be read.
    """
    trace = checked_trace(options.trace, match=options.match) if options.trace else None
    if trace is None and (options.trace_times or options.match):
        raise ValueError("--trace-times and --match need --trace")
    classes = with_shares(options.mix)
    for traffic, (name, _, count) in zip(classes, options.silo, strict=False):
        if traffic.share > 0 and count == 0:
            raise ValueError(f"--silo has no replica for {name}, of which --mix has a share")
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
    if options.dispatch != "pull":
        if options.window is not None or options.work_edge is not None:
            raise ValueError("--window and --work-edge need --dispatch pull")
        return None
    if options.silo:
        raise ValueError("--dispatch pull excludes --silo")
    return PullOptions(
        bounds=PullBounds(window=options.window or DEFAULT_BOUNDS.window),
        layout=LaneLayout(work_edge_tokens=options.work_edge or LaneLayout().work_edge_tokens),
    )


def _check_size(options: argparse.Namespace) -> None:
    """Refuse more arrivals than fit into memory; a trace's own are there already."""
    rate_rps = options.wave.high_rps if options.wave else options.qps
    num_requests = rate_rps * 3600 * options.hours
    if not options.trace_times and num_requests > _MAX_REQUESTS:
        raise ValueError(
            f"{'--wave' if options.wave else '--qps'} {rate_rps:g} for --hours {options.hours:g} "
            f"is {num_requests:.3g} requests, more than {_MAX_REQUESTS}"
        )


def _silo(text: str) -> tuple[tuple[str, str, int], ...]:
    try:
        counts = [int(part) for part in text.split(":")]
    except ValueError:
        counts = []
    if len(counts) != len(CLASSES) or min(counts) < 0 or sum(counts) == 0:
        raise _refused(text, "Q1:Q2:Q3 in whole numbers from 0, one of them above 0")
    return tuple(
        (traffic.name, f"sarathi-fcfs:{chunk_tokens}", count)
        for traffic, chunk_tokens, count in zip(CLASSES, _SILO_CHUNKS, counts, strict=True)
    )


def _mix(text: str) -> list[float]:
    shares = [_number(part) for part in text.split(":")]
    if len(shares) != len(CLASSES) or not (min(shares) >= 0 and 0 < sum(shares) < math.inf):
        raise _refused(text, "Q1:Q2:Q3 in finite numbers from 0, one of them above 0")
    return shares


def _wave(text: str) -> Wave:
    match [_number(part) for part in text.split(":")]:
        case [low, high] if 0 <= low <= high and 0 < high < math.inf:
            return Wave(low_rps=low, high_rps=high)
        case [low, high, half_s] if 0 <= low <= high and 0 < high < math.inf > half_s >= 1:
            return Wave(low_rps=low, high_rps=high, half_period_s=half_s)
    raise _refused(text, "LOW:HIGH[:HALF_PERIOD_S], finite, 0 <= LOW <= HIGH > 0, from 1 s")


def _policy(text: str) -> str:
    try:
        policy_factory(text)
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    _, _, number = text.partition(":")
    if number.isdecimal() and int(number) == 0:
        raise _refused(text, "a policy with 1 or more after its colon")
    return text


def _policies(text: str) -> str:
    return ",".join(_policy(name.strip()) for name in text.split(","))


def _profile(text: str) -> NamedProfile:
    try:
        return load(text)
    except (ValueError, OSError, msgspec.MsgspecError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def _picture(text: str) -> Path:
    """A file that can be written, as far as that shows before it is."""
    file = Path(text)
    if file.suffix.lower() not in _PICTURES:
        raise _refused(text, f"a file that ends in {', '.join(_PICTURES)}")
    if not file.parent.is_dir():
        raise _refused(text, f"in a directory that exists: {str(file.parent)!r}")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise _refused(text, "a file that may be written")
    return file


def _positive(text: str) -> float:
    if not 0 < (value := _number(text)) < math.inf:
        raise _refused(text, "a finite number above 0")
    return value


def _from_to(low: float, high: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        if not low <= (value := _number(text)) <= high:
            raise _refused(text, f"a number from {low:g} to {high:g}")
        return value

    return number


def _whole_from(low: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise _refused(text, f"a whole number from {low} on")
        return value

    return whole


def _number(text: str) -> float:
    """NaN, which is within no limits, if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _refused(text: str, limit: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text!r} is not {limit}")
