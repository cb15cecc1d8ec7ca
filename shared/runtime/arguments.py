"""What command lines share: help that says defaults, the options of every verb, verbs of verbs."""

import argparse
from pathlib import Path
from typing import Any


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Says an option's default, unless it is none or its help has said so."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default is None or isinstance(default, bool) or default in ("", (), []):
            return action.help
        if "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class TextHelpFormatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Leaves the lines of description and epilog as they are, too."""


def common_options(*, again: bool = False) -> argparse.ArgumentParser:
    """
    The options of every verb of a service, as a parent of its parser.

    Args:
        again: Whether it is for a verb below one that has them: unset rather than a default,
            which would undo what was given before.
    """
    unset = argparse.SUPPRESS
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        default=unset if again else None,
        help="settings as JSON",
    )
    common.add_argument(
        "--set",
        action="append",
        default=unset if again else [],
        metavar="FIELD=VALUE",
        help="one setting; dots for nested fields; beats environment and file",
    )
    common.add_argument(
        "--json",
        action="store_true",
        default=unset if again else False,
        help="machine-readable output",
    )
    return common


class KeepingSettings(argparse._SubParsersAction):  # type: ignore[type-arg]  # noqa: SLF001 - generic in stubs only, and argparse names no other base
    """Sub-verbs whose `--set` adds to what was set before them, instead of replacing it."""

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
    A time to wait, for a parser's `type`: not negative and not for ever.

    Raises:
        argparse.ArgumentTypeError: It is not.
    """
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is no time to wait")
    return value
