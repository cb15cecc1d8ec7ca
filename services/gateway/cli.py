"""`headway-gateway`: serves HTTP, and prints completed requests."""

import sys
from collections.abc import Sequence

from services.gateway.service import check, serve
from services.gateway.settings import Settings
from services.gateway.tail import add_tail_arguments, tail
from shared.runtime.cli import ServiceCli, Verb

CLI = ServiceCli(
    service="gateway",
    description="OpenAI-compatible HTTP interface of the mesh.",
    settings_type=Settings,
    serve=serve,
    check=check,
    run_options=(("workers", "number of processes that serve the port (default: 1)"),),
    verbs=(
        Verb(
            name="tail",
            help="print a line for each request that completes in the mesh, until Ctrl-C",
            run=tail,
            arguments=add_tail_arguments,
        ),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return CLI.main(sys.argv[1:] if argv is None else argv)
