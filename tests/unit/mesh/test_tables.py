"""Tables whose names stay whole."""

from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from services.mesh.verbs import tables
from services.mesh.verbs.tables import add_columns, print_tables

NAME, PATH = "meta-llama/Llama-3.1-8B-Instruct@main", "/srv/models/" + "a" * 90


def table() -> Table:
    made = Table(title="models")
    add_columns(made, ("model",))
    made.add_column("path", overflow="fold")
    made.add_row(NAME, PATH)
    return made


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_a_row_is_one_line_where_no_terminal_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_tables(table(), "end")
    lines = printed(capsys)

    assert [line for line in lines if NAME in line and PATH in line]
    assert lines[-1] == "end"


@pytest.mark.parametrize("columns", [30, 80])
def test_a_narrow_terminal_wraps_other_columns_only(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain: dict[str, Any] = {"force_terminal": True, "color_system": None}
    monkeypatch.setattr(tables, "Console", lambda **given: Console(**given, width=columns, **plain))
    print_tables(table())
    lines = printed(capsys)

    assert [line for line in lines if NAME in line]
    assert max(map(len, lines)) <= max(columns, len(NAME) + 20)


def test_a_given_width_holds_unless_a_name_is_longer(capsys: pytest.CaptureFixture[str]) -> None:
    print_tables(table(), width=70)
    lines = printed(capsys)

    assert [line for line in lines if NAME in line]
    assert max(map(len, lines)) <= 70


@pytest.mark.parametrize("folded", [True, False])
def test_names_on_a_screen_of_fixed_width_are_folded(*, folded: bool) -> None:
    made = Table()
    add_columns(made, ("instance",), folded=folded)

    assert made.columns[0].no_wrap is not folded
