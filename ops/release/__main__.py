"""
Make all artefacts of a release of the version in pyproject.toml.

The folder gets the wheels, an archive with the compose file and all that it mounts, an archive with
the Kubernetes objects, a bill of materials, the notes of the version, and SHA256SUMS. Images are
built where a container engine answers.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ops.clients.packing import version
from ops.clients.wheel import build_wheel
from ops.release.archives import compose_archive, kubernetes_archive
from ops.release.files import bill_of_materials, headway_wheel, notes, write_sums
from ops.release.images import NO_ENGINE, TARGETS, Image, build_images, engine_answers
from shared.contracts.errors import MeshError

STEPS: dict[str, Callable[[Path], Path]] = {
    "wheel of the services": headway_wheel,
    "wheel of the client": build_wheel,
    "compose archive": compose_archive,
    "Kubernetes archive": kubernetes_archive,
    "bill of materials": bill_of_materials,
    "notes": notes,
}
"""Artefact -> function that makes it in a folder, and returns its file."""


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """A finished release, for `--json`."""

    version: str
    files: tuple[str, ...]
    images: tuple[Image, ...]
    images_skipped: str | None
    """Reason for which no image was built."""


def main() -> int:
    """Make the release; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.release",
        description=__doc__,
    )
    parser.add_argument("--out", type=Path, default=Path("dist"), help="default: dist")
    parser.add_argument(
        "--images",
        nargs="?",
        choices=("auto", "yes", "no"),
        const="yes",
        default="auto",
        help="build images if a container engine answers (auto, the default), always (yes, also "
        "without a value; fails without an engine), or never (no)",
    )
    parser.add_argument(
        "--image",
        action="append",
        metavar="IMAGE",
        choices=TARGETS,
        dest="targets",
        help=f"build only this image: {', '.join(TARGETS)}; may be repeated. Default: all",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args()
    try:
        made = _make(options.out, options.images, options.targets or TARGETS)
    except (MeshError, OSError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(msgspec.json.encode(made).decode())
    return 0


def _make(out: Path, images: str, targets: Sequence[str]) -> Made:
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for what, make in STEPS.items():
        _say(f"{what} ...")
        file = make(out)
        _say(f"{what}: {file} ({file.stat().st_size / 1024:.0f} KiB)")
        files.append(file)
    files.append(write_sums(files, out))
    skipped = None
    if images == "no":
        skipped = "--images no"
    elif images == "auto" and not engine_answers():
        skipped = NO_ENGINE
    built = () if skipped else build_images(targets, _say)
    _say(f"images: not built: {skipped}" if skipped else f"images: {len(built)}")
    return Made(
        version=version(),
        files=tuple(file.name for file in files),
        images=built,
        images_skipped=skipped,
    )


def _say(text: str) -> None:
    print(f"release: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
