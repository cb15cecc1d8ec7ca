"""Fitted trees on disk, and their use by a running estimator."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.estimator.metrics import estimator_metrics
from services.estimator.state import EstimatorState
from services.estimator.trees import artefacts
from services.estimator.trees.active_trees import TreesWatch, tree_messages
from services.estimator.trees.artefact_names import directory_name
from services.estimator.trees.artefacts import Artefact
from services.estimator.trees.fitting import fit_samples
from services.estimator.trees.sample_files import Samples
from shared.contracts.base import Decoder
from shared.contracts.errors import ContractError, SchemaMismatchError
from shared.contracts.estimates import TreesInForce
from shared.contracts.routing import PrefillTrees
from solver.prediction.prefill.quantile_trees import decode
from tests.clocks import NOW
from tests.prefill_times import NOMINAL, matrix_of, requests_of, times_of
from tests.sampled import KEY

REQUESTS = requests_of(NOMINAL, 500, seed=3)
decode_trees: Decoder[PrefillTrees] = Decoder(PrefillTrees)


@pytest.fixture(scope="module")
def fitted() -> Artefact:
    times_s = times_of(REQUESTS)
    samples = Samples(NOW + 0 * times_s, matrix_of(REQUESTS), times_s)
    return fit_samples(KEY, samples, None, now=NOW).artefact


def spoil(file: Path, **fields: Any) -> None:
    """Modify an artefact on disk."""
    values = msgspec.json.decode(file.read_bytes())
    file.write_bytes(msgspec.json.encode(values | fields))


def spoil_trees(file: Path, **fields: Any) -> None:
    spoil(file, trees=msgspec.json.decode(file.read_bytes())["trees"] | fields)


class TestArtefacts:
    def test_each_artefact_gets_the_next_version(self, tmp_path: Path, fitted: Artefact):
        files = [artefacts.write(tmp_path, fitted)[1] for _ in range(11)]

        assert [file.name for file in files] == [f"v{number}.json" for number in range(1, 12)]
        assert list(artefacts.versions(files[0].parent)) == list(range(1, 12))
        assert len(list(files[0].parent.iterdir())) == 11

    def test_written_artefact_is_read_back(self, tmp_path: Path, fitted: Artefact):
        written, file = artefacts.write(tmp_path, fitted)
        read = artefacts.read(file)

        assert msgspec.json.encode(read) == msgspec.json.encode(written)
        assert (read.samples, read.held_out.samples) == (400, 100)
        assert decode(bytes(read.trees)).levels == (0.5, 0.9, 0.95)

    def test_trees_of_another_schema_are_refused_by_field(self, tmp_path: Path, fitted: Artefact):
        _, file = artefacts.write(tmp_path, fitted)
        spoil_trees(file, schema_version=2)
        with pytest.raises(SchemaMismatchError) as refused:
            artefacts.read(file)

        assert (refused.value.field, refused.value.expected, refused.value.found) == (
            "schema_version",
            1,
            2,
        )

    def test_trees_of_other_features_are_refused(self, tmp_path: Path, fitted: Artefact):
        _, file = artefacts.write(tmp_path, fitted)
        spoil_trees(file, features=["prompt_tokens"])
        with pytest.raises(SchemaMismatchError) as refused:
            artefacts.read(file)

        assert refused.value.field == "features"

    def test_artefact_in_the_wrong_place_is_refused(self, tmp_path: Path, fitted: Artefact):
        _, file = artefacts.write(tmp_path, fitted)
        renamed = file.rename(file.with_name("v7.json"))
        with pytest.raises(SchemaMismatchError, match="version"):
            artefacts.read(renamed)
        elsewhere = tmp_path / "other" / "v1.json"
        elsewhere.parent.mkdir()
        renamed.rename(elsewhere)
        with pytest.raises(SchemaMismatchError, match="key"):
            artefacts.read(elsewhere)

    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"version":"x"}'])
    def test_file_that_is_not_an_artefact_is_refused(
        self, tmp_path: Path, fitted: Artefact, body: bytes
    ):
        _, file = artefacts.write(tmp_path, fitted)
        file.write_bytes(body)
        with pytest.raises(ContractError, match="not an artefact of trees"):
            artefacts.read(file)

    def test_invalid_trees_are_refused_by_field(self, tmp_path: Path, fitted: Artefact):
        _, file = artefacts.write(tmp_path, fitted)
        spoil_trees(file, baselines=[1.0])
        with pytest.raises(ContractError, match="baselines"):
            artefacts.read(file)

    def test_failed_write_leaves_no_file(self, tmp_path: Path, fitted: Artefact):
        (tmp_path / "trees").write_text("in the way")
        with pytest.raises(OSError, match="trees"):
            artefacts.write(tmp_path / "trees", fitted)

    def test_folder_names_differ_where_keys_do(self):
        keys = [("a/b", "e", "d"), ("a-b", "e", "d"), ("a", "b-e", "d"), ("a" * 300, "e", "ä?")]
        names = [directory_name(key) for key in keys]

        assert len(set(names)) == len(keys)
        assert all(len(name) < 150 and "/" not in name for name in names)


class TestTreesWatch:
    def test_highest_version_is_in_force_and_published_once(self, tmp_path: Path, fitted: Artefact):
        watch = TreesWatch(tmp_path / "trees")
        assert watch.look() == []
        artefacts.write(tmp_path / "trees", fitted)
        artefacts.write(tmp_path / "trees", fitted)

        assert [each.version for each in watch.look()] == [2]
        assert watch.look() == []
        artefacts.write(tmp_path / "trees", fitted)
        assert [each.version for each in watch.look()] == [3]
        assert [each.version for each in watch.in_force] == [3]

    def test_tree_messages_have_all_fields_that_routers_need(
        self, tmp_path: Path, fitted: Artefact
    ):
        artefacts.write(tmp_path, fitted)
        (message,) = tree_messages(TreesWatch(tmp_path).look())
        trees = decode_trees(message.body)

        assert (message.kind, trees.version, trees.at) == ("prefill.trees.v1", 1, NOW)
        assert (trees.model, trees.engine, trees.device) == KEY
        assert decode(bytes(trees.trees)).predict(matrix_of(REQUESTS)).mean_s.shape == (500,)

    @pytest.mark.parametrize(
        ("spoilt", "reason", "field"),
        [({"version": 9}, "schema", "version"), ({"trees": 1}, "broken", None)],
    )
    def test_refused_artefact_leaves_the_earlier_in_force(
        self,
        tmp_path: Path,
        fitted: Artefact,
        spoilt: dict[str, Any],
        reason: str,
        field: str | None,
    ):
        watch = TreesWatch(tmp_path)
        artefacts.write(tmp_path, fitted)
        watch.look()
        _, file = artefacts.write(tmp_path, fitted)
        spoil(file, **spoilt)
        with capture_logs() as logs:
            assert watch.look() == watch.look() == []

        assert [each.version for each in watch.in_force] == [1]
        assert watch.refused == {reason: 1}
        assert [(each["file"], each["field"]) for each in logs] == [(str(file), field)]

    def test_repaired_artefact_comes_into_force(self, tmp_path: Path, fitted: Artefact):
        watch = TreesWatch(tmp_path)
        _, file = artefacts.write(tmp_path, fitted)
        whole = file.read_bytes()
        file.write_bytes(whole[:1000])
        assert watch.look() == []
        file.write_bytes(whole)

        assert [each.version for each in watch.look()] == [1]
        assert watch.refused == {"broken": 1}

    def test_next_lower_version_is_used_below_a_refused_one(self, tmp_path: Path, fitted: Artefact):
        for _ in range(3):
            _, file = artefacts.write(tmp_path, fitted)
        file.write_bytes(b"")

        assert [each.version for each in TreesWatch(tmp_path).look()] == [2]

    def test_deleted_artefact_stays_in_force(self, tmp_path: Path, fitted: Artefact):
        """The estimator keeps the published trees in force, because versions must never fall."""
        watch = TreesWatch(tmp_path)
        artefacts.write(tmp_path, fitted)
        _, file = artefacts.write(tmp_path, fitted)
        watch.look()
        file.unlink()

        assert watch.look() == []
        assert [each.version for each in watch.in_force] == [2]

    def test_files_without_an_artefact_name_are_skipped(self, tmp_path: Path):
        folder = tmp_path / "some"
        folder.mkdir()
        for name in ("v1.json.part", "v1.7.part", "v0.json", "notes.txt"):
            (folder / name).write_text("x")
        (tmp_path / "file").write_text("x")
        watch = TreesWatch(tmp_path)

        assert watch.look() == []
        assert not watch.refused

    def test_without_a_directory_there_are_no_trees(self):
        assert not TreesWatch(None).look()

    def test_profiles_have_information_about_trees(self, tmp_path: Path, fitted: Artefact):
        artefacts.write(tmp_path, fitted)
        watch = TreesWatch(tmp_path)
        watch.look()

        assert watch.in_force_for(("other", "e", "d")) is None
        assert watch.in_force_for(KEY) == TreesInForce(
            version=1, at=NOW, samples=400, coverage=fitted.coverage
        )

    def test_series_show_trees_in_force_and_refusals(self, tmp_path: Path, fitted: Artefact):
        artefacts.write(tmp_path, fitted)
        _, file = artefacts.write(tmp_path, fitted)
        file.write_bytes(b"")
        state = EstimatorState(
            iteration_memory=100, request_memory=100, max_applications=1, trees=TreesWatch(tmp_path)
        )
        state.trees.look()
        registry = CollectorRegistry()
        estimator_metrics(registry, state)

        def value(series: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"headway_estimator_{series}", labels)

        key = dict(zip(("model", "engine", "device"), KEY, strict=True))
        assert value("trees_version", **key) == 1
        assert value("trees_made_timestamp_seconds", **key) == NOW
        assert value("trees_coverage_ratio", **key, level="0.9") == dict(fitted.coverage)[0.9]
        assert value("trees_refused_total", reason="broken") == 1
