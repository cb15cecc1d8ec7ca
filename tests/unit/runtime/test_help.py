"""What the help of all commands says of their options."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.sim.arguments import parser as simulator
from services.mesh import cli_profile, cli_profile_shape
from services.mesh.arguments import parser as mesh
from shared.runtime.arguments import HelpFormatter, TextHelpFormatter, seconds
from tests.unit.ops.deployment import CLIS

PARSERS = {
    "headway": mesh(amqp_url="amqp://h/", registry=None),
    "simulate": simulator(),
    "profile": cli_profile._parser(),
    "shape": cli_profile_shape._parser(),
    **{service: cli._parser() for service, cli in CLIS.items()},
}
each = pytest.mark.parametrize("name", PARSERS)


def below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """*parser* and those of its verbs, theirs included."""
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
def test_every_parser_with_a_default_says_it(name: str):
    mute = {
        parser.prog
        for parser in below(PARSERS[name])
        if not issubclass(parser.formatter_class, HelpFormatter)
        and any(a.default not in (None, False, [], argparse.SUPPRESS) for a in parser._actions)
    }

    assert mute == set()


@each
def test_no_help_breaks(name: str):
    for parser in below(PARSERS[name]):
        text = parser.format_help()
        assert "(default: None)" not in text
        assert "(default: False)" not in text


def shown(text: str, default: object) -> str:
    parser = argparse.ArgumentParser(prog="p", formatter_class=TextHelpFormatter)
    parser.add_argument("--option", default=default, help=text)
    return parser.format_help().rpartition("--option OPTION")[2].strip()


@pytest.mark.parametrize(
    ("text", "default", "told"),
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
def test_defaults_are_told_once_and_only_where_there_are_any(text: str, default: object, told: str):
    assert shown(text, default) == told


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "soon"])
def test_what_is_no_time_to_wait_is_refused_by_name(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--timeout", type=seconds)

    assert parser.parse_args(["--timeout", "0"]).timeout == 0
    with pytest.raises(SystemExit):
        parser.parse_args([f"--timeout={text}"])
    assert "argument --timeout" in capsys.readouterr().err
