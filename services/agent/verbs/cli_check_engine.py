"""`headway-agent check-engine`: checks and measures the engine on this machine's device."""

import argparse
from pathlib import Path

from shared.runtime.checkout import run_from_checkout
from shared.runtime.cli import OfflineVerb

_PROGRAM = "ops.check_engine"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the program, which are also those of the verb, besides `--json`."""
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="folder of a model for the measurements; default: a tiny model",
    )
    parser.add_argument("--quick", action="store_true", help="shorter run without the long tests")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results/check-engine"),
        metavar="DIR",
        help="folder of the report (report.md, report.json) and the logs",
    )


def _run(arguments: argparse.Namespace) -> int:
    flags = [f"--{name}" for name in ("quick", "json") if getattr(arguments, name)]
    model = [] if arguments.model is None else ["--model", str(arguments.model)]
    given = [*flags, *model, "--out", str(arguments.out)]
    return run_from_checkout("headway-agent check-engine", _PROGRAM, given)


VERB = OfflineVerb(
    name="check-engine",
    help="check vLLM on this machine's device: tests, benches, one report (needs a checkout)",
    run=_run,
    arguments=add_options,
)
