"""`headway profile`, as users start it."""

import sys
from pathlib import Path

import msgspec
import pytest

from ops.sim.profiles import load
from services.mesh.cli import main

SMALL = ["--chunks", "16,256", "--contexts", "64", "--batches", "2", "--repeats", "2"]


def profiled(tmp_path: Path, *more: str) -> int:
    out, models = tmp_path / "engine.json", tmp_path / "models"
    arguments = ["profile", *SMALL, "--out", str(out), "--models-dir", str(models)]
    return main([*arguments, *more])


def test_simulated_engine_gives_a_profile_that_the_simulator_reads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    picture = tmp_path / "engine.png"
    code = profiled(tmp_path, "--json", "--plot", str(picture))
    printed = capfd.readouterr()
    report = msgspec.json.decode(printed.out)
    found = load(str(tmp_path / "engine.json"))

    assert code == 0
    assert found.name == "tiny-llama/simulated"
    # These are the times of the simulated engine: 5 ms, and 40 us per token.
    assert found.latency.predict_s(256, 256 * 128, 0) == pytest.approx(0.0159, rel=0.05)
    assert report["profile"]["num_iterations"] == sum(each["samples"] for each in report["cells"])
    assert report["profile"]["latency_error"] < 0.05
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "row 2 of 2" in printed.err


def test_text_output_has_the_coefficients(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert profiled(tmp_path, "--model", "tiny-qwen") == 0
    printed = capfd.readouterr().out
    assert printed.startswith("tiny-qwen on simulated, simulated: ")
    assert "linear_s" in printed


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--chunks", "16,many"], "--chunks: '16,many' is not a list of integers"),
        (["--batches", "0"], "Invalid value for --batches: '0': each value must be at least 1"),
        (
            ["--repeats", "1"],
            "repeats must be at least 2, since the last repeat is used for validation: 1",
        ),
        (["--repeats", "2.5"], "Invalid value for --repeats: '2.5' is not an integer"),
        (["--device", "cpu"], "Unknown option: --device"),
        (["--model", "tiny-gpt"], "--model: 'tiny-gpt' must be one of tiny-llama"),
        (["--chunks", "4000"], "chunks: 4000 is above the limit of 3840"),
        (["--out", "/nowhere/profile.json"], "--out: /nowhere is not a directory"),
        (["--out", "/"], "--out: / is a directory"),
        (["--seed", "-1"], "--seed: -1 is below 0"),
    ],
)
def test_invalid_option_is_refused_by_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], printed: str
):
    assert profiled(tmp_path, *arguments) == 2
    shown = capfd.readouterr().err
    assert printed in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("picture", "printed"),
    [
        ("engine.nothing", "--plot: '.nothing' must be one of"),
        ("no/engine.png", "no is not a directory"),
    ],
)
def test_unwritable_plot_is_refused_before_measuring(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], picture: str, printed: str
):
    assert profiled(tmp_path, "--plot", str(tmp_path / picture)) == 2
    shown = capfd.readouterr().err
    assert printed in shown
    assert "repeat" not in shown


def test_missing_matplotlib_error_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert profiled(tmp_path, "--plot", "engine.png") == 2
    assert "--plot needs matplotlib" in capfd.readouterr().err
