"""Rendered overlays, once for all tests of a process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.ops.kustomize.manifests import OVERLAYS, Manifests, deployable, kubectl, render


@pytest.fixture(scope="session")
def kubernetes_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of ops/kubernetes with credentials, and with the overlay of the page's example."""
    kubectl()
    tree, _ = deployable(tmp_path_factory.mktemp("kustomize"))
    return tree


@pytest.fixture(scope="session")
def overlay(kubernetes_tree: Path) -> Callable[[str], Manifests]:
    """Function that returns the objects of an overlay by its name."""
    known: dict[str, Manifests] = {}

    def rendered(name: str) -> Manifests:
        if name not in known:
            known[name] = render(kubernetes_tree / "overlays" / name)
        return known[name]

    return rendered


@pytest.fixture(params=OVERLAYS)
def manifests(request: Any, overlay: Callable[[str], Manifests]) -> Manifests:
    """The objects of each overlay."""
    return overlay(request.param)
