"""`make release` without a container engine."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ops.clients.packing import ROOT, version
from ops.release.files import bill_of_materials

pytestmark = pytest.mark.slow


def test_a_release_has_all_artefacts_and_their_digests(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "ops.release", "--out", tmp_path, "--images", "no", "--json"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert (made["images"], made["images_skipped"]) == ([], "--images no")
    assert set(made["files"]) == {file.name for file in tmp_path.iterdir()}
    assert {f"headway-{version()}-py3-none-any.whl", "SHA256SUMS"} <= set(made["files"])
    checked = subprocess.run(
        ["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path, check=False
    )
    assert checked.returncode == 0


def test_the_bill_names_the_packages_and_no_path_of_this_machine(tmp_path: Path):
    bill = bill_of_materials(tmp_path)
    content = msgspec.json.decode(bill.read_bytes())
    names = {each["name"] for each in content["components"]}
    assert {"aio-pika", "msgspec"} <= names
    assert str(ROOT) not in bill.read_text()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    done = subprocess.run(
        [sys.executable, "-m", "ops.release", "--out", file],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 1
    assert done.stderr.startswith("release: ")
    assert str(file) in done.stderr
