"""Help of all commands: complete, readable at 80 columns without colour, and without secrets."""

import importlib
import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from inspect import getdoc
from pathlib import Path
from typing import Annotated, get_args

import pytest
from cyclopts import App, Argument

from services.mesh.cli import CHECKOUT_VERBS, VERBS, MeshProgram
from services.mesh.models import provide
from shared.runtime.options import SecondsOption
from shared.runtime.program import Program, commands
from tests.unit.ops.deployment import CLIS

PROGRAMS: tuple[Program, ...] = (MeshProgram(), provide.PROGRAM, *CLIS.values())


def below(app: App, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], App]]:
    """Yield *app* and its verbs, recursively, with the words that select them."""
    yield path, app
    for name in app:
        if not name.startswith("-"):
            yield from below(app[name], (*path, name))


ALL_VERBS = VERBS | CHECKOUT_VERBS
PAGES = {
    " ".join(path): (program, app)
    for program in PROGRAMS
    for path, app in below(program.app, (program.name,))
}
every_page = pytest.mark.parametrize("page", PAGES)


@cache
def options(page: str) -> list[Argument]:
    _, app = PAGES[page]
    if app.default_command is None:
        return []
    return [each for each in app.assemble_argument_collection(parse_docstring=True) if each.show]


@cache
def printed(page: str) -> str:
    """A page as a terminal of 80 columns shows it."""
    program, _ = PAGES[page]
    verb = page.removeprefix(program.name).split()
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(io.StringIO()) as out:
        patched.setenv("COLUMNS", "80")
        assert program.main([*verb, "--help"]) == 0
    return out.getvalue()


def test_the_pages_are_those_of_all_verbs():
    assert len(PAGES) > 60
    known = {"headway up", "headway keys create", "headway profile", "headway-agent lso pull"}
    assert known <= {*PAGES}


@every_page
def test_every_option_is_explained(page: str):
    assert [each.name for each in options(page) if not each.parameter.help] == []


@every_page
def test_integers_are_not_rounded_and_empty_paths_are_refused(page: str):
    """cyclopts' own readers make 2 of 1.5, and the current folder of an empty path."""
    own = [
        each.name
        for each in options(page)
        if {int, Path} & {each.hint, *get_args(each.hint)} and each.parameter.converter is None
    ]

    assert own == []


@every_page
def test_every_page_is_readable_at_80_columns_without_colour(page: str):
    lines = printed(page).splitlines()

    assert max(map(len, lines)) <= 80
    assert [line for line in lines if not line.isascii() or "\x1b" in line] == []
    examples = [line for line in lines if line.lstrip().startswith("headway")]
    assert [line for line in examples if not line.startswith(("  ", "headway-"))] == []


@every_page
def test_every_page_shows_what_the_verb_does_and_its_options(page: str):
    text = printed(page)
    _, app = PAGES[page]

    assert " ".join(app.help.strip().partition("\n\n")[0].split()) in " ".join(text.split())
    names = [each.name for each in options(page)]
    assert [each for each in names if each.lower() not in text.lower()] == []
    for empty in ("None", "False", "()"):
        assert f"default: {empty}" not in text


@every_page
def test_every_verb_is_a_function_whose_docstring_is_its_help(page: str):
    _, app = PAGES[page]
    if app.default_command is not None:
        first = (getdoc(app.default_command) or "").partition("\n\n")[0]
        assert first.endswith(".")


@pytest.mark.parametrize("verb", ALL_VERBS)
def test_the_list_of_verbs_has_the_help_of_each(verb: str):
    place, text = ALL_VERBS[verb]
    module, _, name = place.partition(":")
    found = getattr(importlib.import_module(module), name)
    own = found.help if isinstance(found, App) else getdoc(found)

    assert " ".join(own.partition("\n\n")[0].split()) == text


def program_of(value_type: object, default: object) -> Program:
    app = commands("p", "Program.")

    def verb(*, option=default) -> int:
        """
        Do it.

        Args:
            option: The text.
        """
        print(option)  # noqa: T201 - the output of a verb
        return 0

    verb.__annotations__["option"] = value_type
    app.default(verb)
    return Program(app)


@pytest.mark.parametrize(
    ("value_type", "default", "shown"),
    [
        (float, 0.0, "The text. [default: 0.0]"),
        (int, 8000, "The text. [default: 8000]"),
        (Path, Path("here"), "The text. [default: here]"),
        (bool, False, "The text."),
        (Path | None, None, "The text."),
        (str, "", "The text."),
        (tuple[str, ...], (), "The text."),
    ],
)
def test_defaults_are_shown_only_where_they_say_something(
    value_type: object, default: object, shown: str, capsys: pytest.CaptureFixture[str]
):
    assert program_of(value_type, default).main(["--help"]) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "--option" in each]
    assert line.endswith(f"  {shown}")


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "soon"])
def test_invalid_durations_are_refused_by_name(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program = program_of(Annotated[float, *SecondsOption.__metadata__], 1.0)

    assert program.main(["--option", "0"]) == 0
    assert program.main([f"--option={text}"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "0.0\n"
    assert "Invalid value for --option" in printed.err
    assert printed.err.endswith("usage: p --help\n")
