"""Profiles on disk, from which a restarted estimator resumes."""

import contextlib
import hashlib
from pathlib import Path

import msgspec
import structlog

from shared.contracts.base import encode
from shared.contracts.errors import SettingsError
from shared.contracts.estimates import Profile

log = structlog.get_logger()


class ProfileStore:
    """
    Stores one JSON file per profile.

    Args:
        directory: Directory of the files, created if missing; None stores nothing.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def load(self) -> tuple[Profile, ...]:
        """
        Return all stored profiles.

        Raises:
            SettingsError: A file is not a profile of this schema; the message names the file.
        """
        if self._directory is None:
            return ()
        self._directory.mkdir(parents=True, exist_ok=True)
        profiles = []
        for file in sorted(self._directory.glob("*.json")):
            try:
                profiles.append(msgspec.json.decode(file.read_bytes(), type=Profile))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise SettingsError(f"profile {file}: {error}") from error
        return tuple(profiles)

    def save(self, profile: Profile) -> None:
        """Replace the stored profile of the same (model, engine, device); log a failure."""
        if self._directory is None:
            return
        key = f"{profile.model}\0{profile.engine}\0{profile.device}"
        file = self._directory / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
        part = file.with_suffix(".part")
        try:
            part.write_bytes(encode(profile))
            part.replace(file)
        except OSError as error:
            # The learnt profile is still published; a restart begins with the last saved one.
            log.error("profile.not_saved", file=str(file), error=str(error))
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
