"""The simulator's options: errors for invalid values name the option, before a simulation runs."""

from pathlib import Path

import pytest

from ops.sim.options import SimulateOptions, scenario
from ops.sim.profiles import load
from ops.sim.scenario import Scenario, Wave
from services.mesh.cli import MeshProgram, main

SHARES = "Q1:Q2:Q3 in finite numbers from 0"
COUNTS = "Q1:Q2:Q3 in whole numbers from 0"
WAVE = "LOW:HIGH[:HALF_PERIOD_S], finite, 0 <= LOW <= HIGH, HIGH > 0, HALF_PERIOD_S >= 1"
CHUNK = "a policy with a number of at least 1 after the colon"

REFUSED = [
    *(("--qps", value, "Must be > 0") for value in ("0", "-1")),
    *(("--qps", value, "Must be < inf") for value in ("inf", "nan")),
    *(("--qps", value, "unable to convert") for value in ("x", "")),
    *(("--hours", value, "Must be > 0") for value in ("0", "-2")),
    *(("--hours", value, "Must be < inf") for value in ("inf", "nan")),
    *(("--variation", value, "Must be >= 0.01") for value in ("0", "1e-200")),
    *(("--variation", value, "Must be <= 100") for value in ("nan", "101")),
    *(("--low-share", value, "Must be <= 1") for value in ("5", "nan")),
    *(("--low-share", value, "Must be >= 0") for value in ("-1",)),
    *(("--allowed", value, "Must be <= 1") for value in ("1.5", "nan")),
    *(("--allowed", value, "Must be >= 0") for value in ("-1",)),
    *(("--most", value, "is below 1") for value in ("0", "-3")),
    *(("--most", value, "is not an integer") for value in ("1.5",)),
    *(("--replicas", value, "is below 1") for value in ("0",)),
    *(("--replicas", value, "is not an integer") for value in ("two",)),
    *(("--window", value, "is below 1") for value in ("0",)),
    *(("--work-classes", value, "is below 1") for value in ("0",)),
    *(("--work-classes", value, "is above 32") for value in ("33",)),
    *(("--kv-tokens", value, "is below 1") for value in ("0", "-5")),
    *(("--seed", value, "is below 0") for value in ("-1",)),
    *(("--workload", value, 'Choose from: "code"') for value in ("codes",)),
    *(("--match", value, "Choose from: ") for value in ("codes",)),
    *(("--dispatch", value, 'Choose from: "pull", "round-robin"') for value in ("push",)),
    *(
        ("--wave", value, WAVE)
        for value in (
            "5:-1", "1:2:0", "2:0", "2:1", "0:0", "1:x", "nan:1", "1:inf", "1:2:inf", "1:2:1e-320",
            "3", "1:2:3:4", "",
        )
    ),
    *(("--mix", value, SHARES) for value in ("nan:1:1", "inf:1:1", "1:-1:1", "0:0:0", "1:1")),
    *(("--silo", value, COUNTS) for value in ("0.5:1:1", "1:1", "1:-1:1", "0:0:0", "a:b:c")),
    *(("--policy", value, CHUNK) for value in ("sarathi-fcfs:0", "polyserve:00")),
    *(("--compare", value, CHUNK) for value in ("sarathi-edf:0",)),
    *(("--profile", value, "no profile") for value in ("abacus",)),
]  # fmt: skip


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Error of a rejected call; the test fails if the call is accepted."""
    assert main(["simulate", *arguments]) == 2
    return capsys.readouterr().err


@pytest.fixture
def _unable_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: Scenario) -> None:
        pytest.fail("a simulation began")

    monkeypatch.setattr(Scenario, "run", run)


@pytest.mark.usefixtures("_unable_to_run")
@pytest.mark.parametrize(("option", "value", "limit"), REFUSED)
def test_an_invalid_value_is_rejected_with_option_value_and_limit(
    capsys: pytest.CaptureFixture[str], option: str, value: str, limit: str
) -> None:
    printed = refusal(capsys, "--dispatch", "pull", option, value)

    assert printed.startswith("headway simulate: Invalid value ")
    assert f" for {option}" in printed
    assert value in printed
    assert limit in printed


@pytest.mark.usefixtures("_unable_to_run")
@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (("--compare", "edf,abacus"), "for --compare: no policy 'abacus'; known: "),
        (("--silo", "0:1:1"), "--silo has no replica for Q1, but --mix has a share of it"),
        (("--hours", "1e9"), "--qps 3 for --hours 1e+09 is 1.08e+13 requests, more than 10000000"),
        (("--wave", "0:1e308"), "--wave 1e+308 for --hours 1 is inf requests, more than 10000000"),
    ],
)
def test_incompatible_options_are_rejected(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], printed: str
) -> None:
    assert printed in refusal(capsys, *arguments)


@pytest.mark.usefixtures("_unable_to_run")
@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("absent/misses.png", "in a directory that exists"),
        ("a_file/misses.png", "in a directory that exists"),
        ("a_directory.png", "a file that may be written"),
        ("misses.docx", "a file that ends in .jpg, .pdf, .png, .svg"),
        ("misses", "a file that ends in .jpg, .pdf, .png, .svg"),
    ],
)
def test_a_picture_that_cannot_be_written_is_rejected_without_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, limit: str
) -> None:
    (tmp_path / "a_file").touch()
    (tmp_path / "a_directory.png").mkdir()
    before = sorted(tmp_path.rglob("*"))
    printed = refusal(capsys, "--plot", str(tmp_path / name))

    assert "for --plot: " in printed
    assert repr(str(tmp_path / name)) in printed
    assert limit in printed
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("_unable_to_run")
def test_a_picture_without_permission_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, _: path != tmp_path)
    printed = refusal(capsys, "--plot", str(tmp_path / "misses.png"))

    assert "for --plot: " in printed
    assert "a file that may be written" in printed


@pytest.mark.usefixtures("_unable_to_run")
def test_a_profile_of_another_form_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "engine.json"
    profile.write_text('{"name": 1}')

    assert f"for --profile: {str(profile)!r}: " in refusal(capsys, "--profile", str(profile))


def test_values_at_their_limits_are_accepted(tmp_path: Path) -> None:
    picture = tmp_path / "misses.PNG"
    _, bound, _ = MeshProgram().parsed([
        "simulate",
        "--wave", "0:2:1", "--mix", "1:0:0", "--silo", "2:0:0", "--low-share", "1", "--allowed",
        "0", "--most", "1", "--variation", "0.01", "--plot", str(picture), "--policy",
        "polyserve:1", "--compare", "edf, sarathi-fcfs:1",
    ])  # fmt: skip
    options = bound.arguments["options"]
    asked = scenario(options)

    assert asked.wave == Wave(low_rps=0, high_rps=2, half_period_s=1)
    assert asked.silo == (
        ("Q1", "sarathi-fcfs:256", 2),
        ("Q2", "sarathi-fcfs:2048", 0),
        ("Q3", "sarathi-fcfs:2048", 0),
    )
    assert [traffic.share for traffic in asked.classes] == [1, 0, 0]
    assert (asked.low_share, options.allowed, options.most) == (1, 0, 1)
    assert (options.plot, options.compare) == (picture, ("edf", "sarathi-fcfs:1"))


def test_the_last_of_repeated_options_counts() -> None:
    _, bound, _ = MeshProgram().parsed(
        ["simulate", "--mix", "1:1:1", "--qps", "1", "--mix", "0:0:1", "--qps", "2"]
    )
    options = bound.arguments["options"]

    assert [traffic.share for traffic in options.classes] == [0, 0, 1]
    assert options.qps == 2


def test_the_default_profile_is_the_one_in_the_help() -> None:
    assert scenario(SimulateOptions()).profile == load("28")
