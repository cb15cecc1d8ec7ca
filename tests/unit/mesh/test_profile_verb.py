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


def test_a_simulated_engine_gives_a_profile_that_the_simulator_reads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    picture = tmp_path / "engine.png"
    code = profiled(tmp_path, "--json", "--plot", str(picture))
    told = capfd.readouterr()
    report = msgspec.json.decode(told.out)
    found = load(str(tmp_path / "engine.json"))

    assert code == 0
    assert found.name == "tiny-llama/simulated"
    # The simulated engine's own: 5 ms and 40 us a token.
    assert found.latency.predict_s(256, 256 * 128, 0) == pytest.approx(0.0159, rel=0.05)
    assert report["profile"]["num_iterations"] == sum(each["samples"] for each in report["cells"])
    assert report["profile"]["latency_error"] < 0.05
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "row 2 of 2" in told.err


def test_without_json_people_get_the_coefficients(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    assert profiled(tmp_path, "--model", "tiny-qwen") == 0
    told = capfd.readouterr().out
    assert told.startswith("tiny-qwen on simulated, simulated: ")
    assert "linear_s" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--chunks", "16,many"], "'16,many' is not N,N,… of whole numbers"),
        (["--batches", "0"], "'0': each has to be at least 1"),
        (["--repeats", "1"], "repeats has to be at least 2, one to judge by: 1"),
        (["--model", "tiny-gpt"], "--model: 'tiny-gpt' is none of tiny-llama"),
        (["--chunks", "4000"], "chunks: 4000 is above 3840"),
        (["--out", "/nowhere/profile.json"], "--out: /nowhere is no directory"),
    ],
)
def test_a_senseless_option_is_refused_with_its_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], told: str
):
    try:
        code = profiled(tmp_path, *arguments)
    except SystemExit as ended:  # of the argument parser
        code = ended.code

    shown = capfd.readouterr().err
    assert code == 2
    assert told in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("picture", "told"),
    [("engine.nothing", "--plot: '.nothing' is none of"), ("no/engine.png", "no is no directory")],
)
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], picture: str, told: str
):
    assert profiled(tmp_path, "--plot", str(tmp_path / picture)) == 2
    shown = capfd.readouterr().err
    assert told in shown
    assert "repeat" not in shown


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert profiled(tmp_path, "--plot", "engine.png") == 2
    assert "--plot needs matplotlib" in capfd.readouterr().err
