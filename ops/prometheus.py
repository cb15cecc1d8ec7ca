"""
Prometheus and promtool, from the system or unpacked into .headway, and a private Prometheus server.

`python -m ops.prometheus install` unpacks Debian's package; nothing of the system is changed.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops import debian
from ops.ports import free_port
from shared.contracts.base import Seconds
from shared.contracts.errors import MeshError, SettingsError

FOLDER = Path(__file__).resolve().parents[1] / ".headway" / "prometheus"
"""Folder of the unpacked programs; `make clean` deletes it."""
_PROGRAMS = Path("usr/bin")
_SUITE = "trixie"
_PACKAGES = ("prometheus", "promtool", "libc6")
START_TIMEOUT_S: Seconds = 60.0
STOP_TIMEOUT_S: Seconds = 20.0
ANSWER_TIMEOUT_S: Seconds = 10.0


def program(name: str) -> str | None:
    """Path of `prometheus` or `promtool`: of `install`, else of the system; None without either."""
    unpacked = FOLDER / _PROGRAMS / name
    return str(unpacked) if unpacked.exists() else shutil.which(name)


def install() -> Path:
    """
    Unpack Prometheus into `FOLDER`, unless it is there: 35 MB are downloaded.

    Returns:
        Folder of the programs.

    Raises:
        SettingsError: It cannot be downloaded; the message says why.
    """
    if not FOLDER.is_dir():
        folder = FOLDER.with_name(f"{FOLDER.name}.new")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            debian.unpack(_SUITE, _PACKAGES, folder)
            debian.use_own_libraries(folder, folder / _PROGRAMS, later=FOLDER)
            folder.rename(FOLDER)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return FOLDER / _PROGRAMS


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of an instant query."""

    labels: Mapping[str, str]
    value: float


class PrivatePrometheus:
    """
    A Prometheus server with its own port, configuration and data.

    Args:
        directory: Folder for all of the server's files.
        config: Content of its `prometheus.yml`.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        self._directory = directory.resolve()
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{free_port()}"

    def start(self) -> None:
        """
        Start the server and wait until it is ready.

        Raises:
            SettingsError: Prometheus is not installed.
            MeshError: The server does not start; the message has the end of its log.
        """
        binary = program("prometheus")
        if binary is None:
            raise SettingsError(
                "prometheus is not installed: run `python -m ops.prometheus install`"
            )
        self._directory.mkdir(parents=True, exist_ok=True)
        config, log = self._directory / "prometheus.yml", self._directory / "prometheus.log"
        config.write_text(json.dumps(self._config, indent=1))  # JSON is YAML
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [
                    binary,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={self._directory / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > give_up_at:
                self.stop()
                raise MeshError(f"Prometheus did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End the server; it is killed if it does not end within `STOP_TIMEOUT_S`."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def query(self, expression: str) -> list[Sample]:
        """
        Result of an instant query.

        Raises:
            MeshError: Prometheus does not answer, refuses the expression, or its result is neither
                a vector nor a scalar.
        """
        data = self._get(f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        match data["resultType"]:
            case "scalar":
                return [Sample({}, float(data["result"][1]))]
            case "vector":
                return [Sample(each["metric"], float(each["value"][1])) for each in data["result"]]
        raise MeshError(f"{expression}: the result is a {data['resultType']}")

    def alerts(self) -> list[dict[str, Any]]:
        """
        Pending and firing alerts, with their labels and rendered annotations.

        Raises:
            MeshError: Prometheus does not answer.
        """
        found: list[dict[str, Any]] = self._get("/api/v1/alerts")["alerts"]
        return found

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=ANSWER_TIMEOUT_S):
                return True
        except OSError:
            return False

    def _get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(self.url + path, timeout=ANSWER_TIMEOUT_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise MeshError(f"{path}: {error.read().decode(errors='replace')}") from error
        except OSError as error:
            raise MeshError(f"{path}: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m ops.prometheus install`; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ops.prometheus", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("install", help="unpack Prometheus and promtool into .headway")
    parser.parse_args(argv)
    try:
        print(install())
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
