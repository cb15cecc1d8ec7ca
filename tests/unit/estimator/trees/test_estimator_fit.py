"""`headway-estimator fit`, `trees` and `use`."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog
from numpy.typing import NDArray

from services.estimator.cli import main
from services.estimator.cli_fit import exit_code
from services.estimator.trees import artefacts
from services.estimator.trees.artefact_names import directory_name
from services.estimator.trees.artefacts import Artefact
from services.estimator.trees.fit_report import Outcome
from services.estimator.trees.sample_store import SampleStore
from shared.contracts.routing import PrefillsSampled
from solver.prediction.prefill.quantile_fit import fit_quantile_trees
from solver.prediction.prefill.quantile_trees import QuantileTrees, decode
from tests.prefill_times import NOMINAL, matrix_of, requests_of, times_of
from tests.sampled import KEY, MODEL, messages_of, plain, sampled

fits: dict[tuple[bytes, bytes], QuantileTrees] = {}
ENOUGH = requests_of(NOMINAL, 1000, seed=4)


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(line) for line in self.out.splitlines()]


@dataclass
class Estimator:
    """A `profile_dir` and the commands that tests run on it."""

    directory: Path
    capture: pytest.CaptureFixture[str]

    def keep(self, messages: Sequence[PrefillsSampled], *, most: int = 20_000) -> None:
        store = SampleStore(self.directory / "samples", most=most)
        store.open()
        for message in messages:
            store.take(message)

    def run(self, *argv: str) -> Ran:
        self.capture.readouterr()
        code = main([*argv, "--set", f"profile_dir={self.directory}"])
        return Ran(code, *self.capture.readouterr())

    @property
    def folder(self) -> Path:
        return self.directory / "trees" / directory_name(KEY)

    @property
    def latest(self) -> Artefact | None:
        files = tuple(artefacts.versions(self.folder).values())
        return artefacts.read(files[-1]) if files else None


@pytest.fixture
def estimator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Estimator:
    return Estimator(tmp_path, capsys)


@pytest.fixture(autouse=True)
def _each_fit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit each set of samples once, because equal samples give equal trees."""

    def fit(features: NDArray[np.float64], prefill_s: NDArray[np.float64]) -> QuantileTrees:
        known = features.tobytes(), prefill_s.tobytes()
        if known not in fits:
            fits[known] = fit_quantile_trees(features, prefill_s)
        return fits[known]

    monkeypatch.setattr("services.estimator.trees.fitting.fit_quantile_trees", fit)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("HEADWAY_")]:
        monkeypatch.delenv(name)
    yield
    # Commands log to the standard error that was captured.
    structlog.reset_defaults()


def test_quantiles_of_a_known_distribution_are_found(estimator: Estimator):
    """Times are exponential with a mean of 0.1 s, or 1 s for long prompts."""
    random = np.random.default_rng(1)
    long = random.random(4000) < 0.5
    times_s = np.where(long, 1.0, 0.1) * random.exponential(1.0, 4000)
    samples = [
        plain(float(each), prompt_tokens=2000.0 if is_long else 100.0)
        for each, is_long in zip(times_s, long, strict=True)
    ]
    estimator.keep([sampled(*samples)])
    ran = estimator.run("fit", "--json")
    (report,) = ran.json

    assert (ran.code, report["outcome"], report["version"]) == (0, "written", 1)
    assert (report["samples"], report["held_out"]["samples"]) == (4000, 800)
    artefact = estimator.latest
    assert artefact is not None
    assert artefact.samples == 3200
    assert dict(artefact.coverage) == pytest.approx({0.5: 0.5, 0.9: 0.9, 0.95: 0.95}, abs=0.04)
    features = np.array([plain(prompt_tokens=each).features for each in (100.0, 2000.0)])
    trees = decode(bytes(artefact.trees))
    expected = np.outer([0.1, 1.0], -np.log(1 - np.array(trees.levels)))
    predicted = trees.predict(features)
    assert predicted.quantiles_s == pytest.approx(expected, rel=0.15)
    assert predicted.mean_s == pytest.approx([0.1, 1.0], rel=0.1)
    for level in report["held_out"]["levels"]:
        assert level["loss_s"] < 0.9 * level["constant_loss_s"]


def test_written_trees_are_evaluated_on_held_out_samples(estimator: Estimator):
    estimator.keep(messages_of(ENOUGH))
    estimator.run("fit")
    artefact = estimator.latest
    assert artefact is not None
    unseen = ENOUGH[800:]
    within = (
        times_of(unseen)[:, None]
        <= decode(bytes(artefact.trees)).predict(matrix_of(unseen)).quantiles_s
    )

    assert [share for _, share in artefact.coverage] == pytest.approx(list(within.mean(axis=0)))
    assert artefact.last_at < messages_of(ENOUGH)[-1].at


def test_text_output_is_a_table_beside_the_trees_in_force(estimator: Estimator):
    estimator.keep(messages_of(ENOUGH))
    first, second = estimator.run("fit"), estimator.run("fit")

    assert (first.code, second.code) == (0, 0)
    title, header, *rows, expected, written = first.out.splitlines()
    assert title == (
        "org/model.v1 on simulated cpu: 1000 samples of 0.0 h, 800 to learn from, the latest 200"
        " held out"
    )
    assert header.split("  ")[1:] == ["level", "loss ms", "a constant's ms", "within"]
    assert [row.split()[0] for row in rows] == ["p50", "p90", "p95"]
    assert expected.startswith("  expected over measured time, all together: ")
    assert written.startswith("  v1 written, ")
    assert written.endswith(str(estimator.folder / "v1.json"))
    assert "v1's ms" in second.out
    assert "v2 written" in second.out
    assert first.err == "fitting org/model.v1 on simulated cpu to 1000 samples\n"


def test_worse_trees_are_refused_unless_forced(estimator: Estimator):
    """
    Earlier trees were fitted to actual times; later samples, except the last, are noise.
    """
    estimator.keep(messages_of(ENOUGH))
    estimator.run("fit")
    samples = estimator.directory / "samples"
    samples.rename(samples.with_name("before"))
    estimator.keep(messages_of(requests_of(NOMINAL, 800, seed=5), times=20.0))
    estimator.keep(messages_of(requests_of(NOMINAL, 200, seed=6)))
    refused = estimator.run("fit")

    assert refused.code == 1
    assert "not written: the loss is" in refused.out
    assert "the limit is 1.05 times; use --force to write it" in refused.out
    assert [file.name for file in estimator.folder.iterdir()] == ["v1.json"]
    (in_force_for,) = estimator.run("fit", "--dry-run", "--json").json
    assert (in_force_for["outcome"], in_force_for["in_force_version"]) == ("worse", 1)
    assert in_force_for["relative_loss"] > 2
    assert [level for level, _ in in_force_for["in_force_losses"]] == [0.5, 0.9, 0.95]

    forced = estimator.run("fit", "--force", "--json")
    assert (forced.code, forced.json[0]["version"]) == (0, 2)


def test_trees_that_follow_a_change_are_not_worse(estimator: Estimator):
    estimator.keep(messages_of(ENOUGH))
    estimator.run("fit")
    estimator.keep(messages_of(requests_of(NOMINAL, 3000, seed=5), times=3.0))
    (report,) = estimator.run("fit", "--json").json

    assert (report["outcome"], report["version"]) == ("written", 2)
    assert report["relative_loss"] < 0.5


def test_dry_run_writes_no_file(estimator: Estimator):
    estimator.keep(messages_of(ENOUGH))
    ran = estimator.run("fit", "--dry-run")

    assert ran.code == 0
    assert "not written: a dry run" in ran.out
    assert not (estimator.directory / "trees").exists()


def test_samples_may_be_in_another_directory(estimator: Estimator):
    estimator.keep(messages_of(ENOUGH))
    samples = estimator.directory / "samples"
    elsewhere = samples.rename(samples.with_name("elsewhere"))

    assert estimator.run("fit").code == 1
    assert estimator.run("fit", "--samples", str(elsewhere)).code == 0
    assert estimator.latest is not None


def test_too_few_samples_are_reported_with_the_minimum(estimator: Estimator):
    estimator.keep(messages_of(ENOUGH[:498]))
    ran = estimator.run("fit")

    assert ran.code == 1
    assert ran.out.splitlines() == [
        "org/model.v1 on simulated cpu: 498 samples of 0.0 h",
        (
            "  not fitted: without the latest fifth, 399 samples are too few to learn from; "
            "at least 400 are needed"
        ),
    ]
    assert not (estimator.directory / "trees").exists()


def test_model_with_few_samples_does_not_fail_the_others(estimator: Estimator):
    estimator.keep(messages_of(ENOUGH))
    estimator.keep(messages_of(ENOUGH[:60], model="lately"))
    ran = estimator.run("fit", "--json")

    assert ran.code == 0
    assert {each["model"]: each["outcome"] for each in ran.json} == {
        "lately": "too_few",
        MODEL: "written",
    }


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([Outcome.WRITTEN, Outcome.TOO_FEW], 0),
        ([Outcome.DRY_RUN], 0),
        ([Outcome.WRITTEN, Outcome.WORSE], 1),
        ([Outcome.TOO_FEW, Outcome.TOO_FEW], 1),
    ],
)
def test_exit_code_follows_from_the_outcomes_of_all_fits(outcomes: list[Outcome], code: int):
    assert exit_code(outcomes) == code


def test_missing_samples_are_reported_with_the_directory(estimator: Estimator):
    absent = estimator.run("fit")
    (estimator.directory / "samples").mkdir()
    empty = estimator.run("fit")

    assert (absent.code, empty.code) == (1, 1)
    for ran in (absent, empty):
        assert "no samples" in ran.err
        assert str(estimator.directory / "samples") in ran.err


def test_unknown_names_are_reported_with_the_known_names(estimator: Estimator):
    estimator.keep(messages_of(ENOUGH[:60]))
    estimator.keep(messages_of(ENOUGH[:60], model="other"))
    ran = estimator.run("fit", "--model", "modle")

    assert ran.code == 1
    assert ran.err == (
        "headway-estimator: no samples of model 'modle'; available: org/model.v1, other\n"
    )
    assert "no samples of device 'gpu'" in estimator.run("fit", "--device", "gpu").err


def test_filters_select_samples(estimator: Estimator):
    estimator.keep(messages_of(ENOUGH[:60]))
    estimator.keep(messages_of(ENOUGH[:60], model="other"))
    reports = estimator.run("fit", "--model", "other", "--engine", "simulated", "--json").json

    assert [each["model"] for each in reports] == ["other"]


def test_unwritable_directory_is_reported_as_a_failure(estimator: Estimator):
    estimator.keep(messages_of(ENOUGH))
    (estimator.directory / "trees").write_text("in the way")
    ran = estimator.run("fit")

    assert ran.code == 1
    assert "trees of org/model.v1 on simulated cpu cannot be written" in ran.err


def test_skipped_lines_are_reported(estimator: Estimator):
    estimator.keep(messages_of(ENOUGH))
    (file,) = (estimator.directory / "samples").rglob("*.jsonl")
    file.write_bytes(file.read_bytes()[:-3])
    ran = estimator.run("fit", "--json")

    assert ran.code == 0
    assert f"{file}: 1 lines skipped" in ran.err
    assert ran.json[0]["samples"] == 950


def test_unreadable_artefact_is_reported_and_not_compared_with(estimator: Estimator):
    estimator.keep(messages_of(ENOUGH))
    estimator.run("fit")
    (estimator.folder / "v1.json").write_bytes(b"{")
    ran = estimator.run("fit", "--json")

    assert f"{estimator.folder / 'v1.json'}: not an artefact of trees" in ran.err
    assert (ran.code, ran.json[0]["version"]) == (0, 2)
    assert "in_force_version" not in ran.json[0]


@pytest.mark.parametrize("verb", [["fit"], ["trees"]])
def test_missing_directory_is_a_settings_error(verb: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(verb) == 2
    assert "profile_dir" in capsys.readouterr().err


def test_trees_are_listed(estimator: Estimator):
    assert estimator.run("trees").code == 1
    estimator.keep(messages_of(ENOUGH))
    estimator.run("fit")
    estimator.run("fit")
    people, machines = estimator.run("trees"), estimator.run("trees", "--json")

    assert people.out.startswith("org/model.v1 on simulated cpu: v2, ")
    assert "of 800 samples; " in people.out
    assert " in p90" in people.out
    assert (machines.json[0]["version"], machines.json[0]["versions"]) == (2, [1, 2])
    assert "trees" not in machines.json[0]


def test_rollback_writes_a_higher_version(estimator: Estimator):
    estimator.keep(messages_of(ENOUGH))
    estimator.run("fit")
    first = estimator.latest
    estimator.keep(messages_of(requests_of(NOMINAL, 1000, seed=5)))
    estimator.run("fit")
    named = ("--model", KEY[0], "--engine", KEY[1], "--device", KEY[2], "--version")
    ran = estimator.run("use", *named, "1")
    latest = estimator.latest

    assert ran.code == 0
    assert ran.out == f"v3 is a copy of v1: {estimator.folder / 'v3.json'}\n"
    assert first is not None
    assert latest == msgspec.structs.replace(first, version=3)
    unknown = estimator.run("use", *named, "9")
    assert unknown.code == 1
    assert "no v9 of org/model.v1 on simulated cpu; available: v1, v2, v3" in unknown.err


@pytest.mark.slow
def test_service_does_not_load_libraries_of_fits():
    code = (
        "import sys, services.estimator.cli as c; "
        "print([m for m in ('sklearn', 'scipy', 'numba') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ran.stdout == "[]\n"
