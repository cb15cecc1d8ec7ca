"""The report of a check: data, and the same as a page of Markdown."""

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from ops.check_engine.explanations import explanation
from ops.check_engine.part import AcceptanceLine, PartResult
from shared.contracts.base import UnixTime

_VERDICTS = {True: "holds", False: "does not hold", None: "not measured"}


class Report(Struct, kw_only=True):
    """Results of all parts."""

    at: UnixTime
    quick: bool
    model: str
    """Folder of the model; empty for a tiny model."""
    parts: list[PartResult]

    @property
    def failed(self) -> list[str]:
        """Names of the parts that failed."""
        return [part.name for part in self.parts if part.failed]


def unexplained(parts: Sequence[PartResult]) -> list[str]:
    """Figures and lines without a sentence, as `part: name`."""
    return [
        f"{part.name}: {name}"
        for part in parts
        for name in (*part.found.figures, *(line.line for line in part.found.lines))
        if explanation(part.name, name) is None
    ]


def markdown(report: Report) -> str:
    """The report as a page of Markdown."""
    return "\n".join(_page(report)) + "\n"


def _page(report: Report) -> Iterator[str]:
    yield "# Engine check"
    yield ""
    verdict = f"failed: {', '.join(report.failed)}" if report.failed else "every part passed"
    yield f"Result: {verdict}."
    kind = "A quick run: short tests, short benches." if report.quick else "A whole run."
    model = f"`{report.model}`" if report.model else "a tiny model with random weights"
    yield f"{kind} Model of the measurements: {model}."
    yield "ops/docs/check-engine.md describes the parts and how to read them."
    yield ""
    yield "| part | result | time, s |"
    yield "|---|---|---:|"
    for part in report.parts:
        yield f"| {part.name} | {'FAILED' if part.failed else 'passed'} | {part.duration_s:g} |"
    for part in report.parts:
        yield from _section(part)


def _section(part: PartResult) -> Iterator[str]:
    yield ""
    yield f"## {part.name}"
    yield ""
    yield part.about
    if part.failed:
        yield ""
        yield "Failed:"
        yield ""
        yield "```"
        yield part.found.failure
        yield "```"
    if part.found.figures:
        yield ""
        yield "| figure | value | meaning |"
        yield "|---|---|---|"
        for name, value in part.found.figures.items():
            yield _row(name, shown(value), explanation(part.name, name) or "")
    if part.found.lines:
        yield ""
        yield "| line | value | at most | verdict | meaning |"
        yield "|---|---:|---:|---|---|"
        for line in part.found.lines:
            yield _line_row(part.name, line)


def _line_row(part: str, line: AcceptanceLine) -> str:
    value = "-" if line.value is None else shown(line.value)
    meaning = explanation(part, line.line) or ""
    return _row(line.line, value, f"{line.bound:.3g}", _VERDICTS[line.holds], meaning)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def shown(value: Any) -> str:
    """A figure as short text."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {shown(each)}" for name, each in value.items())
    if isinstance(value, list):
        return "; ".join(map(shown, value))
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)
