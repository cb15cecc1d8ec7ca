"""`python -m ops.bench`."""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from ops.bench import backlog, conserve, engine, overhead, pulling, qoserve, scheduler_cost
from ops.bench.result import Result
from shared.contracts.errors import MeshError
from shared.runtime.logging import configure_logging

BENCHES: dict[str, Callable[..., Awaitable[Result]]] = {
    "overhead": overhead.run,
    "backlog": backlog.run,
    "pulling": pulling.run,
    "qoserve": qoserve.run,
    "conserve": conserve.run,
    "engine": engine.run,
    "scheduler_cost": scheduler_cost.run,
}


def main() -> int:
    """Run one benchmark, or all; 0 when no measured line is broken."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench", description=__doc__)
    parser.add_argument("name", nargs="?", choices=sorted(BENCHES), help="default: all of them")
    parser.add_argument("--quick", action="store_true", help="under 50 s: smaller, but honest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="last line: all figures as JSON")
    parser.add_argument("--broker", help="AMQP URL or private; default: the best there is")
    parser.add_argument("--out", type=Path, default=Path("results"), help="history is kept here")
    options = parser.parse_args()
    configure_logging(level="error", service="bench")
    names = [options.name] if options.name else list(BENCHES)
    code = 0
    for name in names:
        try:
            result = asyncio.run(
                _awaited(
                    BENCHES[name](seed=options.seed, quick=options.quick, broker=options.broker)
                )
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


async def _awaited(awaitable: Awaitable[Result]) -> Result:
    return await awaitable


if __name__ == "__main__":
    raise SystemExit(main())
