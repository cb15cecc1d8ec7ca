"""API keys are made, listed, rotated and revoked in a file that has only their digests."""

from pathlib import Path

import pytest

from shared.contracts.base import TenantId
from shared.contracts.errors import SettingsError
from shared.contracts.tenants.keys import ApiKey, Scope
from shared.tenants.keys import SettingsKeys, digest_of_key, key_edit, key_file, read_keys

ACME = TenantId("acme")
NOW = 1_000.0


def made(path: Path, *, lifetime_s: float | None = None) -> tuple[ApiKey, str]:
    with key_edit(path) as edit:
        return edit.create(tenant=ACME, scopes=(Scope.INFERENCE,), now=NOW, lifetime_s=lifetime_s)


def test_the_file_has_no_key_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    """The file has the digest and the last characters; its mode is 0600."""
    path = tmp_path / "keys.json"
    entry, key = made(path)

    assert key not in path.read_text()
    assert digest_of_key(key) == entry.sha256
    assert key.endswith(entry.last)
    assert path.stat().st_mode & 0o777 == 0o600


def test_keys_have_256_random_bits(tmp_path: Path) -> None:
    """Two keys differ, and have 43 characters of base64 after the prefix."""
    _, first = made(tmp_path / "keys.json")
    _, second = made(tmp_path / "keys.json")

    assert first != second
    assert len(first.removeprefix("sk-hw-")) == 43


def test_a_key_ends_with_its_lifetime(tmp_path: Path) -> None:
    """A key is valid before `expires_at`, and not from then on."""
    entry, _ = made(tmp_path / "keys.json", lifetime_s=10.0)

    assert [entry.is_valid(NOW + 9.9), entry.is_valid(NOW + 10.0)] == [True, False]


def test_rotate_keeps_the_old_key_for_the_overlap(tmp_path: Path) -> None:
    """The new key has tenant and scopes of the old one, which ends after the overlap."""
    path = tmp_path / "keys.json"
    entry, _ = made(path)
    with key_edit(path) as edit:
        new, _ = edit.rotate(entry.id, overlap_s=60.0, now=NOW)
    old = next(key for key in read_keys(path) if key.id == entry.id)

    assert (ACME, entry.scopes) == (new.tenant, new.scopes)
    assert [old.is_valid(NOW + 59), old.is_valid(NOW + 60)] == [True, False]
    assert new.is_valid(NOW + 1e9)


async def test_a_running_watch_refuses_a_revoked_key(tmp_path: Path) -> None:
    """After the next look at the file, the key is not valid."""
    path = tmp_path / "keys.json"
    entry, key = made(path)
    watch = key_file(path)
    found = watch.find(key)
    assert found is not None
    assert found.is_valid(NOW)
    with key_edit(path) as edit:
        edit.revoke(entry.id, NOW)

    await watch.apply()

    found = watch.find(key)
    assert found is not None
    assert not found.is_valid(NOW)


def test_revoking_again_or_an_unknown_key_is_an_error(tmp_path: Path) -> None:
    """The error names the id, and the file stays the same."""
    path = tmp_path / "keys.json"
    entry, _ = made(path)
    with key_edit(path) as edit:
        edit.revoke(entry.id, NOW)
    before = path.read_bytes()

    for key_id in (entry.id, "key-none"):
        with pytest.raises(SettingsError, match=key_id), key_edit(path) as edit:
            edit.revoke(key_id, NOW)
    assert before == path.read_bytes()


def test_a_key_is_imported_once(tmp_path: Path) -> None:
    """Importing the same key again adds nothing; its last characters are not kept."""
    path = tmp_path / "keys.json"
    with key_edit(path) as edit:
        first = edit.add("secret", ACME, NOW)
    with key_edit(path) as edit:
        again = edit.add("secret", ACME, NOW)

    assert first is not None
    assert (first.last, again) == ("", None)
    assert len(read_keys(path)) == 1


def test_a_file_that_all_may_read_is_refused(tmp_path: Path) -> None:
    """The error names the mode."""
    path = tmp_path / "keys.json"
    made(path)
    path.chmod(0o644)

    with pytest.raises(SettingsError, match="644"):
        key_file(path)


def test_the_setting_api_keys_is_a_source_of_keys() -> None:
    """Its keys are found by digest; their entries do not have them."""
    keys = SettingsKeys({"secret": "acme"})
    entry = keys.find("secret")

    assert entry is not None
    assert entry.tenant == ACME
    assert Scope.OPERATOR not in entry.scopes
    assert "secret" not in repr(entry)
    assert keys.find("other") is None
