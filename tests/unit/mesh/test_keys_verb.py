"""`headway keys`: what it prints, and what it writes."""

import json
from pathlib import Path

import pytest

from services.mesh.cli import main
from shared.runtime.lifecycle import EXIT_OK, EXIT_USAGE
from shared.tenants.keys import digest_of_key, read_keys


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HEADWAY_GATEWAY_KEYS_FILE", raising=False)
    return tmp_path / "keys.json"


def run(*arguments: str, file: Path) -> int:
    verb, *rest = arguments
    return main(["keys", verb, "--file", str(file), *rest])


def test_create_prints_the_key_once_and_list_never(file: Path, capsys: pytest.CaptureFixture[str]):
    assert run("create", "--tenant", "acme", "--scope", "inference", file=file) == EXIT_OK
    key = capsys.readouterr().out.strip()
    assert run("list", "--json", file=file) == EXIT_OK
    listed = capsys.readouterr().out

    (entry,) = read_keys(file)
    assert digest_of_key(key) == entry.sha256
    assert key not in listed
    assert entry.sha256 not in listed
    assert json.loads(listed)[0]["last"] == key[-4:]


def test_ids_in_the_list_are_whole(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", "50")
    run("create", "--tenant", "acme-production-of-europe", file=file)
    (entry,) = read_keys(file)
    capsys.readouterr()
    assert run("list", file=file) == EXIT_OK
    listed = capsys.readouterr().out

    assert entry.id in listed
    assert entry.tenant in listed


def test_rotated_key_ends_after_the_overlap_and_revoked_key_at_once(
    file: Path, capsys: pytest.CaptureFixture[str]
):
    run("create", "--tenant", "acme", file=file)
    (entry,) = read_keys(file)
    assert run("rotate", entry.id, "--overlap", "1h", file=file) == EXIT_OK
    old, new = read_keys(file)
    assert run("revoke", new.id, file=file) == EXIT_OK
    _, revoked = read_keys(file)
    capsys.readouterr()

    assert old.expires_at is not None
    assert old.expires_at - new.created_at == pytest.approx(3600.0)
    assert revoked.revoked_at is not None


def test_import_takes_the_keys_of_a_gateways_settings(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    settings = tmp_path / "gateway.json"
    settings.write_text('{"port": 8000, "api_keys": {"sk-one": "acme", "sk-two": "beta"}}')
    assert run("import", str(settings), file=file) == EXIT_OK
    printed = capsys.readouterr()
    assert run("import", str(settings), file=file) == EXIT_OK
    again = capsys.readouterr()

    assert [key.tenant for key in read_keys(file)] == ["acme", "beta"]
    assert "imported 2 keys" in printed.out
    assert "2 of them have fewer than" in printed.err
    assert "sk-one" not in printed.out + printed.err
    assert "imported 0 keys; the file had 2" in again.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("revoke", "key-none"), "key-none"),
        (("create", "--tenant", "acme", "--expires", "soon"), "--expires"),
        (("list",), "cannot read"),
    ],
)
def test_a_mistake_is_named(
    arguments: tuple[str, ...], says: str, file: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(*arguments, file=file) == EXIT_USAGE
    assert says in capsys.readouterr().err


def test_without_a_file_the_option_is_named(file: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["keys", "list"]) == EXIT_USAGE
    assert "--file" in capsys.readouterr().err
    assert not file.exists()


def test_list_shows_a_name_with_brackets_as_it_is(file: Path, capsys: pytest.CaptureFixture[str]):
    for tenant in ("[/a]", "[ops]"):
        run("create", "--tenant", tenant, file=file)
    capsys.readouterr()
    assert run("list", file=file) == EXIT_OK
    listed = capsys.readouterr().out

    assert "[/a]" in listed
    assert "[ops]" in listed
