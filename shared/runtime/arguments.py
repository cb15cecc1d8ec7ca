"""Common parts of command lines: help with defaults, shared options, nested verbs."""

import argparse
from pathlib import Path
from typing import Any


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds an option's default to its help, unless the default is empty or already in the help."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default is None or isinstance(default, bool) or default in ("", (), []):
            return action.help
        if "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class TextHelpFormatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Adds defaults to the help, and keeps the line breaks of the description and the epilog."""


def common_options(*, again: bool = False) -> argparse.ArgumentParser:
    """
    Options shared by all verbs of a service, as a parent parser.

    Args:
        again: True for a verb that is nested below a verb with the same options. The nested verb
            has no defaults, since these would override the values of the outer verb.
    """
    unset = argparse.SUPPRESS
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        default=unset if again else None,
        help="settings file (JSON)",
    )
    common.add_argument(
        "--set",
        action="append",
        default=unset if again else [],
        metavar="FIELD=VALUE",
        help="set one setting; dots separate nested fields; overrides environment and file",
    )
    common.add_argument(
        "--json",
        action="store_true",
        default=unset if again else False,
        help="machine-readable output",
    )
    return common


class KeepingSettings(argparse._SubParsersAction):  # type: ignore[type-arg]  # noqa: SLF001 - generic in stubs only, and argparse names no other base
    """
    Argument parser action for nested verbs: their `--set` options are added to those of the outer
    verb.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = list(namespace.set)
        namespace.set = []
        super().__call__(parser, namespace, values, option_string)
        namespace.set = before + list(namespace.set)


def seconds(text: str) -> float:
    """
    Parse a finite duration in seconds that is not negative; for the `type` of a parser's argument.

    Raises:
        argparse.ArgumentTypeError: The text is not such a duration.
    """
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{value} is not a duration: must be finite and not negative"
        )
    return value
