"""`headway-gateway`: serves HTTP, and prints requests that have ended."""

from collections.abc import Sequence

from services.gateway.settings import Settings
from shared.runtime.cli import Service, ServiceCli


def _parts() -> Service[Settings]:
    from services.gateway import service  # noqa: PLC0415 - `health` needs no HTTP server

    return Service(serve=service.serve, check=service.check)


CLI = ServiceCli(
    service="gateway",
    text="OpenAI-compatible HTTP interface of the mesh.",
    settings_type=Settings,
    parts=_parts,
)
CLI.app.command(
    "services.gateway.tail:tail",
    name="tail",
    help="Print a line for each request that ends on an instance, until Ctrl-C.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return CLI.main(argv)
