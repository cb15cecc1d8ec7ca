"""Credentials that are made for a mesh on Kubernetes."""

import json
import stat
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ops.generate.credentials import credentials, main, write_new
from ops.generate.definitions import GRANTS
from shared.tenants.keys import decode_keys, digest_of_key
from tests.unit.ops.kustomize.manifests import KUBERNETES


@pytest.fixture
def made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Path, str]:
    """Folder of new credentials, and the printed key."""
    folder = tmp_path / "secrets"
    assert main(["--out", str(folder), "--tenant", "acme"]) == 0
    return folder, capsys.readouterr().out.strip()


def urls(folder: Path) -> dict[str, str]:
    lines = (folder / "amqp.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


def test_urls_have_the_passwords_of_the_definitions(made: tuple[Path, str]):
    folder, _ = made
    users = json.loads((folder / "definitions.json").read_text())["users"]
    logins = {
        (str(url.username), str(url.password)) for url in map(urlsplit, urls(folder).values())
    }

    assert logins == {(user["name"], user["password"]) for user in users}
    assert urls(folder).keys() == {grant.user.removeprefix("headway-") for grant in GRANTS}


def test_passwords_are_random_and_different(made: tuple[Path, str], tmp_path: Path):
    folder, _ = made
    main(["--out", str(tmp_path / "again")])
    passwords = [
        urlsplit(url).password
        for each in (folder, tmp_path / "again")
        for url in urls(each).values()
    ]

    assert len(set(passwords)) == 2 * len(GRANTS)
    assert all(len(str(password)) == 32 for password in passwords)


def test_the_printed_key_is_the_only_one_of_its_tenant(made: tuple[Path, str]):
    folder, key = made
    file = folder / "keys.json"
    known = decode_keys(file, file.read_bytes())

    assert {digest: entry.tenant for digest, entry in known.items()} == {digest_of_key(key): "acme"}
    assert key not in file.read_text()


def test_only_the_owner_can_read_the_files(made: tuple[Path, str]):
    folder, _ = made

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


def test_existing_files_are_kept(made: tuple[Path, str], capsys: pytest.CaptureFixture[str]):
    folder, _ = made
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    assert main(["--out", str(folder)]) == 1
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert "exists" in capsys.readouterr().err


def test_nothing_is_written_if_one_file_exists(tmp_path: Path):
    (tmp_path / "keys.json").write_text("mine")
    files = credentials({"operator": "p"}, host="broker:5672", cookie="c", keys=b"{}")

    with pytest.raises(FileExistsError, match=r"keys\.json"):
        write_new(tmp_path, files)
    assert [file.name for file in tmp_path.iterdir()] == ["keys.json"]


def test_a_broker_of_others_can_be_named():
    files = credentials({"headway-agent": "p"}, host="broker.example:5671", cookie="c", keys=b"{}")

    assert files["amqp.env"] == b"agent=amqp://headway-agent:p@broker.example:5671/\n"


def test_the_kustomization_reads_the_files_that_are_written(made: tuple[Path, str]):
    folder, _ = made
    text = (KUBERNETES / "credentials" / "kustomization.yaml").read_text()

    assert [file.name for file in folder.iterdir() if f"- secrets/{file.name}" not in text] == []
