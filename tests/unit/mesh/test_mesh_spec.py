"""Settings of every process from a spec."""

from pathlib import Path
from typing import Any

import msgspec

from services.agent.settings import Settings as AgentSettings
from services.estimator.settings import Settings as EstimatorSettings
from services.gateway.settings import Settings as GatewaySettings
from services.mesh.spec import EMBEDDED, AgentSpec, MeshSpec
from services.planner.settings import Settings as PlannerSettings

TYPES = {
    "agent": AgentSettings,
    "planner": PlannerSettings,
    "estimator": EstimatorSettings,
    "gateway": GatewaySettings,
}


def spec(**fields: Any) -> MeshSpec:
    values: dict[str, Any] = {
        "broker": "amqp://b/",
        "registry": Path("models.json"),
        "log_dir": Path("log"),
        "gateway_port": 8123,
        "agents": (AgentSpec(instance_id="a"), AgentSpec(instance_id="b", engine="vllm")),
    }
    return MeshSpec(**(values | fields))


def test_every_process_has_a_name_and_a_service():
    processes = spec(groupers=2, leaders=2).service_settings()
    assert {name: service for name, (service, _) in processes.items()} == {
        "agent-a": "agent",
        "agent-b": "agent",
        "grouper-0": "planner",
        "grouper-1": "planner",
        "leader-0": "planner",
        "leader-1": "planner",
        "estimator": "estimator",
        "gateway": "gateway",
    }


def test_all_settings_are_valid_for_their_service():
    for service, values in spec().service_settings().values():
        settings = msgspec.convert(values, TYPES[service])
        assert (settings.amqp_url, settings.registry) == ("amqp://b/", "models.json")


def test_roles_are_divided_among_planners():
    processes = spec().service_settings()
    assert processes["grouper-0"][1]["roles"] == ["grouper"]
    assert processes["leader-0"][1]["roles"] == ["leader"]


def test_further_settings_of_an_agent_are_merged():
    own = {"engine": {"simulated": {"time_scale": 0.0}}, "initial_model": "m"}
    agents = (AgentSpec(instance_id="a", settings=own),)
    _, values = spec(agents=agents).service_settings()["agent-a"]
    settings = msgspec.convert(values, AgentSettings)
    assert (settings.instance_id, settings.initial_model) == ("a", "m")
    assert (settings.engine.backend, settings.engine.simulated.time_scale) == ("simulated", 0.0)
    assert own == {"engine": {"simulated": {"time_scale": 0.0}}, "initial_model": "m"}


def test_settings_of_planners_and_gateway_are_passed_on():
    processes = spec(
        planner={"leader": {"settle_s": 0.1}}, gateway={"api_keys": {"k": "t"}}
    ).service_settings()
    assert processes["leader-0"][1]["leader"] == {"settle_s": 0.1}
    gateway = msgspec.convert(processes["gateway"][1], GatewaySettings)
    assert (gateway.port, gateway.host) == (8123, "127.0.0.1")
    assert spec().gateway_url == "http://127.0.0.1:8123"


def test_an_embedded_mesh_has_no_broker_url():
    for _, values in spec(broker=EMBEDDED).service_settings().values():
        assert "amqp_url" not in values
