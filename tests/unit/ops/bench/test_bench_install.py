"""The bench of installations: its commands, its models and its report."""

from pathlib import Path

import pytest

from ops.bench import install
from ops.bench.install import INSTALL, UP, Installed, Started, many_models, report
from ops.bench.result import Result
from shared.models.registry import ModelRegistry
from shared.models.tokenizer import Tokenizer
from tests.unit.ops.deployment import ROOT

GATEWAY = Started(ready_s=1.0, peak_mb=100.0, tokenizers=False)
FAST = Installed(
    environment_s=5.0, install_s=30.0, ready_s=3.0, answer_s=0.1, disk_mb=800.0, unwanted=()
)


def verdicts(starts: list[Started], installed: Installed | None) -> list[bool | None]:
    result = Result(name="install", seed=0, quick=installed is None)
    report(result, starts, installed)
    return [line.holds for line in result.lines]


def test_the_measured_commands_are_the_first_of_the_readme():
    first = (ROOT / "README.md").read_text().split("```sh\n")[1].partition("```")[0]

    lines = [line.partition("#")[0].rstrip() for line in first.splitlines()]
    assert lines == [
        "python3 -m venv .venv",
        f".venv/bin/pip {' '.join(INSTALL)} '.[mesh]'",
        f".venv/bin/headway {' '.join(UP)}",
    ]


def test_each_model_has_a_tokenizer_with_a_large_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(install, "MANY_MODELS", 2)

    registry = ModelRegistry.load(many_models(tmp_path, seed=3))

    sizes = [Tokenizer.load(Path(registry.entry(base).path)).vocab_size for base in registry.bases]
    assert sizes == [128_000, 128_000]


def test_a_quick_run_has_no_verdict_on_the_installation():
    assert verdicts([GATEWAY], None) == [None, None, True, True, True]


def test_the_line_of_an_installation_bounds_the_sum_of_its_steps():
    slow = Installed(
        environment_s=15.0,
        install_s=40.0,
        ready_s=6.0,
        answer_s=0.1,
        disk_mb=1.0,
        unwanted=["vllm"],
    )

    assert verdicts([GATEWAY], FAST)[:2] == [True, True]
    assert verdicts([GATEWAY], slow)[:2] == [False, False]


def test_a_gateway_must_start_soon_and_load_no_tokenizers():
    late = Started(ready_s=2.1, peak_mb=121.0, tokenizers=True)

    assert verdicts([late, late, GATEWAY], FAST)[2:] == [False, False, False]
