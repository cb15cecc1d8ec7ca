"""Completion of commands by shells."""

import contextlib
import io
import subprocess
from pathlib import Path

import pytest

from services.mesh.cli import main as headway
from services.planner.cli import main as planner

COMPLETE = """
set -u
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
COMP_LINE="$*"
COMP_POINT=${#COMP_LINE}
name=$(complete -p "$1" | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMPREPLY=()
"$name" "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""Program of bash that completes the last of its arguments as an interactive shell does."""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Scripts of bash by program, as the commands print them."""
    directory = tmp_path_factory.mktemp("completion")
    found = {}
    for program, main in (("headway", headway), ("headway-planner", planner)):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main(["completion", "bash"]) == 0
        found[program] = directory / program
        found[program].write_text(printed.getvalue())
    return found


def completed(script: Path, *words: str) -> set[str]:
    """What bash offers for the last word of a line."""
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", "-c", COMPLETE, "bash", str(script), *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return {line.strip() for line in done.stdout.splitlines() if line.strip()}


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("headway", "su"), {"submit"}),
        (("headway", "dead"), {"dead-letter"}),
        (("headway", "models", "re"), {"remove"}),
        (("headway", "submit", "--max-t"), {"--max-tokens"}),
        (("headway", "keys", "create", "--te"), {"--tenant"}),
        (("headway", "usage", "--by", "h"), {"hour"}),
        (("headway", "plan", "sh"), {"show"}),
        (("headway", "plan", "show", "--ga"), {"--gantt"}),
        (("headway-planner", "he"), {"health"}),
        (("headway-planner", "plan", "explain", "--gr"), {"--groups"}),
        (("headway-planner", "plan", "explain", "--se"), {"--set"}),
    ],
)
def test_bash_completes_verbs_options_and_choices(
    words: tuple[str, ...], offered: set[str], scripts: dict[str, Path]
):
    assert completed(scripts[words[0]], *words) == offered


@pytest.mark.parametrize(
    ("shell", "line"),
    [("zsh", "#compdef headway-planner"), ("fish", "complete -c headway-planner")],
)
def test_scripts_of_other_shells_name_verbs_and_options(
    shell: str, line: str, capsys: pytest.CaptureFixture[str]
):
    assert planner(["completion", shell]) == 0
    script = capsys.readouterr().out

    assert line in script
    for name in ("show-plan", "check-config", "explain", "groups", "gantt"):
        assert name in script


def test_an_unknown_shell_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]):
    assert headway(["completion", "csh"]) == 2
    assert 'Choose from: "bash", "zsh", "fish"' in capsys.readouterr().err
