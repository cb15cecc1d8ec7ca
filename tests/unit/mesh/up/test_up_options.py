"""The engine and the addresses that `headway up` selects."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from ops.ports import free_port
from services.mesh.cli import MeshProgram
from services.mesh.spec import AgentSpec, MeshSpec
from services.mesh.start_checks import check_instances, check_ports
from services.mesh.verbs import cli_up
from services.mesh.verbs.cli_up import UpOptions, up
from shared.broker import topology
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import OutMessage
from shared.contracts.base import InstanceId
from shared.contracts.errors import SettingsError
from shared.contracts.telemetry import InstanceStatus

pytestmark = pytest.mark.virtual_time


def options(*given: str) -> UpOptions:
    _, bound, _ = MeshProgram().parsed(["up", *given])
    found: UpOptions = bound.arguments.get("options", UpOptions())
    return found


@pytest.mark.parametrize(
    ("given", "backend"),
    [
        ((), "simulated"),
        (("--model", "./llama"), "vllm"),
        (("--model", "./llama", "--engine", "simulated"), "simulated"),
        (("--engine", "vllm"), "vllm"),
    ],
)
def test_a_model_means_vllm(given: tuple[str, ...], backend: str):
    assert options(*given).backend == backend


async def test_a_model_without_vllm_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("services.agent.backends.vllm.front.process.find_spec", lambda _: None)
    with pytest.raises(SettingsError, match="--model is served by vLLM"):
        await up(options=options("--model", "./llama", "--broker", "embedded"))
    monkeypatch.setenv(cli_up.VLLM_PYTHON, "/other/python")
    with pytest.raises(SettingsError, match="llama"):  # the next check: it does not exist
        await up(options=options("--model", "./llama", "--broker", "embedded"))


@pytest.mark.parametrize("broker", ["", " "])
async def test_an_empty_broker_is_not_the_default(broker: str):
    with pytest.raises(SettingsError, match="--broker is empty"):
        await up(options=options("--broker", broker))


@pytest.mark.parametrize(
    ("variable", "named"), [(None, "--amqp-url"), ("amqp://h/", "--amqp-url"), ("", "HEADWAY_AMQP")]
)
async def test_an_empty_broker_url_is_named_as_it_was_given(
    variable: str | None, named: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("HEADWAY_AMQP_URL", raising=False)
    if variable is not None:
        monkeypatch.setenv("HEADWAY_AMQP_URL", variable)
    with pytest.raises(SettingsError, match=f"^{named}"):
        await up(amqp_url="")


@pytest.mark.parametrize(("port", "gateways"), [(65535, 2), (65534, 3)])
async def test_gateways_beyond_the_highest_port_are_refused(port: int, gateways: int):
    given = options("--port", str(port), "--gateways", str(gateways), "--broker", "embedded")
    with pytest.raises(SettingsError, match="needs ports up to 65536; the highest is 65535"):
        await up(options=given)


def spec_of(tmp_path: Path, **fields: Any) -> MeshSpec:
    values: dict[str, Any] = {
        "broker": "memory://",
        "registry": tmp_path,
        "log_dir": tmp_path,
        "gateway_port": 8000,
        "agents": (AgentSpec(instance_id="agent-0"), AgentSpec(instance_id="agent-1")),
    }
    return MeshSpec(**(values | fields))


def test_gateways_have_ports_of_their_own(tmp_path: Path):
    spec = spec_of(tmp_path, gateways=3)
    services = spec.service_settings()
    ports = {name: values["port"] for name, (kind, values) in services.items() if kind == "gateway"}
    assert ports == {"gateway": 8000, "gateway-1": 8001, "gateway-2": 8002}
    assert spec.gateway_urls[-1] == "http://127.0.0.1:8002"


def test_a_port_in_use_is_refused_by_number(tmp_path: Path):
    first, second = free_port(), free_port()
    while second != first + 1:
        first, second = second, free_port()
    with (
        socket.create_server(("127.0.0.1", second)),
        pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{second}"),
    ):
        check_ports(spec_of(tmp_path, gateway_port=first, gateways=2))


async def test_an_id_in_use_is_refused_by_name(tmp_path: Path):
    hub = MemoryHub()
    async with (
        MemoryBroker(hub, client_name="a") as broker,
        MemoryBroker(hub, client_name="b") as other,
    ):
        await check_instances(broker, spec_of(tmp_path))

        async def report() -> None:
            await asyncio.sleep(1.0)
            status = InstanceStatus(
                instance_id=InstanceId("agent-1"),
                incarnation="x",
                seq=1,
                at=1.0,
                engine="simulated",
                device="cpu",
            )
            await other.publish(topology.TELEMETRY, "status.agent-1", OutMessage.transient(status))

        reporting = asyncio.create_task(report())
        with pytest.raises(SettingsError, match="agent-1 already runs at this broker"):
            await check_instances(broker, spec_of(tmp_path))
        await reporting
