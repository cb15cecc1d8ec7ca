"""
The alert rules of `ops/dashboards/rules`: `python -m ops.alerts check` checks and tests them.

`python -m ops.alerts shorten --by 60 DIRECTORY` writes a copy with short windows, in which an alert
that needs five minutes fires within five seconds: for a trial of the whole chain on a mesh of your
own, and for the test of this project.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ops.prometheus import program
from shared.contracts.base import Seconds
from shared.contracts.errors import SettingsError

RULES = Path(__file__).resolve().parent / "dashboards" / "rules"
"""Folder of the rules; `RULES/tests` has their unit tests for promtool."""
UNIT_S: Mapping[str, Seconds] = {"s": 1, "m": 60, "h": 3600, "d": 86400}
"""Units of durations in the rules; others are refused."""
_RANGE = re.compile(r"\[([^\]]+)\]")
_SECONDS = re.compile(r"\b(\d+)(?= # seconds$)", re.MULTILINE)
"""A number that a metric in seconds is compared with; the rules mark it by this comment."""


def rule_files(folder: Path = RULES) -> list[Path]:
    """The files of rules, without those of their tests."""
    return sorted(folder.glob("*.yml"))


def rules(folder: Path = RULES) -> Iterator[dict[str, Any]]:
    """Every rule of every group: recorded series (`record`) and alerts (`alert`)."""
    for path in rule_files(folder):
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from group["rules"]


def shortened(text: str, factor: float) -> str:
    """
    A rule file whose times are divided by *factor*: ranges of expressions, the time for which a
    condition must hold (`for`), and numbers marked as seconds. Names and thresholds stay, so a
    series that is named after one hour then covers a part of it.

    Args:
        text: Content of a rule file.
        factor: Above 0.

    Raises:
        SettingsError: A duration has another form than a number with one of the units `UNIT_S`.
    """

    def ranged(match: re.Match[str]) -> str:
        return f"[{_divided(match[1], factor)}]"

    def compared(match: re.Match[str]) -> str:
        return f"{int(match[1]) / factor:g}"

    document = yaml.safe_load(text)
    for group in document["groups"]:
        for rule in group["rules"]:
            rule["expr"] = _SECONDS.sub(compared, _RANGE.sub(ranged, rule["expr"]))
            if "for" in rule:
                rule["for"] = _divided(rule["for"], factor)
    short: str = yaml.safe_dump(document, sort_keys=False, width=1000)
    return short


def _divided(duration: str, factor: float) -> str:
    return f"{max(1, round(1000 * seconds_of(duration) / factor))}ms"


def seconds_of(duration: str) -> Seconds:
    """
    Seconds of a duration such as `90s` or `6h`.

    Raises:
        SettingsError: It is not a number with one of the units `UNIT_S`.
    """
    match = re.fullmatch(r"(\d+)([a-z]+)", duration)
    if match is None or match[2] not in UNIT_S:
        raise SettingsError(
            f"duration {duration!r} must be a number and one of {', '.join(UNIT_S)}"
        )
    return int(match[1]) * UNIT_S[match[2]]


def shorten(factor: float, folder: Path) -> list[Path]:
    """Write a copy of every rule file with times divided by *factor* into *folder*."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for path in rule_files():
        copy = folder / path.name
        copy.write_text(shortened(path.read_text(), factor))
        written.append(copy)
    return written


def check() -> int:
    """
    Check the rules and run their unit tests with promtool; return its exit code.

    Raises:
        SettingsError: promtool is not installed.
    """
    promtool = program("promtool")
    if promtool is None:
        raise SettingsError("promtool is not installed: run `python -m ops.prometheus install`")
    tests = sorted((RULES / "tests").glob("*.yml"))
    for verb, files in (("check", rule_files()), ("test", tests)):
        done = subprocess.run([promtool, verb, "rules", *map(str, files)], check=False)
        if done.returncode:
            return done.returncode
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m ops.alerts VERB`; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ops.alerts", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("check", help="check the rules and run their unit tests with promtool")
    copy = verbs.add_parser("shorten", help="write a copy of the rules with short windows")
    copy.add_argument("--by", type=float, default=60.0, help="divisor of all times (60)")
    copy.add_argument("folder", type=Path, help="folder of the copy")
    arguments = parser.parse_args(argv)
    try:
        if arguments.verb == "check":
            return check()
        for path in shorten(arguments.by, arguments.folder):
            print(path)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
