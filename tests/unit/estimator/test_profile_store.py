"""Storage of learnt profiles on disk."""

from pathlib import Path

import msgspec
import pytest

from services.estimator.profiles import ProfileStore
from shared.contracts.errors import SettingsError
from tests.unit.estimator.profiles import PRIOR


def test_stored_profile_is_read_back(tmp_path: Path):
    store = ProfileStore(tmp_path / "made")
    assert store.load() == ()
    store.save(PRIOR)
    assert ProfileStore(tmp_path / "made").load() == (PRIOR,)


def test_profile_replaces_only_its_predecessor(tmp_path: Path):
    store = ProfileStore(tmp_path)
    store.load()
    newer = msgspec.structs.replace(PRIOR, version=6)
    other = msgspec.structs.replace(PRIOR, device="d2")
    for profile in (PRIOR, other, newer):
        store.save(profile)
    assert sorted(store.load(), key=lambda profile: profile.device) == [newer, other]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b'{"kind": "\xff"}', b'{"kind": "profile.published.v1"}']
)
def test_corrupt_file_is_refused_by_name(tmp_path: Path, content: bytes):
    (tmp_path / "broken.json").write_bytes(content)
    with pytest.raises(SettingsError, match=r"broken\.json"):
        ProfileStore(tmp_path).load()


def test_half_written_file_of_a_crash_is_ignored(tmp_path: Path):
    (tmp_path / "half.part").write_bytes(b"{")
    assert ProfileStore(tmp_path).load() == ()


def test_without_a_directory_no_file_is_written():
    store = ProfileStore(None)
    store.save(PRIOR)
    assert store.load() == ()


def test_full_disk_does_not_stop_the_estimator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    store = ProfileStore(tmp_path)
    store.save(PRIOR)

    def full(file: Path, content: bytes) -> int:
        file.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    store.save(msgspec.structs.replace(PRIOR, version=6))
    printed = capsys.readouterr()

    assert "profile.not_saved" in printed.out + printed.err
    assert store.load() == (PRIOR,)
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]
