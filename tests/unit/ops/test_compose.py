"""The compose file agrees with the code that it starts."""

import json
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from ops.generate.definitions import GRANTS
from ops.release.archives import PROFILES
from ops.release.images import image_name
from services.mesh.models import provide
from services.mesh.models.provide import REGISTRY
from shared.contracts.base import ModelName
from shared.runtime import probe
from shared.runtime.settings import SHARED_FIELDS
from tests.unit.ops.deployment import (
    ROOT,
    Container,
    compose,
    containers,
    entrypoint,
    mounts_of,
    seconds,
    stages,
    target_of,
)

CONTAINERS = containers()
MAKERS = {
    "models": ("simulated",),
    "models-vllm": ("vllm",),
    "models-gpu": ("gpu", "gpus-4"),
    "models-attach": ("attach",),
}
"""Service that writes the registry -> its profiles."""
MAKER_OF = {profile: maker for maker, profiles in MAKERS.items() for profile in profiles}
"""Profile of engines -> service that writes the registry."""
OWN = {n: e for n, e in compose()["services"].items() if e["image"].startswith("headway")}
"""Services whose images are the project's own."""
GPU_AGENTS = ("agent-gpu", "agent-gpu-1", "agent-gpu-2", "agent-gpu-3")
each = pytest.mark.parametrize("container", CONTAINERS, ids=repr)


def container_ports(entry: dict[str, Any]) -> list[int]:
    return [int(port.rpartition(":")[2]) for port in entry.get("ports", [])]


def test_every_service_has_a_container():
    names = [container.name for container in CONTAINERS]

    assert names == [
        *("gateway", "planner-grouper", "planner-leader", "estimator"),
        *("agent-0", "agent-1", "agent-vllm", *GPU_AGENTS, "agent-attached"),
    ]
    others = {"rabbitmq", "store", "demo", "headway", "prometheus", "grafana", *MAKERS}
    assert {*names, *others} == compose()["services"].keys()


@each
def test_a_command_is_a_verb_of_its_service(container: Container):
    assert container.entry["command"][0] in container.verbs


@each
def test_an_image_starts_the_service(container: Container):
    target = target_of(container.entry["image"])

    assert target in stages()
    assert entrypoint(target) == f"headway-{container.service}"


def test_images_are_named_after_the_targets_that_are_built():
    for entry in OWN.values():
        if "build" in entry:
            assert image_name(entry["build"]["target"]) == entry["image"]
            assert (ROOT / entry["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("profile", [*MAKER_OF, "demo", "operator"])
def test_each_image_of_a_profile_is_built_by_one_service_and_never_pulled(profile: str):
    active = {n: e for n, e in OWN.items() if profile in e.get("profiles", [profile])}
    built = [entry["image"] for entry in active.values() if "build" in entry]

    assert sorted(built) == sorted({entry["image"] for entry in active.values()})
    assert {entry.get("pull_policy") for entry in active.values() if "build" not in entry} == {
        "never"
    }


@pytest.mark.parametrize("entry", OWN.values(), ids=OWN)
def test_own_containers_are_confined(entry: dict[str, Any]):
    assert entry["read_only"]
    assert entry["tmpfs"]
    assert entry["cap_drop"] == ["ALL"]
    assert entry["security_opt"] == ["no-new-privileges:true"]


def test_the_default_profile_is_that_of_simulated_engines():
    lines = (ROOT / PROFILES).read_text().splitlines()

    assert [line for line in lines if not line.startswith("#")] == ["COMPOSE_PROFILES=simulated"]


@each
def test_every_variable_is_a_setting(container: Container):
    prefix = f"HEADWAY_{container.service.upper()}_"
    shared = {f"HEADWAY_{field.upper()}" for field in SHARED_FIELDS}
    foreign = {
        name for name in container.environment if name not in shared and not name.startswith(prefix)
    }

    assert foreign == set()
    settings = container.settings
    if "--config" in container.entry["command"]:
        settings = msgspec.structs.replace(settings, models=(ModelName("of-the-file"),))  # type: ignore[call-arg]  # an agent's own
    container.cli.parts().check(settings)


@each
def test_variables_arrive_in_the_settings(container: Container):
    settings = container.settings

    assert settings.amqp_url == container.environment["HEADWAY_AMQP_URL"]
    assert settings.health_port == int(
        container.environment[f"HEADWAY_{container.service.upper()}_HEALTH_PORT"]
    )


@each
def test_the_healthcheck_uses_a_served_port(container: Container):
    python, option, module, port = container.entry["healthcheck"]["test"][1:]

    assert (python, option, module) == ("python", "-m", probe.__name__)
    assert container.settings.health_port == int(port)


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
    makers = {MAKER_OF[profile] for profile in container.entry.get("profiles", MAKER_OF)}
    has_registry = "HEADWAY_REGISTRY" in container.environment
    assert waits.keys() - {"store"} == (makers if has_registry else set())
    optional = {
        n for n, on in container.entry["depends_on"].items() if not on.get("required", True)
    }
    # Agents do not start if the service of their own profile fails.
    assert optional == (set() if container.service == "agent" or not has_registry else makers)
    assert "healthcheck" in compose()["services"]["rabbitmq"]


@each
def test_the_registry_is_where_its_volume_is_mounted(container: Container):
    registry = container.environment.get("HEADWAY_REGISTRY")

    assert registry is None or ("models", "/models") in mounts_of(container.entry)
    assert registry in (None, f"/models/{REGISTRY}")


@pytest.mark.parametrize(("profile", "maker"), MAKER_OF.items())
def test_a_maker_of_a_registry_belongs_to_the_profile_of_its_agents(profile: str, maker: str):
    entry = compose()["services"][maker]
    agents = [c for c in CONTAINERS if c.service == "agent" and profile in c.entry["profiles"]]

    assert profile in entry["profiles"]
    assert {agent.entry["image"] for agent in agents} == {entry["image"]}
    assert entry["entrypoint"][:5] == ["python", "-m", provide.__name__, "--dir", "/models"]
    assert ("models", "/models") in mounts_of(entry)
    given = [each for each in mounts_of(entry) if each[1] == "/model"]
    assert all(given == [m for m in mounts_of(a.entry) if m[1] == "/model"] for a in agents)


def test_the_agent_of_an_attached_server_reads_what_its_maker_writes():
    attached = compose()["services"]["agent-attached"]

    assert attached["command"] == ["run", "--config", f"/models/{provide.AGENT}"]


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

    assert reserving == {*GPU_AGENTS}
    assert backends == {
        **dict.fromkeys(("agent-0", "agent-1"), "simulated"),
        **dict.fromkeys(("agent-vllm", *GPU_AGENTS), "vllm"),
        "agent-attached": "remote",
    }
    profiles = {n: e["profiles"] for n, e in compose()["services"].items() if "profiles" in e}
    assert profiles == {
        **{maker: [*profiles] for maker, profiles in MAKERS.items()},
        **{key: ["simulated"] for key in ("agent-0", "agent-1")},
        "agent-vllm": ["vllm"],
        "agent-gpu": ["gpu", "gpus-4"],
        **{name: ["gpus-4"] for name in GPU_AGENTS[1:]},
        "agent-attached": ["attach"],
        "demo": ["demo"],
        "headway": ["operator"],
        **{key: ["observe"] for key in ("prometheus", "grafana")},
    }


def test_each_agent_has_a_gpu_of_its_own():
    entries = compose()["services"]
    devices = [
        entries[name]["deploy"]["resources"]["reservations"]["devices"] for name in GPU_AGENTS
    ]

    assert devices == [
        [{"driver": "nvidia", "device_ids": [str(number)], "capabilities": ["gpu"]}]
        for number in range(4)
    ]


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
    sources = {source for entry in services for source, _ in mounts_of(entry)}
    named = {source for source in sources if not source.startswith((".", "/"))}

    assert named == compose()["volumes"].keys()
    assert [s for s in sources - named if not (ROOT / s).exists()] == []


def test_the_broker_loads_the_definitions_that_its_configuration_names():
    mounted = dict(mounts_of(compose()["services"]["rabbitmq"]))
    configuration = (ROOT / "ops/rabbitmq/rabbitmq.conf").read_text()

    assert mounted["./ops/rabbitmq/definitions.json"] in configuration
    order = [mounted[f"./ops/{name}/rabbitmq.conf"] for name in ("rabbitmq", "docker")]
    assert order == sorted(order)
