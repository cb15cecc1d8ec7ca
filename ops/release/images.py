"""Images of all services, tagged with the version; each is built once, by BuildKit."""

import subprocess
import time
from collections.abc import Callable, Sequence

import msgspec

from ops.clients.packing import ROOT, run_builder, version

TARGETS = (
    *("gateway", "planner", "estimator", "agent", "headway"),
    *("agent-vllm-cpu", "agent-vllm"),
)
"""Targets of the Dockerfile that are images."""
NO_ENGINE = "no container engine answers: docker info failed"
_INFO_TIMEOUT_S = 20.0


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """A built image."""

    name: str
    num_bytes: int


def engine_answers() -> bool:
    """Return whether a container engine can build images."""
    try:
        done = subprocess.run(
            ["docker", "info"], capture_output=True, check=False, timeout=_INFO_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def image_name(target: str) -> str:
    """Name of a target's image, without a tag."""
    return target if target == "headway" else f"headway-{target}"


def build_images(targets: Sequence[str], say: Callable[[str], None]) -> tuple[Image, ...]:
    """
    Build the images of *targets*.

    Args:
        say: Called with a line of progress before and after each build.

    Raises:
        SettingsError: No container engine is installed, or a build fails.
    """
    return tuple(_build(target, say) for target in targets)


def _build(target: str, say: Callable[[str], None]) -> Image:
    name = f"{image_name(target)}:{version()}"
    say(f"image {name} ...")
    command = ["docker", "buildx", "build", "--file", "ops/docker/Dockerfile", "--target", target]
    began = time.monotonic()
    run_builder([*command, "--tag", name, "."], ROOT)
    build_s = time.monotonic() - began
    inspected = subprocess.run(
        ["docker", "image", "inspect", "--format", "{{.Size}}", name],
        capture_output=True,
        text=True,
        check=True,
    )
    image = Image(name=name, num_bytes=int(inspected.stdout))
    say(f"image {name}: {image.num_bytes / 1e6:.0f} MB, built in {build_s:.0f} s")
    return image
