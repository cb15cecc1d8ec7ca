"""`headway profile shape`, as users start it."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ops.sim.profiles import load
from services.agent.backends.settings import SimulatedSettings
from services.mesh.cli import main
from shared.contracts.estimates import Profile
from tests import requirements
from tests.shapes import CONFIG

SMALL = [
    *("--chunks", "16,128", "--contexts", "32", "--batches", "2", "--prefill-contexts", "0,64"),
    *("--repeats", "2", "--passes", "1"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def shaped(folder: Path, *more: str) -> int:
    """Profile a shape on the CPU; *more* overrides options."""
    out = folder / "shape.json"
    arguments = ["profile", "shape", str(folder), "--device", "cpu", *SMALL, "--out", str(out)]
    return main([*arguments, *more])


def test_shape_gives_a_profile_that_simulators_read(
    folder: Path, capfd: pytest.CaptureFixture[str]
):
    requirements.module("torch")
    picture = folder / "shape.png"
    code = shaped(folder, "--model", "tiny", "--json", "--plot", str(picture))
    printed = capfd.readouterr()
    report = msgspec.json.decode(printed.out)
    written = msgspec.json.decode((folder / "shape.json").read_bytes(), type=Profile)

    assert code == 0
    assert (written.model, written.engine, written.device) == ("tiny", "torch", "cpu")
    assert written.latency is not None
    assert msgspec.to_builtins(written) == report["profile"]
    assert {written.num_iterations, sum(each["samples"] for each in report["cells"])} == {18}
    assert written.latency_error is not None
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "timing tiny" not in printed.out
    assert "repeat 2 of 2" in printed.err

    found = load(str(folder / "shape.json"))
    assert found.name == "tiny/cpu"
    assert found.kv_capacity_tokens == written.kv_capacity_tokens
    assert found.latency.predict_s(128, 8192, 0) > 0
    engine = SimulatedSettings(
        latency=written.latency, kv_capacity_tokens=written.kv_capacity_tokens or 0
    )
    assert engine.kv_capacity_tokens > 1000


def test_text_output_has_coefficients_errors_and_memory(
    folder: Path, capfd: pytest.CaptureFixture[str]
):
    requirements.module("torch")
    assert shaped(folder) == 0
    printed = capfd.readouterr()

    assert printed.out.startswith(f"{folder.name} on torch, cpu: 18 iterations")
    assert "error on the last repeat, predicted from earlier repeats: median " in printed.out
    assert "KV memory for " in printed.out
    assert "TFLOP/s" in printed.err


def test_overhead_is_in_every_iteration(folder: Path):
    requirements.module("torch")
    assert shaped(folder, "--overhead-s", "20") == 0
    latency = load(str(folder / "shape.json")).latency

    assert latency.predict_s(1, 0.5, 0) == pytest.approx(20, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--device", "tpu"], "--device: 'tpu' must be one of cpu, cuda, cuda:N"),
        (["--overhead-s", "-1"], "--overhead-s: -1.0 is not a duration"),
        (["--overhead-s", "nan"], "--overhead-s: nan is not a duration"),
        (["--gpu-memory-utilization", "0"], "for --gpu-memory-utilization. Must be > 0."),
        (["--gpu-memory-utilization", "1.1"], "for --gpu-memory-utilization. Must be <= 1."),
        (["--passes", "0"], "passes must be at least 1: 0"),
        (
            ["--repeats", "1"],
            "repeats must be at least 2, since the last repeat is used for validation: 1",
        ),
        (["--prefill-contexts", "-1"], "--prefill-contexts: '-1': each value must be at least 0"),
        (["--chunks", "513"], "chunks: 513 is above the limit of 512"),
        (["--out", "/nowhere/profile.json"], "--out: /nowhere is not a directory"),
        (["--engine", "vllm"], "Unknown option: --engine"),
    ],
)
def test_invalid_option_of_a_shape_is_refused_by_name(
    folder: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], printed: str
):
    requirements.module("torch")
    assert shaped(folder, *arguments) == 2
    shown = capfd.readouterr().err
    assert printed in shown
    assert "Traceback" not in shown


def test_missing_gpu_error_names_the_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    torch = requirements.module("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["profile", "shape", str(folder), "--out", str(folder / "shape.json")]) == 2
    assert "finds no CUDA device; run this on a machine with one" in capfd.readouterr().err
    assert not (folder / "shape.json").exists()


def test_missing_torch_error_names_the_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    for name in ("shape_profiler", "torch_device", "layers"):
        monkeypatch.delitem(sys.modules, f"ops.profiling.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert shaped(folder) == 2
    assert "timing a shape needs torch: pip install torch" in capfd.readouterr().err


def test_invalid_shape_is_refused_before_torch_is_needed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "torch", None)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 0}))
    assert shaped(folder) == 2
    assert "hidden_size: 0 must be from 1 to 65536" in capfd.readouterr().err


@pytest.mark.slow
def test_command_does_not_load_torch():
    """Reading a shape does not import torch; only timing does."""
    code = "import sys, services.mesh.cli; print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout == "False\n"


def test_help_needs_no_shape(capsys: pytest.CaptureFixture[str]):
    assert main(["profile", "shape", "--help"]) == 0
    assert "--passes N" in capsys.readouterr().out
