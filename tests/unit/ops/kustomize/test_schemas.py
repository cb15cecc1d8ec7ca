"""Every rendered object fits strict schemas of several versions of Kubernetes."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.requirements import module
from tests.unit.ops.kustomize.custom_resources import CUSTOM
from tests.unit.ops.kustomize.manifests import OVERLAYS, Manifests, Object

VERSIONS = ("1.28", "1.31", "1.34", "1.37")
GROUPS = {"", "apps", "batch", "networking.k8s.io", "policy"}
"""Groups of the API whose objects are checked against schemas."""
Check = Callable[[Object, str], list[str]]


@pytest.fixture(scope="session")
def errors() -> Check:
    """Function that returns what the strict schema of a version refuses in an object."""
    schemas: Any = module("kubernetes_validate")

    def check(object_: Object, version: str) -> list[str]:
        try:
            schemas.validate(object_, version, strict=True)
        except schemas.ValidationError as error:
            return [f"{'/'.join(map(str, error.path))}: {error.message}"]
        return []

    return check


@pytest.fixture(scope="session")
def objects(overlay: Callable[[str], Manifests]) -> dict[str, Object]:
    """The objects of all overlays; those that are equal in several are checked once."""
    found: dict[bytes, tuple[str, Object]] = {}
    for name in OVERLAYS:
        for each in overlay(name).objects:
            found.setdefault(
                msgspec.json.encode(each, order="sorted"),
                (f"{name}: {each['kind']}/{each['metadata']['name']}", each),
            )
    return dict(found.values())


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_fit_the_schemas_of_a_version(
    objects: dict[str, Object], errors: Check, version: str
):
    checked = {name: each for name, each in objects.items() if each["kind"] not in CUSTOM}
    refused = {name: found for name, each in checked.items() if (found := errors(each, version))}

    assert len(checked) > 30
    assert refused == {}


def test_a_misspelt_field_and_a_wrong_type_are_refused(
    overlay: Callable[[str], Manifests], errors: Check
):
    deployment = msgspec.json.decode(
        msgspec.json.encode(overlay("one-node").named("Deployment", "headway-gateway"))
    )
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["readynessProbe"] = container.pop("readinessProbe")

    assert errors(deployment, VERSIONS[0])

    container["readinessProbe"] = container.pop("readynessProbe")
    assert errors(deployment, VERSIONS[0]) == []
    container["env"][0]["value"] = 9090
    assert errors(deployment, VERSIONS[0])


@pytest.mark.parametrize("kind", CUSTOM)
def test_custom_resources_have_only_documented_fields(objects: dict[str, Object], kind: str):
    found = [each for each in objects.values() if each["kind"] == kind]
    for each in found:
        msgspec.convert(each, CUSTOM[kind])

    assert found


def test_other_objects_belong_to_the_groups_that_have_schemas(objects: dict[str, Object]):
    groups = {
        each["apiVersion"].rpartition("/")[0]
        for each in objects.values()
        if each["kind"] not in CUSTOM
    }

    assert groups == GROUPS
