"""Programs with verbs: how command lines are read, refused and helped, and their exit codes."""

import asyncio
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from importlib.metadata import version
from typing import Any, Literal

from cyclopts import App, CycloptsError, Group, Parameter, UnknownOptionError

from shared.contracts.errors import BrokerUnavailableError, MeshError, SettingsError
from shared.runtime.help_layout import LAYOUT, shown_default
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_NO_BROKER, EXIT_OK, EXIT_USAGE

Errors = tuple[type[Exception], ...]
Call = tuple[Callable[..., Any], inspect.BoundArguments]
_SHORT = len("-v")
Shell = Literal["bash", "zsh", "fish"]


def commands(name: str, text: str, *, examples: str = "") -> App:
    """
    A program, or a verb that has verbs of its own.

    Args:
        name: As the user types it.
        text: Its help; the first paragraph is also its line in the list of verbs.
        examples: Text below the options, also those of its verbs.
    """
    return App(
        name=name,
        help=text,
        help_epilogue=examples,
        help_format="plaintext",
        help_formatter=LAYOUT,
        version_flags=(),
        group_commands=Group.create_default_commands("Verbs"),
        group_parameters=Group.create_default_parameters("Options"),
        default_parameter=Parameter(negative=(), allow_repeating=True, show_default=shown_default),
        suppress_keyboard_interrupt=False,
    )


def verb(name: str, function: Callable[..., Any], *, examples: str = "") -> App:
    """
    A program or a verb that is a function, whose docstring is its help.

    Args:
        name: As the user types it.
        function: Its keyword parameters are the options.
        examples: Text below the options, also those of its own verbs.
    """
    app = commands(name, function.__doc__ or "", examples=examples)
    app.default(function)
    for flag in app.help_flags:
        app[flag].show = False
    return app


class Program:
    """
    A program.

    Args:
        app: Its verbs.
        usage_errors: Errors of verbs that end with the exit code for a wrong usage.
        failures: Errors of verbs that end with the exit code for a failure.
    """

    def __init__(
        self,
        app: App,
        *,
        usage_errors: Errors = (SettingsError,),
        failures: Errors = (MeshError,),
    ) -> None:
        self.app = app
        self.name = app.name[0]
        self._usage_errors = usage_errors
        self._failures = failures

    def completion(self, shell: Shell, /) -> int:
        """
        Print a script that lets a shell complete verbs and options.

        Args:
            shell: The shell that reads the script.
        """
        script = self.app.generate_completion(prog_name=self.name, shell=shell)
        sys.stdout.write(script)
        return EXIT_OK

    def main(self, argv: Sequence[str] | None = None) -> int:
        """
        Run the verb that the arguments name, and return its exit code.

        Args:
            argv: Arguments without the program's name; default: those of this process.
        """
        tokens = _asked(list(sys.argv[1:] if argv is None else argv))
        if tokens == ["--version"]:
            sys.stdout.write(f"{self.name} {version('headway')}\n")
            return EXIT_OK
        try:
            return self.run(tokens)
        except CycloptsError as error:
            verb = " ".join((self.name, *(error.command_chain or ())))
            return _failed(f"{verb}: {error}\nusage: {verb} --help", EXIT_USAGE)
        except (KeyboardInterrupt, asyncio.CancelledError):
            return EXIT_OK
        except BrokenPipeError:  # the reader of the output has ended, e.g. `head`
            sys.stdout = None  # nothing is flushed at the exit
            return EXIT_OK
        except (*self._usage_errors, *self._failures) as error:
            return self.reported(tokens, error)

    def run(self, tokens: Sequence[str]) -> int:
        """Parse *tokens*, run the verb and return its exit code."""
        function, bound, _ = self.parsed(tokens)
        return call(function, bound)

    def parsed(self, tokens: Sequence[str]) -> tuple[*Call, dict[str, Any]]:
        """
        The function of the verb, its arguments, and names and types of those not parsed.

        Raises:
            CycloptsError: The tokens do not fit the verb; or they name none.
        """
        app = self.app
        self._check_verb(tokens)
        try:
            function, bound, ignored = app.parse_args(
                [*tokens], print_error=False, exit_on_error=False
            )
        except UnknownOptionError as error:
            own = (each for each in error.argument_collection if each.parse)
            names = (name for each in own for name in each.names)
            text = error.token.keyword or error.token.value
            chain = error.command_chain or ()
            raise self._unknown_option(text, (*names, *self.shared_options()), chain) from error
        if function == app.help_print and not {*app.help_flags} & {*tokens}:
            raise CycloptsError(
                msg=f"a verb is missing, one of: {', '.join(self._choices(tokens))}",
                command_chain=app.parse_commands(tokens)[0],
            )
        return function, bound, ignored

    def _check_verb(self, tokens: Sequence[str]) -> None:
        """
        Check that the verb exists: cyclopts would load all verbs to say that it does not.

        Raises:
            CycloptsError: There is no such verb, or an option is in its place; the message names
                the nearest one, or all verbs.
        """
        chain, apps, left = self.app.parse_commands(tokens)
        if not left or left[0] in self.app.help_flags or apps[-1].default_command is not None:
            return
        if left[0].startswith("-"):
            known = self.shared_options() if chain else (*self.shared_options(), "--version")
            raise self._unknown_option(left[0], known, chain)
        known = (*self._choices(tokens),)
        words = known if chain else (*known, "help", "version")
        near = get_close_matches(left[0], words, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it must be one of: {', '.join(known)}"
        raise CycloptsError(msg=f"there is no verb {left[0]!r}: {hint}", command_chain=chain)

    def shared_options(self) -> tuple[str, ...]:
        """Options of all verbs besides their own."""
        return ("--help",)

    def _unknown_option(
        self, text: str, known: Sequence[str], chain: Sequence[str]
    ) -> CycloptsError:
        """The error for an option *text* that is none of *known*, with the nearest one."""
        name = text.partition("=")[0]
        near = _nearest(name, known)
        hint = f" Did you mean {near}?" if near else ""
        return CycloptsError(msg=f"Unknown option: {name}.{hint}", command_chain=chain)

    def _choices(self, tokens: Sequence[str]) -> Iterator[str]:
        above = self.app.parse_commands(tokens)[1][-1]
        return (name for name in above if not name.startswith("-"))

    def title(self, tokens: Sequence[str]) -> str:
        """Name in errors of the verb that *tokens* name."""
        return " ".join((self.name, *self.app.parse_commands(tokens)[0]))

    def reported(self, tokens: Sequence[str], error: Exception) -> int:
        """Print an error of the verb that *tokens* name, and return the exit code."""
        title = self.title(tokens)
        if isinstance(error, self._usage_errors):
            return _failed(f"{title}: {error}", EXIT_USAGE)
        if isinstance(error, BrokerUnavailableError):
            return _failed(f"{title}: broker: {error}", EXIT_NO_BROKER)
        return _failed(f"{title}: {error}", EXIT_FAILED)


def _asked(tokens: list[str]) -> list[str]:
    """The arguments with `help [VERB…]` and `version` as options; without any, for help."""
    if tokens == ["version"]:
        return ["--version"]
    if not tokens or tokens[0] == "help":
        return [*tokens[1:], "--help"]
    return tokens


def _nearest(name: str, known: Sequence[str]) -> str | None:
    """The option of *known* that is meant by *name*: its begin, its first letter, or similar."""
    begin = f"-{name.lower()}" if len(name) == _SHORT else name
    begun = (each for each in known if each.startswith(begin))
    return next(iter((*begun, *get_close_matches(name, known, n=1))), None)


def _failed(text: str, code: int) -> int:
    print(text, file=sys.stderr)  # noqa: T201 - errors of all programs
    return code


def call(function: Callable[..., Any], bound: inspect.BoundArguments) -> int:
    """Run the function of a verb, also if it is a coroutine function; return its exit code."""
    result = function(*bound.args, **bound.kwargs)
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    return result or EXIT_OK
