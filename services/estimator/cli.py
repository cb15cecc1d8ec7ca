"""`headway-estimator`: command line of the estimator."""

from collections.abc import Sequence

from services.estimator.settings import Settings
from shared.runtime.cli import Service, ServiceCli


def _parts() -> Service[Settings]:
    from services.estimator import service  # noqa: PLC0415 - `health` needs no predictions

    return Service(serve=service.serve)


CLI = ServiceCli(
    service="estimator",
    text="Learns the costs of iterations, requests and swaps from telemetry.",
    settings_type=Settings,
    parts=_parts,
)
for name, function, text in (
    (
        "show",
        "services.estimator.cli_show:show",
        "Print what is learnt (latency model, rates, lengths, swaps, trees) and its errors.",
    ),
    (
        "fit",
        "services.estimator.cli_fit:fit",
        "Fit quantile trees of prefill times to samples, for running estimators to publish.",
    ),
    ("trees", "services.estimator.cli_trees:trees", "List the trees in profile_dir."),
    (
        "use",
        "services.estimator.cli_trees:use",
        "Roll back: write an earlier version of a model's trees again as the next version.",
    ),
):
    CLI.app.command(function, name=name, help=text)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return CLI.main(argv)
