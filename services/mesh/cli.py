"""`headway`: the whole mesh for operators and producers."""

import sys
from collections.abc import Sequence

import msgspec

from services.mesh.spec import EMBEDDED_SEEN
from shared.contracts.errors import ContractError, MeshError, SettingsError
from shared.runtime.checkout import absent, is_found
from shared.runtime.lifecycle import EXIT_NO_BROKER
from shared.runtime.logging import configure_logging
from shared.runtime.program import Program, commands

VERBS = {
    "up": ("services.mesh.verbs.cli_up:up", "Run a whole mesh on this machine until Ctrl-C."),
    "submit": (
        "services.mesh.verbs.cli_submit:submit",
        "Publish a request over AMQP and print its answer as it arrives.",
    ),
    "top": (
        "services.mesh.verbs.cli_watch:top",
        "Show instances, their work and SLO attainment continuously.",
    ),
    "queues": (
        "services.mesh.verbs.cli_watch:queues",
        "Print the number of waiting requests in each queue, lane and inbox.",
    ),
    "dead-letter": (
        "services.mesh.verbs.cli_dead_letter:dead_letter",
        "List, requeue or delete dead-lettered requests.",
    ),
    "usage": (
        "services.mesh.verbs.cli_usage:usage",
        "Print what finished requests of tenants have used.",
    ),
    "request": (
        "services.mesh.verbs.cli_stories:show_request",
        "Show the life of a finished request, and why it was late.",
    ),
    "requests": (
        "services.mesh.verbs.cli_stories:show_requests",
        "List requests that ended recently, newest first, with the reason of each late one.",
    ),
    "keys": ("services.mesh.tenants.cli_keys:KEYS", "Create, list, rotate and revoke API keys."),
    "batch": (
        "services.mesh.batch.cli:BATCH",
        "Submit, show and cancel batches of requests over HTTP.",
    ),
    "demo": (
        "services.mesh.demo.cli:demo",
        "Send a mixed load to a running mesh, and print a table of it.",
    ),
    "doctor": (
        "services.mesh.doctor.cli:doctor",
        "Check this machine, the broker, and the services and instances of a mesh.",
    ),
    "models": (
        "services.mesh.models.cli:MODELS",
        "Add, list, check and remove models of a registry file.",
    ),
}
"""Verb -> where its function or its own verbs are, and its help."""


CHECKOUT_VERBS = {
    "simulate": (
        "ops.sim.cli:SIMULATE",
        "Predict the number of GPUs that a workload needs, and its SLO violations.",
    ),
    "profile": (
        "ops.profiling.cli:PROFILE",
        "Measure an engine, and write a profile for the simulator.",
    ),
}
"""Verb of a checkout -> where its function or its own verbs are, and its help."""


class MeshProgram(Program):
    """The command `headway`."""

    def __init__(self) -> None:
        app = commands(
            "headway",
            "SLO-oriented serving mesh for LLMs over RabbitMQ.",
            examples="Each service also has its own command: headway-gateway, headway-planner,\n"
            "headway-estimator, headway-agent.\n"
            "Exit codes: 0 ok, 1 failed, 2 usage or settings, 3 broker unreachable.",
        )
        for name, (place, text) in VERBS.items():
            app.command(place, name=name, help=text)
        app.command(
            "shared.store.cli:STORE",
            name="store",
            help="Migrate and examine the store of files, and change the documents that services "
            "follow.",
        )
        app.command(
            "services.planner.cli_plan:PLAN", name="plan", help="Show, explain or compare plans."
        )
        for name, (place, text) in CHECKOUT_VERBS.items():
            if is_found(place.partition(":")[0]):
                app.command(place, name=name, help=text)
            else:
                app.command(absent(f"headway {name}"), name=name, help=text, help_flags=())
        super().__init__(
            app,
            usage_errors=(SettingsError, ContractError),
            failures=(MeshError, OSError, msgspec.MsgspecError),
        )
        app.command(self.completion)

    def run(self, tokens: Sequence[str]) -> int:
        """Run the verb that *tokens* name."""
        if tokens[:1] == ["plan"]:
            from services.planner.cli import planner  # noqa: PLC0415 - of this verb only

            return planner(self.name).main(tokens)
        configure_logging(level="warning", service="headway")
        named = [token for token in tokens if token not in self.app.help_flags]
        if named != [*tokens]:
            self._describe(named)
        return super().run(tokens)

    def reported(self, tokens: Sequence[str], error: Exception) -> int:
        """
        As `Program.reported`; if no broker answers, also print where an embedded mesh is seen.
        """
        code = super().reported(tokens, error)
        if code == EXIT_NO_BROKER and tokens[0] != "up":
            print(EMBEDDED_SEEN, file=sys.stderr)
        return code

    def _describe(self, named: Sequence[str]) -> None:
        """Let the help of a verb be its whole docstring instead of its line in the list."""
        called = self.app.parse_commands(named)[1][-1]
        if called is not self.app and called.default_command is not None:
            called.help = None


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return MeshProgram().main(argv)
