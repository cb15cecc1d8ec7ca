"""The compose file agrees with the code that it starts."""

import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from ops.generate.definitions import GRANTS
from shared.runtime.settings import SHARED_FIELDS
from tests.unit.ops.deployment import (
    ROOT,
    Container,
    compose,
    containers,
    entrypoint,
    seconds,
    stages,
)

CONTAINERS = containers()
each = pytest.mark.parametrize("container", CONTAINERS, ids=repr)


def container_ports(entry: dict[str, Any]) -> list[int]:
    return [int(port.rpartition(":")[2]) for port in entry.get("ports", [])]


def test_every_service_has_a_container():
    names = [container.name for container in CONTAINERS]

    assert names == [
        *("gateway", "planner-grouper", "planner-leader", "estimator"),
        *("agent-0", "agent-1", "agent-gpu"),
    ]
    assert {"rabbitmq", "models", "store", "prometheus", "grafana"} < compose()["services"].keys()


@each
def test_a_command_is_a_verb_of_its_service(container: Container):
    assert container.entry["command"][0] in container.verbs


@each
def test_a_build_target_is_a_stage_that_starts_the_service(container: Container):
    build = container.entry["build"]

    assert build["target"] in stages()
    assert (ROOT / build["dockerfile"]).is_file()
    assert entrypoint(build["target"]) == f"headway-{container.service}"
    assert container.entry["image"] == f"headway-{build['target']}"


@each
def test_every_variable_is_a_setting(container: Container):
    prefix = f"HEADWAY_{container.service.upper()}_"
    shared = {f"HEADWAY_{field.upper()}" for field in SHARED_FIELDS}
    foreign = {
        name for name in container.environment if name not in shared and not name.startswith(prefix)
    }

    assert foreign == set()
    container.cli.check(container.settings)


@each
def test_variables_arrive_in_the_settings(container: Container):
    settings = container.settings

    assert settings.amqp_url == container.environment["HEADWAY_AMQP_URL"]
    assert settings.health_port == int(
        container.environment[f"HEADWAY_{container.service.upper()}_HEALTH_PORT"]
    )


@each
def test_the_healthcheck_uses_a_served_port(container: Container):
    check = container.entry["healthcheck"]["test"]

    assert check == ["CMD", f"headway-{container.service}", "health"]
    assert "health" in container.verbs
    assert container.settings.health_port != 0


@each
def test_a_drain_is_never_cut_short(container: Container):
    assert seconds(container.entry["stop_grace_period"]) > container.settings.drain_timeout_s


@each
def test_every_login_of_a_service_is_in_the_definitions(container: Container):
    users = json.loads((ROOT / "ops/rabbitmq/definitions.json").read_text())["users"]
    passwords = {user["name"]: user["password"] for user in users}
    url = urlsplit(container.settings.amqp_url)

    assert url.username == f"headway-{container.service}"
    assert url.password == passwords[url.username]
    assert (url.hostname, url.port) == ("rabbitmq", 5672)


def test_every_service_user_has_a_container():
    users = {grant.user for grant in GRANTS if grant.user.startswith("headway-")}

    assert users == {f"headway-{container.service}" for container in CONTAINERS}


@each
def test_services_wait_for_the_broker_and_the_models(container: Container):
    waits = {name: on["condition"] for name, on in container.entry["depends_on"].items()}

    assert waits.pop("rabbitmq") == "service_healthy"
    assert set(waits.values()) <= {"service_completed_successfully"}
    assert bool(waits) == ("HEADWAY_REGISTRY" in container.environment)
    assert "healthcheck" in compose()["services"]["rabbitmq"]


@each
def test_the_registry_is_where_its_volume_is_mounted(container: Container):
    mounts = [volume.split(":")[1] for volume in container.entry.get("volumes", [])]
    registry = container.environment.get("HEADWAY_REGISTRY")

    assert registry is None or registry in [f"{mount}/registry.json" for mount in mounts]
    made = {makers["entrypoint"][-1].split()[2] for makers in _makers()}
    assert registry is None or {registry} == made


def _makers() -> list[dict[str, Any]]:
    return [compose()["services"][name] for name in ("models", "models-gpu")]


def test_models_are_made_in_the_volumes_that_services_read():
    written = {maker["volumes"][0].split(":")[0] for maker in _makers()}
    read = {
        container.entry["volumes"][0].split(":")[0]
        for container in CONTAINERS
        if "HEADWAY_REGISTRY" in container.environment
    }

    assert written == read == {"models", "models-gpu"}


def test_instances_have_unique_names():
    agents = [container for container in CONTAINERS if container.service == "agent"]
    names = [agent.environment["HEADWAY_AGENT_INSTANCE_ID"] for agent in agents]

    assert names == [agent.name for agent in agents]
    assert all("replicas" not in agent.entry.get("deploy", {}) for agent in agents)


def test_only_the_gpu_profile_needs_a_gpu():
    reserving = {c.name for c in CONTAINERS if "resources" in c.entry.get("deploy", {})}
    backends = {
        c.name: c.environment["HEADWAY_AGENT_ENGINE__BACKEND"]
        for c in CONTAINERS
        if c.service == "agent"
    }

    assert reserving == {"agent-gpu"}
    assert backends == {"agent-0": "simulated", "agent-1": "simulated", "agent-gpu": "vllm"}
    profiles = {n: e["profiles"] for n, e in compose()["services"].items() if "profiles" in e}
    assert profiles == {
        "models-gpu": ["gpu"],
        "agent-gpu": ["gpu"],
        "prometheus": ["observe"],
        "grafana": ["observe"],
    }


def test_the_gateway_publishes_the_port_that_it_serves():
    gateway = next(c for c in CONTAINERS if c.service == "gateway")
    settings = gateway.settings

    assert container_ports(gateway.entry) == [settings.port]  # type: ignore[attr-defined]  # the gateway's own
    assert settings.host == "0.0.0.0"  # type: ignore[attr-defined]  # as above


def test_no_port_is_open_to_the_network():
    published = [p for e in compose()["services"].values() for p in e.get("ports", [])]

    assert published
    assert [port for port in published if not port.startswith("127.0.0.1:")] == []


def test_every_named_volume_is_declared_and_used():
    services = compose()["services"].values()
    sources = {volume.split(":")[0] for entry in services for volume in entry.get("volumes", [])}
    named = {source for source in sources if not source.startswith((".", "/"))}

    assert named == compose()["volumes"].keys()
    assert [s for s in sources - named if not (ROOT / s).exists()] == []


def test_the_broker_loads_the_definitions_that_its_configuration_names():
    volumes = compose()["services"]["rabbitmq"]["volumes"]
    mounted = dict(volume.split(":")[:2] for volume in volumes)
    configuration = (ROOT / "ops/rabbitmq/rabbitmq.conf").read_text()

    assert mounted["./ops/rabbitmq/definitions.json"] in configuration
    order = [mounted[f"./ops/{name}/rabbitmq.conf"] for name in ("rabbitmq", "docker")]
    assert order == sorted(order)
