"""Commands, variables, probes and limits of the rendered pods fit the services."""

import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from shared.contracts.errors import SettingsError
from shared.runtime.cli import CLOSE_GRACE_S
from shared.runtime.health import HEALTH, READY
from shared.runtime.settings import SHARED_FIELDS, SHARED_GROUPS, ServiceSettings, load
from tests.unit.ops.deployment import CLIS, pyproject, stages, verbs_of
from tests.unit.ops.kustomize.manifests import (
    KUBERNETES,
    Container,
    Manifests,
    service_links,
)

OF_LIBRARIES = {"NUMBA_CACHE_DIR", "HOME", "HF_HUB_OFFLINE"}
"""Variables that are no settings of a service."""
SERVICES = {
    "headway-gateway": "gateway",
    "headway-grouper": "planner",
    "headway-leader": "planner",
    "headway-estimator": "estimator",
    "headway-agent": "agent",
}
VERSION_FILE = KUBERNETES / "components" / "version" / "kustomization.yaml"


def running(manifests: Manifests) -> list[Container]:
    """Containers that run a service."""
    return [each for each in manifests.containers if each.service is not None]


def is_vllm(container: Container) -> bool:
    """True for an agent with vLLM, whose models may load for long."""
    return "vllm" in str(container.spec["image"]) and container.service == "agent"


def settings_of(manifests: Manifests, container: Container) -> ServiceSettings:
    service = str(container.service)
    settings: ServiceSettings = load(
        CLIS[service].settings_type,
        service=service,
        environ=manifests.environment(container),
    )
    return settings


def test_every_service_has_a_workload(manifests: Manifests):
    assert {str(each.pod): each.service for each in running(manifests)} == SERVICES


def test_arguments_are_a_verb_of_the_service(manifests: Manifests):
    for each in running(manifests):
        assert each.spec["args"][0] in verbs_of(CLIS[str(each.service)])


def test_variables_are_settings_of_the_service(manifests: Manifests):
    shared = {f"HEADWAY_{field.upper()}" for field in SHARED_FIELDS}
    for each in running(manifests):
        groups = tuple(
            f"HEADWAY_{group.upper()}_"
            for group in SHARED_GROUPS
            if group in CLIS[str(each.service)].settings_type.__struct_fields__
        )
        own = (f"HEADWAY_{str(each.service).upper()}_", *groups)
        foreign = {
            name
            for name in manifests.environment(each)
            if name not in shared | OF_LIBRARIES and not name.startswith(own)
        }

        assert foreign == set()
        settings_of(manifests, each)


def test_ports_are_those_of_the_settings(manifests: Manifests):
    for each in running(manifests):
        settings = settings_of(manifests, each)
        expected = {"health": settings.health_port}
        if each.service == "gateway":
            expected["http"] = settings.port  # type: ignore[attr-defined]  # the gateway's own

        assert each.ports == expected
        assert settings.health_host == "0.0.0.0"


def test_probes_ask_paths_that_the_health_server_has(manifests: Manifests):
    for each in running(manifests):
        paths = {
            probe: each.spec[probe]["httpGet"]["path"]
            for probe in ("startupProbe", "livenessProbe", "readinessProbe")
        }

        startup = READY if is_vllm(each) else HEALTH
        assert paths == {"startupProbe": startup, "livenessProbe": HEALTH, "readinessProbe": READY}


def test_models_may_load_for_half_an_hour(manifests: Manifests):
    for each in filter(is_vllm, running(manifests)):
        probe = each.spec["startupProbe"]

        assert probe["periodSeconds"] * probe["failureThreshold"] == 1800
        assert each.pod.owner["spec"]["progressDeadlineSeconds"] >= 1800


def test_a_drain_is_never_cut_short(manifests: Manifests):
    for each in running(manifests):
        hook = each.spec.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        before_s = 0.0 if hook is None else float(hook[1])
        needed_s = before_s + settings_of(manifests, each).drain_timeout_s + CLOSE_GRACE_S

        assert each.pod.spec["terminationGracePeriodSeconds"] > needed_s


def test_gateways_serve_until_nodes_know_that_they_end(manifests: Manifests):
    gateway = manifests.pod("headway-gateway").main

    assert gateway.spec["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "10"]


def test_each_service_logs_in_as_its_own_user(manifests: Manifests):
    secret = manifests.pod("headway-rabbitmq").volumes["definitions"]["secret"]["secretName"]
    users = json.loads(manifests.data("Secret", secret)["definitions.json"])["users"]
    passwords = {user["name"]: user["password"] for user in users}
    for each in running(manifests):
        url = urlsplit(settings_of(manifests, each).amqp_url)
        broker = manifests.named("Service", str(url.hostname))

        assert url.username == f"headway-{each.service}"
        assert url.password == passwords[url.username]
        assert url.port in [port["port"] for port in broker["spec"]["ports"]]


def test_no_password_is_in_a_manifest_of_the_repository():
    texts = [path.read_text() for path in KUBERNETES.rglob("*.yaml") if "secrets" not in path.parts]

    assert [text for text in texts if "amqp://" in text] == []


def test_variables_of_services_are_off_because_they_would_stop_the_gateway(manifests: Manifests):
    gateway = manifests.pod("headway-gateway").main
    linked = manifests.environment(gateway) | dict(service_links(manifests))

    assert {pod.spec["enableServiceLinks"] for pod in manifests.pods} == {False}
    with pytest.raises(SettingsError, match="settings of gateway"):
        load(CLIS["gateway"].settings_type, service="gateway", environ=linked)


def test_instances_have_the_names_of_their_pods(manifests: Manifests):
    agent = manifests.pod("headway-agent").main
    names = {
        manifests.environment(agent, pod_name=name)["HEADWAY_AGENT_INSTANCE_ID"]
        for name in ("headway-agent-7c5ddbdf54-x7k2p", "headway-agent-7c5ddbdf54-9qwzl")
    }

    assert len(names) == 2


def test_the_registry_is_in_a_mounted_volume(manifests: Manifests):
    for each in running(manifests):
        if each.service == "estimator":
            continue
        registry = Path(settings_of(manifests, each).registry)
        mounts = {mount["mountPath"]: mount for mount in each.spec["volumeMounts"]}

        assert str(registry.parent) in mounts
        assert mounts[str(registry.parent)]["readOnly"]


def test_pods_satisfy_the_restricted_standard(manifests: Manifests):
    for pod in manifests.pods:
        assert pod.spec["securityContext"]["runAsNonRoot"]
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys()
        assert not any("hostPath" in volume for volume in pod.volumes.values())
    for each in manifests.containers:
        context = each.spec["securityContext"]

        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
    labels = manifests.named("Namespace", "headway")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_the_images_of_headway_are_read_only_and_run_as_their_own_user(manifests: Manifests):
    user = next(line for line in stages()["base"] if "useradd" in line)
    for each in manifests.containers:
        if not each.image.startswith("headway-"):
            continue

        assert each.spec["securityContext"]["readOnlyRootFilesystem"]
        assert f"--uid {each.pod.spec['securityContext']['runAsUser']} " in user


def test_compiled_kernels_have_a_place_where_the_image_is_read_only(manifests: Manifests):
    for each in running(manifests):
        if each.service not in {"planner", "estimator"}:
            continue
        directory = manifests.environment(each)["NUMBA_CACHE_DIR"]
        writable = [m["mountPath"] for m in each.spec["volumeMounts"] if not m.get("readOnly")]

        assert any(directory.startswith(f"{path}/") for path in writable)


def test_every_container_requests_cpu_and_memory_and_has_a_limit_of_memory(manifests: Manifests):
    for each in manifests.containers:
        resources = each.spec["resources"]

        assert {"cpu", "memory"} <= resources["requests"].keys()
        assert "memory" in resources["limits"]
        # A limit of CPU would stall event loops for parts of each 0.1 s.
        assert "cpu" not in resources["limits"]


def test_the_version_of_the_images_is_in_one_place(manifests: Manifests):
    version = pyproject()["project"]["version"]
    tags = {
        each.spec["image"].rpartition(":")[2]
        for each in manifests.containers
        if each.image.startswith("headway-")
    }
    elsewhere = [
        path
        for path in KUBERNETES.rglob("*.yaml")
        if version in path.read_text() and path != VERSION_FILE
    ]

    assert tags == {version}
    assert elsewhere == []


def test_every_image_of_headway_is_a_target_of_the_dockerfile(manifests: Manifests):
    images = {each.image for each in manifests.containers}
    targets = {f"headway-{stage}" for stage in stages()}

    assert images - targets == {"rabbitmq"}


def test_the_store_is_migrated_before_gateways_and_groupers_start(manifests: Manifests):
    for name in ("headway-gateway", "headway-grouper"):
        pod = manifests.pod(name)
        places = [
            {key: value for key, value in manifests.environment(each).items() if "_STORE_" in key}
            for each in pod.containers
            if each.spec["name"] in ("store", "headway")
        ]

        assert len(places) == 1 + bool(places[-1])
        assert places[0] == places[-1]
    leader = manifests.environment(manifests.pod("headway-leader").main)
    assert not any("_STORE_" in name for name in leader)


def test_the_registry_of_attached_servers_has_the_models_of_the_agents(
    overlay: Callable[[str], Manifests],
):
    attach = overlay("attach")
    registry = msgspec.json.decode(attach.data("ConfigMap", "headway-registry")["registry.json"])
    agent = attach.environment(attach.pod("headway-agent").main)

    assert json.loads(agent["HEADWAY_AGENT_MODELS"]) == [
        each["name"] for each in registry["models"]
    ]
    assert {each["takes"] for each in registry["models"]} == {"bodies"}


@pytest.mark.parametrize("name", ["rabbitmq-cluster", "keda"])
def test_the_overlays_of_several_nodes_run_no_other_containers(
    overlay: Callable[[str], Manifests], name: str
):
    """A test runs the containers of `one-node` and `attach` as processes: these are all of them."""
    run = [each.spec for known in ("one-node", "attach") for each in overlay(known).containers]
    others = [
        str(each)
        for each in overlay(name).containers
        if each.image != "rabbitmq" and each.spec not in run
    ]

    assert others == []
