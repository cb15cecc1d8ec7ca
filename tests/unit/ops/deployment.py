"""The compose file, the Dockerfile and the wheel, parsed for tests."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from cyclopts import App

import services.agent.cli as agent
import services.estimator.cli as estimator
import services.gateway.cli as gateway
import services.planner.cli as planner
from shared.runtime.cli import ServiceCli
from shared.runtime.settings import ServiceSettings, load

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = ROOT / "ops" / "docker" / "Dockerfile"
CLIS: dict[str, ServiceCli[Any]] = {
    "gateway": gateway.CLI,
    "planner": planner.CLI,
    "estimator": estimator.CLI,
    "agent": agent.CLI,
}


def verbs_of(cli: ServiceCli[Any]) -> set[str]:
    """Names of the verbs of a service."""
    return verbs_below(cli.app)


def verbs_below(app: App) -> set[str]:
    """Names of the verbs of a program, or below a verb."""
    return {name for name in app if not name.startswith("-")}


def interpolated(text: str) -> str:
    """*text* as compose reads it in an empty environment."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", re.sub(r"\$\{\w+:\+[^}]*\}", "", text))


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


class Container:
    """One entry of the compose file that runs a Headway service."""

    def __init__(self, name: str, entry: dict[str, Any], service: str) -> None:
        self.name = name
        self.entry = entry
        self.service = service
        self.cli = CLIS[service]
        self.environment: dict[str, str] = {
            # Variables without a value are passed on if the user has set them.
            name: value
            for name, value in entry["environment"].items()
            if value is not None
        }

    def __repr__(self) -> str:
        return self.name

    @property
    def settings(self) -> ServiceSettings:
        """Settings from the container's environment."""
        settings: ServiceSettings = load(
            self.cli.settings_type, service=self.service, environ=self.environment
        )
        return settings

    @property
    def verbs(self) -> set[str]:
        return verbs_of(self.cli)


def seconds(text: str) -> float:
    """Convert a duration of the compose file to seconds."""
    number, unit = re.fullmatch(r"(\d+)(s|m)", text).groups()  # type: ignore[union-attr]  # else the test fails
    return int(number) * {"s": 1, "m": 60}[unit]


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(
        interpolated((ROOT / "docker-compose.yml").read_text())
    )
    return document


def containers() -> list[Container]:
    """Every container whose image starts a Headway service."""
    entrypoints = dict(_entrypoints())
    found = []
    for name, entry in compose()["services"].items():
        command = entrypoints.get(target_of(entry["image"]), "headway")
        if command != "headway" and "entrypoint" not in entry:
            found.append(Container(name, entry, command.removeprefix("headway-")))
    return found


def target_of(image: str) -> str:
    """Target of the Dockerfile that is the image *image*."""
    return image.removeprefix("headway-")


def mounts_of(entry: dict[str, Any]) -> list[tuple[str, str]]:
    """Source and target of each mount of a service."""
    mounts = []
    for volume in entry.get("volumes", []):
        if isinstance(volume, str):
            source, target = volume.split(":")[:2]
            mounts.append((source, target))
        else:
            mounts.append((volume["source"], volume["target"]))
    return mounts


def stages() -> dict[str, list[str]]:
    """Instructions of each Dockerfile stage, with continuation lines joined."""
    lines = DOCKERFILE.read_text().replace("\\\n", " ").splitlines()
    found: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("FROM "):
            found[line.split()[-1]] = [line]
        elif found and line and not line.startswith(("#", "ARG")):
            found[list(found)[-1]].append(line)
    return found


def installed_extras(stage: str) -> list[str]:
    """Extras of the wheel that a stage installs, without its base stages."""
    for line in stages()[stage]:
        if match := re.search(r"/install packages(?:-unlocked)? ([a-z ]+)$", line):
            return match.group(1).split()
    return []


def _entrypoints() -> Iterator[tuple[str, str]]:
    for stage, lines in stages().items():
        for line in lines:
            if match := re.fullmatch(r'ENTRYPOINT \[(?:"with-kernels", )?"([a-z-]+)"\]', line):
                yield stage, match.group(1)


def entrypoint(stage: str) -> str:
    return dict(_entrypoints())[stage]


def build_wheel(directory: Path) -> Path:
    """Build the wheel of this checkout."""
    code = f"import hatchling.build as b; print(b.build_wheel({str(directory)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return directory / done.stdout.splitlines()[-1]
