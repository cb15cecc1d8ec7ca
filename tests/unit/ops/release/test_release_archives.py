"""Archives of a release need no checkout."""

import tarfile
from pathlib import Path

import pytest
import yaml

from ops.clients.packing import version
from ops.release.archives import (
    COMPOSE,
    PROFILES,
    by_version,
    compose_archive,
    kubernetes_archive,
    mounts,
)
from ops.release.images import TARGETS, image_name


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(compose_archive(tmp_path_factory.mktemp("out")))


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(kubernetes_archive(tmp_path_factory.mktemp("out")))


def unpacked(archive: Path) -> Path:
    """Folder of an archive, which has the archive's name."""
    with tarfile.open(archive) as content:
        content.extractall(archive.parent, filter="data")
    return archive.parent / archive.name.removesuffix(".tar.gz")


def test_everything_that_the_compose_file_mounts_is_in_the_archive(compose: Path):
    content = yaml.safe_load((compose / COMPOSE).read_text())
    mounted = list(mounts(content))
    assert "ops/dashboards/rules" in mounted
    assert "ops/rabbitmq/definitions.json" in mounted
    for path in mounted:
        assert (compose / path).exists(), path


def test_images_have_the_version_and_nothing_is_built(compose: Path):
    services = yaml.safe_load((compose / COMPOSE).read_text())["services"]
    own = {each["image"] for each in services.values() if each["image"].startswith("headway")}
    assert own == {f"{image_name(each)}:{version()}" for each in TARGETS}
    assert not any({"build", "pull_policy"} & each.keys() for each in services.values())


def test_the_head_of_the_compose_file_and_the_default_profile_are_in_the_archive(compose: Path):
    head = (compose / COMPOSE).read_text().split("\nname:")[0]
    assert "docker compose --profile vllm up" in head
    assert "--build" not in head
    assert "COMPOSE_PROFILES=simulated" in (compose / PROFILES).read_text()


def test_images_of_others_keep_their_tags():
    compose = {"services": {"db": {"image": "postgres:17"}, "own": {"image": "a", "build": "."}}}
    services = by_version(compose, "1.2.3")["services"]
    assert (services["db"]["image"], services["own"]["image"]) == ("postgres:17", "a:1.2.3")


def test_tags_of_the_kubernetes_objects_are_the_version(
    kubernetes: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    assert (kubernetes / "base" / "kustomization.yaml").exists()
    monkeypatch.setattr("ops.release.archives.version", lambda: "9.8.7")

    later = unpacked(kubernetes_archive(tmp_path))

    images = yaml.safe_load((later / "components/version/kustomization.yaml").read_text())["images"]
    assert {each["newTag"] for each in images} == {"9.8.7"}
    assert {each["name"] for each in images} == {image_name(target) for target in TARGETS}


def test_the_compose_archive_has_only_what_is_mounted(compose: Path):
    files = [str(each.relative_to(compose)) for each in compose.rglob("*") if each.is_file()]
    mounted = list(mounts(yaml.safe_load((compose / COMPOSE).read_text())))
    assert {each for each in files if not each.startswith(tuple(mounted))} == {COMPOSE, PROFILES}
    assert "ops/docker" not in mounted


def test_an_archive_has_no_trace_of_the_machine(compose: Path):
    with tarfile.open(compose.with_name(f"{compose.name}.tar.gz")) as archive:
        entries = archive.getmembers()
    assert {(each.uname, each.uid, each.mtime) for each in entries} == {("", 0, 0)}
    assert all(each.name.startswith(f"{compose.name}/") for each in entries)
