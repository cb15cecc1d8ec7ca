"""Entry point of `python -m ops.bench`."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from ops.bench.result import Result
from shared.contracts.errors import MeshError
from shared.runtime.logging import configure_logging

BENCHES = (
    "overhead", "backlog", "pulling", "lanes", "qoserve", "conserve", "qlm", "fleet", "engine",
    "lso", "planner", "quartz", "routed", "completion", "router_cost", "scheduler_cost",
    "latency_model", "surface", "road", "instance", "ends", "tenants", "repeats", "batches",
    "batch_windows", "tracing", "storm", "lost_nodes", "console", "story_cost", "attach_simulated",
    "large_texts", "replays", "install",
)  # fmt: skip
"""
Modules of this package that have a function `run`; a module is imported when its benchmark runs.
"""
BY_NAME = (
    "engine_margins",
    "held",
    "attach",
    "largest_batch",
    "doors",
    "doors_simulated",
    "sharing",
    "overload",
)
"""
Benches that run only if they are named: each takes over five minutes, `engine_margins` also in its
quick form.
"""

WITH_MODELS = ("engine", "lso", "surface")
"""Benches that can run with a model that the user gives, on a CPU or a GPU."""

WITH_ENGINES = ("completion",)
"""Benches that can run with either engine, simulated or vLLM."""


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run one benchmark, or all; return 0 if each measured an acceptance line and all lines hold.

    Args:
        argv: Arguments without the program's name; by default those of this process.
    """
    options = parser().parse_args(argv)
    if options.engine and options.name not in WITH_ENGINES:
        parser().error(f"--engine is only valid for {', '.join(WITH_ENGINES)}")
    if options.model and options.name not in WITH_MODELS:
        parser().error(f"--model is only valid for {', '.join(WITH_MODELS)}")
    # Terminating a benchmark also ends its processes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    configure_logging(level="error", service="bench")
    names = [options.name] if options.name else BENCHES
    made = [_data(name, options) for name in names]
    holds = all(each["holds"] for each in made)
    if options.json:
        data = made[0] if options.name else {"benches": made, "holds": holds}
        print(msgspec.json.encode(data).decode(), flush=True)
    return 0 if holds else 1


def _data(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a benchmark, print and save its result; return the result as JSON-able data."""
    run = import_module(f"ops.bench.{name}").run
    further = {"engine": options.engine} if options.engine else {}
    further |= {"model": options.model} if options.model else {}
    try:
        result: Result = asyncio.run(
            run(seed=options.seed, quick=options.quick, broker=options.broker, **further)
        )
    except MeshError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return {"bench": name, "error": str(error), "holds": False}
    result.show()
    result.save(options.out)
    return result.data()


def parser() -> argparse.ArgumentParser:
    """The command line of the benchmarks."""
    made = argparse.ArgumentParser(
        prog="python -m ops.bench",
        description=(
            "Measure against a baseline in the same run. "
            "ops/docs/benches.md describes each benchmark."
        ),
    )
    made.add_argument(
        "name",
        nargs="?",
        metavar="BENCH",
        choices=sorted(BENCHES + BY_NAME),
        help=f"benchmark to run: {', '.join(sorted(BENCHES + BY_NAME))}; default: all except "
        f"{', '.join(BY_NAME)}",
    )
    made.add_argument("--quick", action="store_true", help="smaller run in under 50 s")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument(
        "--json", action="store_true", help="print all figures as JSON in the last line"
    )
    made.add_argument("--broker", help="AMQP URL or private; default: the best available")
    made.add_argument("--engine", help=f"vllm or simulated, for {', '.join(WITH_ENGINES)}")
    made.add_argument(
        "--model", type=Path, metavar="DIR",
        help=f"folder of a model, for {', '.join(WITH_MODELS)}; default: a tiny model",
    )  # fmt: skip
    made.add_argument("--out", type=Path, default=Path("results"), help="directory of the history")
    return made


if __name__ == "__main__":
    raise SystemExit(main())
