"""Help texts of the options of all commands."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.profiling import cli, cli_shape
from ops.sim.arguments import parser as simulator
from services.mesh.arguments import parser as mesh
from shared.runtime.arguments import HelpFormatter, TextHelpFormatter, seconds
from tests.unit.ops.deployment import CLIS

PARSERS = {
    "headway": mesh(amqp_url="amqp://h/", registry=None),
    "simulate": simulator(),
    "profile": cli._parser(),
    "shape": cli_shape._parser(),
    **{service: cli._parser() for service, cli in CLIS.items()},
}
each = pytest.mark.parametrize("name", PARSERS)


def below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield *parser* and the parsers of its verbs, recursively."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from below(verb)


def options(name: str) -> Iterator[tuple[str, argparse.Action]]:
    for parser in below(PARSERS[name]):
        for action in parser._actions:
            if not isinstance(action, argparse._SubParsersAction):
                yield f"{parser.prog} {action.option_strings or action.dest}", action


@each
def test_every_option_is_explained(name: str):
    assert [where for where, action in options(name) if not action.help] == []


@each
def test_every_parser_with_a_default_shows_it(name: str):
    mute = {
        parser.prog
        for parser in below(PARSERS[name])
        if not issubclass(parser.formatter_class, HelpFormatter)
        and any(a.default not in (None, False, [], argparse.SUPPRESS) for a in parser._actions)
    }

    assert mute == set()


@each
def test_every_help_text_renders(name: str):
    for parser in below(PARSERS[name]):
        text = parser.format_help()
        assert "(default: None)" not in text
        assert "(default: False)" not in text


def shown(text: str, default: object) -> str:
    parser = argparse.ArgumentParser(prog="p", formatter_class=TextHelpFormatter)
    parser.add_argument("--option", default=default, help=text)
    return parser.format_help().rpartition("--option OPTION")[2].strip()


@pytest.mark.parametrize(
    ("text", "default", "printed"),
    [
        ("seconds", 0.0, "seconds (default: 0.0)"),
        ("of the gateway", 8000, "of the gateway (default: 8000)"),
        ("logs", Path("here"), "logs (default: here)"),
        ("the model; default: the first", 3, "the model; default: the first"),
        ("by default none", 3, "by default none"),
        ("a switch", False, "a switch"),
        ("a file", None, "a file"),
        ("a text", "", "a text"),
        ("several", (), "several"),
    ],
)
def test_defaults_are_shown_once_and_only_where_they_exist(
    text: str, default: object, printed: str
):
    assert shown(text, default) == printed


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "soon"])
def test_invalid_durations_are_refused_by_name(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--timeout", type=seconds)

    assert parser.parse_args(["--timeout", "0"]).timeout == 0
    with pytest.raises(SystemExit):
        parser.parse_args([f"--timeout={text}"])
    assert "argument --timeout" in capsys.readouterr().err
