"""`headway-gateway`: serves HTTP, and prints requests that have ended."""

from collections.abc import Sequence
from typing import Annotated, Any

from services.gateway.settings import Settings
from shared.runtime.cli import Service, ServiceCli
from shared.runtime.options import LOADED, whole


class GatewayCli(ServiceCli[Settings]):
    """Command line whose verb `run` has an option."""

    def serve(
        self,
        *,
        settings: Annotated[Any, LOADED],
        workers: Annotated[int | None, whole(least=1, most=64)] = None,
    ) -> int:
        """
        Serve until SIGTERM, then drain.

        Args:
            workers: Number of processes that serve the port (default: 1).
        """
        del workers  # an option that is a setting is already in the settings
        return super().serve(settings=settings)


def _parts() -> Service[Settings]:
    from services.gateway import service  # noqa: PLC0415 - `health` needs no HTTP server

    return Service(serve=service.serve, check=service.check)


CLI = GatewayCli(
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
