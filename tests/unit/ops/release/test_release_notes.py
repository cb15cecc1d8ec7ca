"""Notes and digests of a release."""

import hashlib
from pathlib import Path

import pytest

from ops.release.files import section, write_sums
from shared.contracts.errors import SettingsError

CHANGELOG = """# Changelog

Text.

## [Unreleased]

### Added

- next

## [0.2.0] - 2026-01-01

- second

## [0.1.0] - 2025-01-01

- first
"""


def test_notes_are_the_section_of_the_version():
    assert section(CHANGELOG, "0.2.0") == "## [0.2.0] - 2026-01-01\n\n- second\n"
    assert section(CHANGELOG, "0.1.0").endswith("- first\n")


def test_a_version_without_a_section_has_the_unreleased_changes():
    assert section(CHANGELOG, "0.3.0") == "## [Unreleased]\n\n### Added\n\n- next\n"


def test_a_changelog_without_sections_is_refused():
    with pytest.raises(SettingsError, match=r"\[0.3.0\]"):
        section("# Changelog\n", "0.3.0")


def test_sums_are_those_of_sha256sum(tmp_path: Path):
    file = tmp_path / "a.whl"
    file.write_bytes(b"content")
    digest = hashlib.sha256(b"content").hexdigest()
    assert write_sums([file], tmp_path).read_text() == f"{digest}  a.whl\n"
