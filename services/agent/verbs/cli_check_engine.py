"""`headway-agent check-engine`: checks and measures the engine on this machine's device."""

from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from shared.runtime.checkout import run_from_checkout
from shared.runtime.options import AsJson, Folder

_PROGRAM = "ops.check_engine"


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """Options of the program, which are also those of the verb."""

    model: Folder | None = None
    """Folder of a model for the measurements; default: a tiny model."""
    quick: bool = False
    """Shorter run without the long tests."""
    out: Folder = Path("results/check-engine")
    """Folder of the report (report.md, report.json) and the logs."""

    def arguments(self) -> list[str]:
        """The options as arguments of the program."""
        flags = ["--quick"] if self.quick else []
        model = [] if self.model is None else ["--model", str(self.model)]
        return [*flags, *model, "--out", str(self.out)]


DEFAULTS = CheckOptions()


def check_engine(*, options: CheckOptions = DEFAULTS, json: AsJson = False) -> int:
    """Check vLLM on this machine's device: tests, benches, one report (needs a checkout)."""
    given = [*options.arguments(), *(["--json"] if json else [])]
    return run_from_checkout("headway-agent check-engine", _PROGRAM, given)
