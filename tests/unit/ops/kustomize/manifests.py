"""Objects that kustomize renders for Kubernetes, and what they select."""

import base64
import json
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from tests.requirements import absent, program
from tests.unit.ops.deployment import ROOT, entrypoint, stages

KUBERNETES = ROOT / "ops" / "kubernetes"
PAGE = ROOT / "ops" / "docs" / "kubernetes.md"
OWN = "own"
"""Name of the overlay that the page shows as an example of one's own."""
OVERLAYS = ("one-node", "rabbitmq-cluster", "keda", "attach", OWN)
DATABASE = "postgresql://headway:secret@database:5432/headway"
OLDEST_KUSTOMIZE = (5, 0)
Object = dict[str, Any]


def kubectl() -> str:
    """Path of a kubectl whose kustomize knows the fields that the kustomizations use."""
    found = program("kubectl", "kubectl")
    version = subprocess.run(
        [found, "version", "--client", "--output=json"], capture_output=True, text=True, check=True
    )
    kustomize = str(json.loads(version.stdout).get("kustomizeVersion", "v0.0"))
    if tuple(int(part) for part in re.findall(r"\d+", kustomize)[:2]) < OLDEST_KUSTOMIZE:
        absent(f"kubectl has kustomize {kustomize}, older than 5.0", "kubectl")
    return found


def example_of_the_page() -> str:
    """The kustomization that the page shows as an example."""
    found = re.search(r"```yaml\n(.*?)^ *```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    return textwrap.dedent(found[1])


def deployable(directory: Path) -> tuple[Path, str]:
    """Make a copy of the manifests with new credentials; return its path and the API key."""
    tree = directory / "kubernetes"
    shutil.copytree(KUBERNETES, tree, ignore=shutil.ignore_patterns("secrets"))
    out = tree / "credentials" / "secrets"
    made = subprocess.run(
        [sys.executable, "-m", "ops.generate.credentials", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    database = tree / "components" / "postgres" / "secrets" / "store.env"
    database.parent.mkdir()
    database.write_text(f"url={DATABASE}\n")
    own = tree / "overlays" / OWN / "kustomization.yaml"
    own.parent.mkdir()
    own.write_text(example_of_the_page())
    return tree, made.stdout.strip()


def render(overlay: Path) -> "Manifests":
    """Objects of an overlay, as `kubectl apply -k` sends them."""
    done = subprocess.run(
        [kubectl(), "kustomize", str(overlay)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return Manifests([each for each in yaml.safe_load_all(done.stdout) if each])


def matches(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a label selector of Kubernetes selects *labels*; an empty one selects all."""
    for name, value in (selector.get("matchLabels") or {}).items():
        if labels.get(name) != value:
            return False
    for each in selector.get("matchExpressions") or ():
        is_in = labels.get(each["key"]) in each.get("values", ())
        holds = {
            "In": is_in,
            "NotIn": not is_in,
            "Exists": each["key"] in labels,
            "DoesNotExist": each["key"] not in labels,
        }[each["operator"]]
        if not holds:
            return False
    return True


@dataclass(frozen=True)
class Container:
    """One container of a pod, in the form of the API."""

    pod: "Pod"
    spec: Object
    is_init: bool

    def __repr__(self) -> str:
        return f"{self.pod}/{self.spec['name']}"

    @property
    def image(self) -> str:
        """Name of the image without registry and tag."""
        return str(self.spec["image"]).rpartition("/")[2].partition(":")[0]

    @property
    def service(self) -> str | None:
        """Service of Headway that the container runs; None if it runs another command."""
        if "command" in self.spec or self.image not in {f"headway-{stage}" for stage in stages()}:
            return None
        return entrypoint(self.image.removeprefix("headway-")).removeprefix("headway-")

    @property
    def ports(self) -> dict[str, int]:
        """Name of each port -> its number."""
        return {port["name"]: port["containerPort"] for port in self.spec.get("ports", ())}


@dataclass(frozen=True)
class Pod:
    """Template of the pods of one workload."""

    owner: Object
    template: Object

    def __repr__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        return str(self.owner["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.owner["metadata"]["namespace"])

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template["metadata"]["labels"])

    @property
    def spec(self) -> Object:
        spec: Object = self.template["spec"]
        return spec

    @property
    def replicas(self) -> int:
        return int(self.owner["spec"].get("replicas", 1))

    @property
    def containers(self) -> list[Container]:
        """Init containers, then the others."""
        return [
            Container(self, spec, is_init)
            for key, is_init in (("initContainers", True), ("containers", False))
            for spec in self.spec.get(key, ())
        ]

    @property
    def main(self) -> Container:
        """Its only container that is not an init container."""
        (only,) = [each for each in self.containers if not each.is_init]
        return only

    @property
    def volumes(self) -> dict[str, Object]:
        """Name of each volume -> the volume; a claim template counts as an own claim."""
        found = {each["name"]: each for each in self.spec.get("volumes", ())}
        for claim in self.owner["spec"].get("volumeClaimTemplates", ()):
            name = claim["metadata"]["name"]
            found[name] = {"name": name, "ephemeral": {"volumeClaimTemplate": claim}}
        return found


class Manifests:
    """All objects of one overlay."""

    def __init__(self, objects: list[Object]) -> None:
        self.objects = objects

    def of(self, kind: str) -> list[Object]:
        return [each for each in self.objects if each["kind"] == kind]

    def named(self, kind: str, name: str) -> Object:
        """The only object of a kind with this name; fails if there is none."""
        found = [each for each in self.of(kind) if each["metadata"]["name"] == name]
        assert len(found) == 1, f"{len(found)} objects {kind} {name}"
        return found[0]

    def has(self, kind: str, name: str) -> bool:
        return any(each["metadata"]["name"] == name for each in self.of(kind))

    @cached_property
    def pods(self) -> list[Pod]:
        return [
            Pod(each, each["spec"]["template"])
            for kind in ("Deployment", "StatefulSet", "Job")
            for each in self.of(kind)
        ]

    @property
    def containers(self) -> list[Container]:
        return [container for pod in self.pods for container in pod.containers]

    def pod(self, name: str) -> Pod:
        (found,) = [each for each in self.pods if each.name == name]
        return found

    def selected(self, selector: Object) -> list[Pod]:
        return [pod for pod in self.pods if matches(selector, pod.labels)]

    def data(self, kind: str, name: str) -> dict[str, str]:
        """Keys and texts of a ConfigMap or Secret."""
        found = self.named(kind, name)
        texts = dict(found.get("data") or {})
        if kind == "Secret":
            return {key: base64.b64decode(value).decode() for key, value in texts.items()}
        return texts

    def environment(self, container: Container, *, pod_name: str = "pod-0") -> dict[str, str]:
        """
        Variables that the kubelet sets for a container from its manifest.

        Args:
            container: One of these containers.
            pod_name: Name of the pod.
        """
        found: dict[str, str] = {}
        for source in container.spec.get("envFrom", ()):
            for field, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
                if field in source:
                    found |= self.data(kind, source[field]["name"])
        for variable in container.spec.get("env", ()):
            value = self._value(variable, pod_name, container.pod.namespace)
            if value is not None:
                found[variable["name"]] = expanded(value, found)
        return found

    def _value(self, variable: Object, pod_name: str, namespace: str) -> str | None:
        if "valueFrom" not in variable:
            return str(variable.get("value", ""))
        source = variable["valueFrom"]
        if "fieldRef" in source:
            fields = {"metadata.name": pod_name, "metadata.namespace": namespace}
            return fields[source["fieldRef"]["fieldPath"]]
        for field, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
            if field in source:
                reference = source[field]
                if reference.get("optional") and not self.has(kind, reference["name"]):
                    return None
                return self.data(kind, reference["name"])[reference["key"]]
        raise AssertionError(f"unknown source of a variable: {variable}")


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """*text* with each `$(NAME)` of an earlier variable replaced, as the kubelet does."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)


def service_links(manifests: Manifests) -> Iterator[tuple[str, str]]:
    """Variables that a pod without `enableServiceLinks: false` gets for each Service."""
    for service in manifests.of("Service"):
        if service["spec"].get("clusterIP") == "None":
            continue
        prefix = service["metadata"]["name"].upper().replace("-", "_")
        port = service["spec"]["ports"][0]["port"]
        yield f"{prefix}_SERVICE_HOST", "10.0.0.9"
        yield f"{prefix}_SERVICE_PORT", str(port)
        yield f"{prefix}_PORT", f"tcp://10.0.0.9:{port}"
