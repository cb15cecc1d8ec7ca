"""`headway-estimator`: command line of the estimator."""

from collections.abc import Sequence

from services.estimator.cli_fit import fit, fit_arguments
from services.estimator.cli_show import show
from services.estimator.cli_trees import trees, use, use_arguments
from services.estimator.service import serve
from services.estimator.settings import Settings
from shared.runtime.cli import ServiceCli, Verb

CLI = ServiceCli(
    service="estimator",
    description="Learns the costs of iterations, requests and swaps from telemetry.",
    settings_type=Settings,
    serve=serve,
    verbs=(
        Verb(
            name="show",
            help="print the profiles (latency model, rates, lengths, swaps, trees) and the "
            "prediction errors, also those of routers",
            run=show,
        ),
        Verb(
            name="fit",
            help="fit quantile trees of prefill times to the samples in profile_dir; running "
            "estimators publish the written trees",
            run=fit,
            arguments=fit_arguments,
        ),
        Verb(name="trees", help="list the trees in profile_dir", run=trees),
        Verb(
            name="use",
            help="roll back: write an earlier version of a model's trees again as the next version",
            run=use,
            arguments=use_arguments,
        ),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return CLI.main(argv)
