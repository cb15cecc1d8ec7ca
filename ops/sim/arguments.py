"""Command line of the simulator."""

import argparse
from pathlib import Path

from ops.sim.lengths import MIXES, TARGETS
from ops.sim.policies import policy_names
from ops.sim.profiles import ALIASES, load, names
from ops.sim.scenario import Scenario, Wave
from ops.sim.workload import CLASSES, read_trace, with_shares


def parser() -> argparse.ArgumentParser:
    """All options; times in hours where they say so, else seconds."""
    p = argparse.ArgumentParser(
        prog="python -m ops.sim",
        description="How many GPUs do I need, and who misses? Simulates replicas under a workload.",
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
    load_group.add_argument("--qps", type=float, default=3.0, help="requests per second, in all")
    load_group.add_argument("--hours", type=float, default=1.0)
    load_group.add_argument(
        "--variation", type=float, default=1.0, help="of the gaps between arrivals; 1 is Poisson"
    )
    load_group.add_argument(
        "--wave", metavar="LOW:HIGH[:HALF_PERIOD_S]", help="a load that changes, instead of --qps"
    )
    load_group.add_argument(
        "--mix", default="1:1:1", metavar="Q1:Q2:Q3",
        help="shares of 6 s first tokens, 600 s answers and 1800 s answers",
    )  # fmt: skip
    load_group.add_argument("--low-share", type=float, default=0.0, help="of low importance")
    engine = p.add_argument_group("engine")
    engine.add_argument(
        "--profile", default="28", help=f"{', '.join([*ALIASES, *names()])}, or a file"
    )
    engine.add_argument("--policy", default="adaptive", help=f"of {', '.join(policy_names())}")
    engine.add_argument("--replicas", type=int, default=1)
    engine.add_argument(
        "--silo", metavar="Q1:Q2:Q3", help="replicas of each class on its own, instead of shared"
    )
    engine.add_argument("--kv-tokens", type=int, help="KV memory, instead of the profile's")
    engine.add_argument("--prefill-only", action="store_true", help="decodes run elsewhere")
    search = p.add_argument_group("search")
    search.add_argument("--find-replicas", action="store_true", help="fewest that are enough")
    search.add_argument("--find-goodput", action="store_true", help="highest rate that is kept")
    search.add_argument("--allowed", type=float, default=0.01, help="share of violations")
    search.add_argument("--most", type=int, default=64, help="replicas to try at most")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--drain", action="store_true", help="serve everything to its end")
    p.add_argument("--json", action="store_true", help="all figures as one line of JSON")
    p.add_argument("--plot", type=Path, metavar="FILE", help="picture of the last simulation")
    return p


def scenario(options: argparse.Namespace) -> Scenario:
    """
    The scenario that *options* describe.

    Raises:
        ValueError: One of them makes no sense.
        OSError: A file cannot be read.
    """
    if options.qps <= 0 or options.hours <= 0 or options.replicas < 1 or options.variation <= 0:
        raise ValueError("--qps, --hours, --replicas and --variation must be positive")
    trace = read_trace(options.trace, match=options.match) if options.trace else None
    if trace is None and (options.trace_times or options.match):
        raise ValueError("--trace-times and --match need --trace")
    return Scenario(
        profile=load(options.profile),
        policy=options.policy,
        replicas=options.replicas,
        silo=_silo(options.silo) if options.silo else (),
        rate_rps=options.qps,
        duration_s=3600 * options.hours,
        lengths=options.workload,
        trace=trace,
        trace_times=options.trace_times,
        variation=options.variation,
        wave=_wave(options.wave) if options.wave else None,
        classes=with_shares(_numbers(options.mix, len(CLASSES))),
        low_share=options.low_share,
        prefill_only=options.prefill_only,
        drain=options.drain,
        kv_capacity_tokens=options.kv_tokens,
        seed=options.seed,
    )


def silo_pools(counts: tuple[int, int, int]) -> tuple[tuple[str, str, int], ...]:
    """Replicas of each class on its own, with QoServe's chunks: 256, and 2048 without TBT."""
    policies = ("sarathi-fcfs:256", "sarathi-fcfs:2048", "sarathi-fcfs:2048")
    return tuple(
        (c.name, policy, count) for c, policy, count in zip(CLASSES, policies, counts, strict=True)
    )


def _silo(text: str) -> tuple[tuple[str, str, int], ...]:
    first, second, third = (int(value) for value in _numbers(text, len(CLASSES)))
    return silo_pools((first, second, third))


def _wave(text: str) -> Wave:
    parts = [float(part) for part in text.split(":")]
    if len(parts) not in (2, 3):
        raise ValueError(f"{text!r} is not LOW:HIGH or LOW:HIGH:HALF_PERIOD_S")
    if len(parts) == 2:
        return Wave(low_rps=parts[0], high_rps=parts[1])
    return Wave(low_rps=parts[0], high_rps=parts[1], half_period_s=parts[2])


def _numbers(text: str, count: int) -> list[float]:
    numbers = [float(part) for part in text.split(":")]
    if len(numbers) != count or min(numbers) < 0 or sum(numbers) <= 0:
        raise ValueError(f"{text!r} is not {count} shares separated by colons")
    return numbers
