"""Archives that run the images of a version without a checkout: for compose and Kubernetes."""

import io
import itertools
import re
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from ops.clients.packing import ROOT, version

COMPOSE = "docker-compose.yml"
PROFILES = ".env"
"""File that selects the profile of the compose file by default."""
KUBERNETES = PurePosixPath("ops/kubernetes")
VERSIONS = KUBERNETES / "components" / "version" / "kustomization.yaml"
"""File with the tags of all images."""
_MOUNT = re.compile(r"^(?:\$\{\w+:-)?\./([^}:]+)")
"""A file or folder of the checkout in a mount, also as the default of a variable."""
_OF_BUILDS = {"build", "pull_policy"}
"""Keys of services whose images are the project's own, for use in a checkout."""
_TAG = re.compile(r'newTag: "[^"]*"')


def compose_archive(out: Path) -> Path:
    """
    Write the compose file, with images by version and without builds, and all that it mounts, into
    an archive in the folder *out*; return the archive.
    """
    source = (ROOT / COMPOSE).read_text()
    content = by_version(yaml.safe_load(source), version())
    name = f"headway-compose-{version()}"
    with _archive(out / f"{name}.tar.gz") as archive:
        text = yaml.safe_dump(content, sort_keys=False, width=100)
        _add(archive, f"{name}/{COMPOSE}", f"{_head(source)}\n{text}".encode())
        _add(archive, f"{name}/{PROFILES}", (ROOT / PROFILES).read_bytes())
        for mounted in sorted(set(mounts(content))):
            for file in _files(ROOT / mounted):
                _add(archive, f"{name}/{file.relative_to(ROOT)}", file.read_bytes())
    return out / f"{name}.tar.gz"


def kubernetes_archive(out: Path) -> Path:
    """
    Write the Kubernetes objects, with the version as the tag of all images, into an archive in the
    folder *out*; return the archive.
    """
    name = f"headway-kubernetes-{version()}"
    with _archive(out / f"{name}.tar.gz") as archive:
        for file in _files(ROOT / KUBERNETES):
            content = file.read_bytes()
            path = file.relative_to(ROOT)
            if path == Path(VERSIONS):
                content = _TAG.sub(f'newTag: "{version()}"', content.decode()).encode()
            _add(archive, f"{name}/{path.relative_to(KUBERNETES)}", content)
    return out / f"{name}.tar.gz"


def by_version(compose: Mapping[str, Any], tag: str) -> dict[str, Any]:
    """A compose file whose images of the project have *tag*, and that builds nothing."""
    services = {}
    for name, service in compose["services"].items():
        kept = {key: value for key, value in service.items() if key not in _OF_BUILDS}
        if _OF_BUILDS & service.keys():
            kept["image"] = f"{service['image']}:{tag}"
        services[name] = kept
    shown = {key: value for key, value in compose.items() if not key.startswith("x-")}
    return shown | {"services": services}


def mounts(compose: Mapping[str, Any]) -> Iterator[str]:
    """Files and folders of the checkout that the services of a compose file mount."""
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume if isinstance(volume, str) else volume["source"]
            if (found := _MOUNT.match(source)) is not None:
                yield found[1]


def _head(compose: str) -> str:
    """The comment at the head of a compose file, for images that are not built."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), compose.splitlines())
    return "\n".join(lines).replace(" --build", "") + "\n"


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    else:
        yield from sorted(each for each in path.rglob("*") if each.is_file())


def _archive(path: Path) -> tarfile.TarFile:
    return tarfile.open(path, "w:gz")


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file without the time, owner and mode of this machine."""
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    entry.mode = 0o644
    archive.addfile(entry, io.BytesIO(content))
