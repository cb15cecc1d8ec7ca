"""Verdicts of a benchmark: a line that was not measured does not hold."""

import inspect
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ops.bench import __main__ as command
from ops.bench.result import Line, Result, spread
from shared.contracts.errors import SettingsError

HOLDS, BROKEN = Line(name="low", value=1.0, bound=2.0), Line(name="high", value=3.0, bound=2.0)
NOT_MEASURED = Line(name="later", value=None, bound=2.0)
NOT_A_NUMBER = Line(name="undefined", value=float("nan"), bound=2.0)


def result(*lines: Line) -> Result:
    return Result(name="overhead", seed=3, quick=True, figures={"a": 1.5}, lines=list(lines))


@pytest.mark.parametrize(
    ("lines", "holds", "not_measured"),
    [
        ([HOLDS], True, 0),
        ([HOLDS, NOT_MEASURED], True, 1),
        ([HOLDS, BROKEN], False, 0),
        ([BROKEN, NOT_MEASURED], False, 1),
        ([HOLDS, NOT_A_NUMBER], False, 0),
        ([NOT_MEASURED, NOT_MEASURED], False, 2),
        ([], False, 0),
    ],
)
def test_a_result_holds_if_all_measured_lines_hold_and_there_is_one(
    lines: list[Line], *, holds: bool, not_measured: int
):
    found = result(*lines)

    assert found.holds is holds
    data = found.data()
    assert (data["holds"], data["not_measured"]) == (holds, not_measured)


def test_a_line_that_was_not_measured_has_no_verdict():
    data = result(HOLDS, BROKEN, NOT_MEASURED).data()

    assert [each["holds"] for each in data["acceptance"]] == [True, False, None]
    assert [each["value"] for each in data["acceptance"]] == [1.0, 3.0, None]


def test_the_text_counts_the_lines_that_were_not_measured(capsys: pytest.CaptureFixture[str]):
    result(HOLDS, NOT_MEASURED, NOT_MEASURED).show()

    assert capsys.readouterr().out.splitlines()[-1] == ("2 of 3 lines not measured; overhead holds")


def test_a_result_without_a_measured_line_does_not_hold_in_the_text(
    capsys: pytest.CaptureFixture[str],
):
    result(NOT_MEASURED).show()

    assert capsys.readouterr().out.splitlines()[-1] == (
        "1 of 1 lines not measured; overhead does NOT hold"
    )


def test_rounds_are_reported_with_their_range():
    assert spread([4.0, 1.0, 9.0]) == {"median": 4.0, "min": 1.0, "max": 9.0}


@pytest.mark.parametrize("name", command.BENCHES + command.BY_NAME)
def test_every_bench_takes_the_common_options(name: str):
    parameters = inspect.signature(import_module(f"ops.bench.{name}").run).parameters

    assert {"seed", "quick", "broker"} <= parameters.keys()


def benches(
    monkeypatch: pytest.MonkeyPatch, made: dict[str, Result | None]
) -> list[dict[str, Any]]:
    """Replace all benches by fakes with these results; a bench with None cannot run."""
    calls: list[dict[str, Any]] = []

    def imported(module: str) -> SimpleNamespace:
        async def run(**arguments: Any) -> Result:
            calls.append(arguments)
            found = made[module.removeprefix("ops.bench.")]
            if found is None:
                raise SettingsError("no engine here")
            return found

        return SimpleNamespace(run=run)

    monkeypatch.setattr(command, "BENCHES", tuple(made))
    monkeypatch.setattr(command, "import_module", imported)
    return calls


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    """Run the command; return the exit code and the output's last line as JSON."""
    code = command.main([*argv, "--json"])
    return code, msgspec.json.decode(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize(("line", "code"), [(HOLDS, 0), (BROKEN, 1), (NOT_MEASURED, 1)])
def test_the_last_line_has_every_figure_of_one_bench(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    line: Line,
    code: int,
):
    calls = benches(monkeypatch, {"overhead": result(line)})

    found, data = run(capsys, "overhead", "--seed", "3", "--quick", "--out", str(tmp_path))

    assert found == code
    assert data == result(line).data()
    assert calls == [{"seed": 3, "quick": True, "broker": None}]
    assert msgspec.json.decode((tmp_path / "overhead.jsonl").read_bytes()) == data


def test_the_last_line_has_all_benches_and_reasons_for_benches_that_cannot_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    benches(monkeypatch, {"overhead": result(HOLDS), "engine": None})

    code, data = run(capsys, "--out", str(tmp_path))

    assert code == 1
    assert data == {
        "benches": [
            result(HOLDS).data(),
            {"bench": "engine", "error": "no engine here", "holds": False},
        ],
        "holds": False,
    }
