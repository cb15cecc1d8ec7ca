"""Places of the store, and hosts."""

from pathlib import Path

import pytest
from sqlalchemy.engine import URL

from shared.contracts.errors import SettingsError
from shared.store.location import (
    NETWORK_FILE_SYSTEMS,
    Host,
    file_system_of,
    location_of,
    refuse_network_file_system,
    this_host,
    this_process,
)
from shared.store.settings import FileLimits, StoreSettings

MOUNTS = r"""
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:30 / /home rw,relatime shared:2 - nfs4 server:/home rw
31 30 0:31 / /home/local rw,relatime - xfs /dev/vdb rw
32 22 0:32 / /mnt/my\040disk rw,relatime - fuse.sshfs host:/ rw
33 22 0:33 / /twice rw - nfs server:/x rw
34 22 0:34 / /twice rw - tmpfs none rw
"""


def test_without_settings_there_is_no_store():
    assert location_of(StoreSettings()) is None


def test_a_data_directory_has_a_database_and_bodies(tmp_path: Path):
    location = location_of(StoreSettings(data_dir=str(tmp_path)))

    assert location is not None
    assert location.sqlite_file == tmp_path / "store.db"
    assert location.url == URL.create("sqlite+aiosqlite", database=str(tmp_path / "store.db"))
    assert location.files == f"file://{tmp_path}/files"


@pytest.mark.parametrize(
    "url",
    [
        "postgres://u:secret@h/db",
        "postgresql://u:secret@h/db",
        "postgresql+asyncpg://u:secret@h/db",
    ],
)
def test_postgresql_is_given_by_url(url: str):
    location = location_of(StoreSettings(url=url, files="s3://bucket/headway"))

    assert location is not None
    assert location.url.drivername == "postgresql+asyncpg"
    assert location.url.password == "secret"
    assert location.shown == "postgresql+asyncpg://u:***@h/db"
    assert (location.files, location.sqlite_file) == ("s3://bucket/headway", None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (StoreSettings(url="postgresql://h/db"), "store.files or store.data_dir must be set"),
        (StoreSettings(files="s3://x"), "store.files needs store.url"),
        (StoreSettings(url="mysql://h/db", data_dir="/x"), "scheme 'mysql'; supported"),
        (StoreSettings(url="postgresql://[::1/x", data_dir="/x"), "is not a URL of a database"),
        (StoreSettings(data_dir="/x", files="http://[::1/"), "store.files is not a URL"),
        (StoreSettings(url="secret@h", data_dir="/x"), "is not a URL of a database"),
        (StoreSettings(url="sqlite://", data_dir="/x"), "names no file"),
        (
            StoreSettings(data_dir="/x", orphan_grace_s=100.0, upload_timeout_s=60.0),
            "orphan_grace_s is 100; it must be at least twice store.upload_timeout_s",
        ),
    ],
)
def test_settings_that_name_no_usable_place_are_refused(settings: StoreSettings, message: str):
    with pytest.raises(SettingsError, match=message) as error:
        location_of(settings)

    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/store.db", "ext4"),
        ("/home/me/store.db", "nfs4"),
        ("/home/local/store.db", "xfs"),
        ("/homework/store.db", "ext4"),
        ("/mnt/my disk/store.db", "fuse.sshfs"),
        ("/twice/store.db", "tmpfs"),
    ],
)
def test_the_file_system_is_that_of_the_innermost_mount(path: str, kind: str):
    assert file_system_of(Path(path), MOUNTS) == kind


def test_sqlite_on_a_network_file_system_is_refused_with_the_alternatives():
    with pytest.raises(SettingsError, match=r"type nfs4.*local directory, or PostgreSQL"):
        refuse_network_file_system(Path("/home/me/store.db"), MOUNTS)

    refuse_network_file_system(Path("/home/local/store.db"), MOUNTS)
    refuse_network_file_system(Path("/home/me/store.db"), "")
    assert {"nfs", "cifs", "fuse.sshfs"} <= NETWORK_FILE_SYSTEMS


def test_hosts_are_the_same_by_their_boot_or_by_machine_and_name():
    host = Host(boot="b1", machine="m1", name="n1")

    assert host.is_same(Host(boot="b1", machine="", name="container"))
    assert host.is_same(Host(boot="b2", machine="m1", name="n1"))
    assert not host.is_same(Host(boot="b2", machine="m1", name="clone"))
    assert not Host(boot="b1", machine="", name="n").is_same(Host(boot="b2", machine="", name="n"))
    assert this_host().is_same(this_host())
    assert this_process() != this_process()


def test_limits_and_retention_of_a_tenant_replace_the_common_ones():
    own = FileLimits(max_bytes=5, max_files=1)
    settings = StoreSettings(
        tenant_limits={"acme": own},
        retention_s={"batch": 100.0, "vision": 50.0},
        tenant_retention_s={"acme": {"batch": 10.0}},
    )

    assert (settings.limits_of("acme"), settings.limits_of("other")) == (own, FileLimits())
    assert settings.retention_of("acme", "batch") == 10.0
    assert settings.retention_of("acme", "vision") == 50.0
    assert settings.retention_of("other", "batch") == 100.0
    assert settings.retention_of("other", "assistants") is None
