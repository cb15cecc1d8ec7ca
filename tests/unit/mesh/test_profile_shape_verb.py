"""`headway profile --shape`, as users start it."""

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
from tests.unit.agent.shapes import CONFIG

SMALL = [
    *("--chunks", "16,128", "--contexts", "32", "--batches", "2", "--prefill-contexts", "0,64"),
    *("--repeats", "2", "--passes", "1"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def shaped(folder: Path, *more: str) -> int:
    """On the CPU, unless *more* says otherwise."""
    out = folder / "shape.json"
    arguments = ["--shape", str(folder), "--device", "cpu", *SMALL, "--out", str(out)]
    return main(["profile", *arguments, *more])


def test_a_shape_gives_a_profile_that_the_simulators_read(
    folder: Path, capfd: pytest.CaptureFixture[str]
):
    pytest.importorskip("torch")
    picture = folder / "shape.png"
    code = shaped(folder, "--model", "tiny", "--json", "--plot", str(picture))
    told = capfd.readouterr()
    report = msgspec.json.decode(told.out)
    written = msgspec.json.decode((folder / "shape.json").read_bytes(), type=Profile)

    assert code == 0
    assert (written.model, written.engine, written.device) == ("tiny", "torch", "cpu")
    assert written.latency is not None
    assert msgspec.to_builtins(written) == report["profile"]
    assert {written.num_iterations, sum(each["samples"] for each in report["cells"])} == {18}
    assert written.latency_error is not None
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "timing tiny" not in told.out
    assert "repeat 2 of 2" in told.err

    found = load(str(folder / "shape.json"))
    assert found.name == "tiny/cpu"
    assert found.kv_capacity_tokens == written.kv_capacity_tokens
    assert found.latency.predict_s(128, 8192, 0) > 0
    engine = SimulatedSettings(
        latency=written.latency, kv_capacity_tokens=written.kv_capacity_tokens or 0
    )
    assert engine.kv_capacity_tokens > 1000


def test_people_get_the_coefficients_the_errors_and_the_memory(
    folder: Path, capfd: pytest.CaptureFixture[str]
):
    pytest.importorskip("torch")
    assert shaped(folder) == 0
    told = capfd.readouterr()

    assert told.out.startswith(f"{folder.name} on torch, cpu: 18 iterations")
    assert "error on the last repeat, told from the others: median " in told.out
    assert "KV memory for " in told.out
    assert "TFLOP/s" in told.err


def test_the_overhead_is_in_every_iteration(folder: Path):
    pytest.importorskip("torch")
    assert shaped(folder, "--overhead-s", "20") == 0
    latency = load(str(folder / "shape.json")).latency

    assert latency.predict_s(1, 0.5, 0) == pytest.approx(20, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--device", "tpu"], "--device: 'tpu' is none of cpu, cuda, cuda:N"),
        (["--overhead-s", "-1"], "--overhead-s: -1 is no time"),
        (["--overhead-s", "nan"], "--overhead-s: nan is no time"),
        (["--gpu-memory-utilization", "0"], "--gpu-memory-utilization: 0 is not above 0"),
        (["--gpu-memory-utilization", "1.1"], "--gpu-memory-utilization: 1.1 is not above 0"),
        (["--passes", "0"], "passes has to be at least 1: 0"),
        (["--repeats", "1"], "repeats has to be at least 2, one to judge by: 1"),
        (["--prefill-contexts", "-1"], "'-1': each has to be at least 0"),
        (["--chunks", "513"], "chunks: 513 is above 512"),
        (["--out", "/nowhere/profile.json"], "--out: /nowhere is no directory"),
        (["--engine", "vllm"], "unrecognized arguments: --engine vllm"),
    ],
)
def test_a_senseless_option_of_a_shape_is_refused_with_its_name(
    folder: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], told: str
):
    pytest.importorskip("torch")
    try:
        code = shaped(folder, *arguments)
    except SystemExit as ended:  # of the argument parser
        code = ended.code

    shown = capfd.readouterr().err
    assert code == 2
    assert told in shown
    assert "Traceback" not in shown


def test_without_a_gpu_it_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["profile", f"--shape={folder}", "--out", str(folder / "shape.json")]) == 2
    assert "finds no CUDA device here; run this where one is" in capfd.readouterr().err
    assert not (folder / "shape.json").exists()


def test_without_torch_it_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    for name in ("shape_profiler", "torch_device", "layers"):
        monkeypatch.delitem(sys.modules, f"services.agent.profiling.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert shaped(folder) == 2
    assert "--shape needs torch: pip install torch" in capfd.readouterr().err


def test_a_shape_that_is_none_is_refused_before_torch_is_looked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "torch", None)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 0}))
    assert shaped(folder) == 2
    assert "hidden_size: 0 is not from 1 to 65536" in capfd.readouterr().err


def test_the_command_does_not_load_torch():
    """Nor what reads shapes; only timing does."""
    code = "import sys, services.mesh.cli; print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout == "False\n"


@pytest.mark.parametrize("arguments", [["--shape", "--help"], ["--shape=x", "-h"]])
def test_its_help_needs_no_shape(capsys: pytest.CaptureFixture[str], arguments: list[str]):
    with pytest.raises(SystemExit) as end:
        main(["profile", *arguments])

    assert end.value.code == 0
    assert "--passes N" in capsys.readouterr().out
