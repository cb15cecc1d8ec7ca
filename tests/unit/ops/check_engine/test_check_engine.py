"""The engine check: its parts, its report, and the explanations of figures."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ops.bench.given_model import given_model
from ops.check_engine import programs
from ops.check_engine.__main__ import main as check
from ops.check_engine.__main__ import parts
from ops.check_engine.explanations import EXPLANATIONS, explanation
from ops.check_engine.machine import machine
from ops.check_engine.part import AcceptanceLine, Found, Options, Part, PartFailedError, PartResult
from ops.check_engine.report import Report, markdown, unexplained
from services.agent.backends.vllm.shared.wire import EngineChoices
from services.agent.cli import main
from shared.contracts.base import ModelName
from shared.contracts.errors import SettingsError
from shared.models.tiny import make_tiny_models
from tests.contract.engine.engines import RIGS
from tests.unit.ops.deployment import ROOT


def options(out: Path, **fields: Any) -> Options:
    return Options(**({"out": out, "quick": True, "model": None, "has_gpu": False} | fields))


def result(name: str, found: Found) -> PartResult:
    return PartResult(name=name, about="About it.", found=found, duration_s=1.5)


def test_a_failing_part_does_not_stop_the_check(tmp_path: Path):
    def fails(_: Options) -> Found:
        raise PartFailedError("no device")

    failed = Part(name="engine", about="", run=fails).result(options(tmp_path))

    assert failed.failed
    assert failed.found.failure == "no device"


def test_only_a_gpu_is_profiled(tmp_path: Path):
    on_cpu = [part.name for part in parts(options(tmp_path))]
    on_gpu = [part.name for part in parts(options(tmp_path, has_gpu=True))]

    assert on_cpu == ["machine", "engine", "suite", "bench engine", "bench lso", "bench surface"]
    assert on_gpu == [*on_cpu, "profile"]
    assert set(on_gpu) == set(EXPLANATIONS)


def test_the_report_contains_figures_lines_and_failures():
    found = Found(
        figures={"missed, ours": 0.25},
        lines=[
            AcceptanceLine(line="one", value=0.4, bound=0.5, holds=True),
            AcceptanceLine(line="other", value=None, bound=1.0, holds=None),
        ],
        failure="a line | broke",
    )
    report = Report(at=0.0, quick=True, model="", parts=[result("bench engine", found)])
    page = markdown(report)

    assert report.failed == ["bench engine"]
    assert "Result: failed: bench engine." in page
    assert "| missed, ours | 0.25 | Share of the requests that missed a target" in page
    assert "| one | 0.4 | 0.5 | holds |" in page
    assert "| other | - | 1 | not measured |" in page
    assert "a line | broke" in page


def test_figures_without_a_sentence_are_found():
    known, unknown = Found(figures={"cores": 2}), Found(figures={"cores of the moon": 2})

    assert unexplained([result("machine", known)]) == []
    assert unexplained([result("machine", unknown)]) == ["machine: cores of the moon"]


def test_every_setting_of_an_engine_has_a_sentence():
    names = [f"setting: {name}" for name in EngineChoices.__struct_fields__]

    assert [name for name in names if explanation("engine", name) is None] == []


def test_every_fact_of_the_machine_has_a_sentence(tmp_path: Path):
    assert unexplained([result("machine", machine(options(tmp_path)))]) == []


def test_tests_are_counted_by_engine(tmp_path: Path):
    (tmp_path / "suite.xml").write_text(
        "<testsuites><testsuite>"
        '<testcase name="test_a[vllm]"/>'
        '<testcase name="test_b[vllm]"><failure/></testcase>'
        '<testcase name="test_c[vllm-policy-over-long]"><skipped/></testcase>'
        '<testcase name="test_d"><error/></testcase>'
        "</testsuite></testsuites>"
    )
    found = programs._counted(tmp_path / "suite.xml", failure="exit code 1")

    assert found.figures == {
        "tests, vllm": {"passed": 1, "failed": 1, "skipped": 0},
        "tests, vllm-policy": {"passed": 0, "failed": 0, "skipped": 1},
        "tests, other tests": {"passed": 0, "failed": 1, "skipped": 0},
        "failed tests": ["test_b[vllm]", "test_d"],
    }
    assert found.failure


@pytest.mark.parametrize(
    ("output", "code", "failure"),
    [
        ('{"holds": true, "figures": {"cuts": 1}}', 0, ""),
        (
            (
                '{"holds": false, "figures": {"cuts": 1}, "acceptance": '
                '[{"line": "x", "value": 2, "bound": 1, "holds": false}]}'
            ),
            1,
            "lines do not hold: x",
        ),
    ],
)
def test_a_bench_fails_if_a_line_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, code: int, failure: str
):
    def prints(command: Sequence[str], log: Path) -> str:
        del command
        log.write_text(f"progress\n{output}\n")
        if code:
            raise PartFailedError("exit code 1")
        return log.read_text()

    monkeypatch.setattr(programs, "run", prints)
    found = programs.bench("lso", options(tmp_path))

    assert found.figures == {"cuts": 1}
    assert found.failure == failure


def test_the_error_of_a_bench_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(command: Sequence[str], log: Path) -> str:
        del command
        log.write_text('{"bench": "surface", "error": "no RabbitMQ", "holds": false}\n')
        raise PartFailedError("exit code 1")

    monkeypatch.setattr(programs, "run", fails)
    with pytest.raises(PartFailedError, match="no RabbitMQ"):
        programs.bench("surface", options(tmp_path))


def test_a_program_that_fails_is_reported_with_the_end_of_its_output(tmp_path: Path):
    command = [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"]
    with pytest.raises(PartFailedError, match=r"exit code 3; (.|\n)*the reason"):
        programs.run(command, tmp_path / "log")


def test_programs_run_in_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", "import os; print(os.getcwd())"]

    assert programs.run(command, tmp_path / "log").strip() == str(ROOT)


def test_the_log_of_a_bench_does_not_replace_that_of_the_engine(tmp_path: Path):
    logs = [part.log for part in parts(options(tmp_path, has_gpu=True)) if part.log]

    assert len(logs) == len(set(logs))


def test_the_verb_starts_the_program(monkeypatch: pytest.MonkeyPatch):
    started: list[Sequence[str]] = []

    def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    code = main(["check-engine", "--quick", "--json", "--model", "m", "--out", "o"])

    assert code == 1
    assert list(started[0][1:]) == [
        *("-m", "ops.check_engine", "--quick", "--model", "m", "--out", "o", "--json"),
    ]


def test_an_invalid_model_is_refused_before_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code = check(["--model", str(tmp_path), "--out", str(tmp_path / "out")])

    assert code == 2
    assert "config.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_report_that_cannot_be_written_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "file"
    file.touch()

    assert check(["--out", str(file)]) == 1
    assert str(file) in capsys.readouterr().err


def test_all_engines_of_the_suite_are_counted_by_their_names():
    assert set(programs.ENGINES) == set(RIGS)
    assert [programs._engine_of(f"test_a[{name}-1]") for name in RIGS] == list(RIGS)


def test_a_given_model_is_read_from_its_configuration(tmp_path: Path):
    make_tiny_models(tmp_path, weights=False)
    directory = tmp_path / "tiny-llama"
    config = msgspec.json.decode((directory / "config.json").read_bytes())
    config["max_position_embeddings"] = 131072
    (directory / "config.json").write_bytes(msgspec.json.encode(config))
    entry = given_model(directory, ModelName("m"))

    assert (entry.name, entry.architecture) == ("m", "LlamaForCausalLM")
    assert entry.max_model_len == 8192


@pytest.mark.parametrize("content", [None, b"{}", b'{"architectures": ["A"]}', b"["])
def test_a_folder_without_a_model_is_refused(tmp_path: Path, content: bytes | None):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(SettingsError, match="--model"):
        given_model(tmp_path, ModelName("m"))
