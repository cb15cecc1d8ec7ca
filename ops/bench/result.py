"""Result of a benchmark: figures, and acceptance lines."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One acceptance line: a measured value and the bound of the value."""

    name: str
    value: float | None
    """Measured value of the acceptance line; None if this run did not measure it."""
    bound: float

    @property
    def holds(self) -> bool | None:
        """True if the value is at most the bound; None if this run did not measure the line."""
        return None if self.value is None else bool(self.value <= self.bound)


@dataclass(slots=True, kw_only=True)
class Result:
    """All figures and acceptance lines of one benchmark's run."""

    name: str
    seed: int
    quick: bool
    figures: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    @property
    def num_not_measured(self) -> int:
        """Number of lines without a value."""
        return sum(line.holds is None for line in self.lines)

    @property
    def holds(self) -> bool:
        """True if the run measured at least one acceptance line, and every measured line holds."""
        measured = [line.holds for line in self.lines if line.holds is not None]
        return bool(measured) and all(measured)

    def data(self) -> dict[str, Any]:
        """The result as JSON-able data."""
        return {
            "bench": self.name,
            "seed": self.seed,
            "quick": self.quick,
            "figures": self.figures,
            "acceptance": [
                {"line": line.name, "value": line.value, "bound": line.bound, "holds": line.holds}
                for line in self.lines
            ],
            "not_measured": self.num_not_measured,
            "holds": self.holds,
        }

    def show(self) -> None:
        """Print the result as text."""
        console = Console(width=100)
        table = Table(title=f"{self.name}{' (quick)' if self.quick else ''}, seed {self.seed}")
        table.add_column("figure")
        table.add_column("value", justify="right")
        for name, value in self.figures.items():
            table.add_row(name, _shown(value))
        console.print(table)
        for line in self.lines:
            verdict = {True: "holds", False: "BROKEN", None: "not measured"}[line.holds]
            console.print(f"{line.name}: {_shown(line.value)} (at most {line.bound:g}): {verdict}")
        console.print(
            f"{self.num_not_measured} of {len(self.lines)} lines not measured; "
            f"{self.name} {'holds' if self.holds else 'does NOT hold'}"
        )

    def save(self, directory: Path) -> None:
        """Append the result to the benchmark's history, the file NAME.jsonl in *directory*."""
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / f"{self.name}.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(self.data()) + b"\n")


def quantiles_ms(values_s: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile of times in seconds, converted to milliseconds."""
    return {
        "p50": round(1000 * float(np.quantile(values_s, 0.5)), 3),
        "p99": round(1000 * float(np.quantile(values_s, 0.99)), 3),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest of the values of all rounds."""
    return {
        "median": round(float(np.median(values)), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def interval(values: Sequence[float]) -> dict[str, float]:
    """Median of *values* with its 95 % confidence interval, by the bootstrap."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (2000, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return {"median": float(np.median(values)), "low": float(low), "high": float(high)}


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{key} {_shown(part)}" for key, part in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
