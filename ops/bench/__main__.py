"""`python -m ops.bench`."""

import argparse
import asyncio
import signal
import sys
from importlib import import_module
from pathlib import Path

import msgspec

from ops.bench.result import Result
from shared.contracts.errors import MeshError
from shared.runtime.logging import configure_logging

BENCHES = (
    "overhead", "backlog", "pulling", "qoserve", "conserve", "qlm", "fleet", "engine", "lso",
    "planner", "quartz", "routed", "completion", "router_cost", "scheduler_cost", "latency_model",
)  # fmt: skip
"""Modules of this package, each with a `run`; imported when they are run."""

WITH_ENGINES = ("completion",)
"""Benches that run with either engine."""


def main() -> int:
    """Run one benchmark, or all; 0 when no measured line is broken."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench",
        description="Measure, against a baseline in the same run; README.md says what each does.",
    )
    parser.add_argument("name", nargs="?", choices=sorted(BENCHES), help="default: all of them")
    parser.add_argument("--quick", action="store_true", help="under 50 s: smaller, but honest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="last line: all figures as JSON")
    parser.add_argument("--broker", help="AMQP URL or private; default: the best there is")
    parser.add_argument("--engine", help=f"vllm or simulated, of {', '.join(WITH_ENGINES)}")
    parser.add_argument("--out", type=Path, default=Path("results"), help="history is kept here")
    options = parser.parse_args()
    if options.engine and options.name not in WITH_ENGINES:
        parser.error(f"--engine is for {', '.join(WITH_ENGINES)} only")
    # Whoever ends a benchmark ends its processes, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    further = {"engine": options.engine} if options.engine else {}
    configure_logging(level="error", service="bench")
    names = [options.name] if options.name else BENCHES
    code = 0
    for name in names:
        try:
            run = import_module(f"ops.bench.{name}").run
            result: Result = asyncio.run(
                run(seed=options.seed, quick=options.quick, broker=options.broker, **further)
            )
        except MeshError as error:
            print(f"{name}: {error}", file=sys.stderr)
            code = 1
            continue
        result.show()
        result.save(options.out)
        code = code or (0 if result.holds else 1)
        if options.json:
            print(msgspec.json.encode(result.data()).decode(), flush=True)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
