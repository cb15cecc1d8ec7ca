"""The agents of `headway up` on the GPUs of a machine."""

import signal
from pathlib import Path

import msgspec
import pytest

from services.agent.devices.found import Device
from services.agent.servable import servable_entries
from services.agent.settings import Settings
from services.mesh.placing import engine_devices
from services.mesh.processes import ProcessMesh
from services.mesh.spec import AgentSpec, MeshSpec
from services.mesh.verbs.cli_up import VLLM_PYTHON, UpOptions, fleet
from shared.contracts.base import ModelName
from shared.contracts.errors import SettingsError
from shared.models.registry import ModelRegistry, write_registry
from shared.models.tiny import make_tiny_models

GIB = 1 << 30
CPU_BUILD = "services.agent.backends.vllm.front.process.is_cpu_build"
FOUR = tuple(Device(str(at), at, f"GPU-{at}", "H200", 141 * GIB) for at in range(4))


@pytest.fixture(autouse=True)
def gpu_build(monkeypatch: pytest.MonkeyPatch):
    """vLLM for GPUs is installed, and the variable is not set."""
    monkeypatch.setattr(CPU_BUILD, lambda: False)
    monkeypatch.setattr("services.mesh.verbs.cli_up.available_host_bytes", lambda **_: 600 * GIB)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    """Three models, of which tiny-llama-b takes two devices."""
    made = ModelRegistry.load(make_tiny_models(tmp_path / "models", weights=False))
    entries = {name: made.entry(name) for name in made.bases}
    pair = next(name for name in entries if name == "tiny-llama-b")
    entries[pair] = msgspec.structs.replace(
        entries[pair], weight_bytes=120 * GIB, engine_args={"tensor_parallel_size": 2}
    )
    write_registry(tmp_path / "registry.json", entries.values())
    return tmp_path / "registry.json"


def options(registry: Path, **given: object) -> UpOptions:
    values: dict[str, object] = {"registry": registry, "engine": "vllm", "log_dir": registry.parent}
    return UpOptions(**(values | given))


async def agents_on(devices: tuple[Device, ...], given: UpOptions) -> tuple[AgentSpec, ...]:
    return (await fleet(given, lambda: devices))[1]


async def test_three_models_on_four_devices_get_three_agents(registry: Path):
    agents = await agents_on(FOUR, options(registry))
    assert [f"{each.instance_id}: {each.place}" for each in agents] == [
        "agent-0: GPU 0, H200, tiny-llama",
        "agent-1: GPU 1, H200, tiny-qwen",
        "agent-2: GPU 2 and GPU 3, 2 x H200, tiny-llama-b",
    ]
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in agents] == ["0", "1", "2,3"]
    settings = [msgspec.convert(each.values(), Settings) for each in agents]
    assert [each.devices for each in settings] == ["0", "1", "2,3"]
    # Agents with one device leave out the model on two; later models of the registry are served.
    assert [each.models for each in settings] == [()] * 3
    served = [servable_entries(each, ModelRegistry.load(registry)) for each in settings]
    assert [len(each) for each in served] == [2, 2, 3]
    assert settings[2].engine.vllm.warm_bytes > 120 * GIB  # it may swap to a small model


async def test_each_process_has_the_variables_of_its_devices(registry: Path):
    agents = await agents_on(FOUR, options(registry))
    spec = MeshSpec(
        broker="amqp://b/",
        registry=registry,
        log_dir=registry.parent / "log",
        gateway_port=8123,
        agents=agents,
    )
    process = ProcessMesh(spec).processes["agent-agent-2"]
    await process.start()
    try:
        variables = Path(f"/proc/{process.pid}/environ").read_text().split("\0")
    finally:
        process.signal(signal.SIGKILL)
        await process.wait()
    assert {"CUDA_VISIBLE_DEVICES=2,3", "CUDA_DEVICE_ORDER=PCI_BUS_ID"} <= {*variables}


async def test_a_model_that_does_not_fit_is_named_with_what_it_lacks(registry: Path):
    small = tuple(msgspec.structs.replace(each, memory_bytes=64 * GIB) for each in FOUR)
    with pytest.raises(SettingsError) as refused:
        await agents_on(small, options(registry))
    assert str(refused.value) == (
        "model tiny-llama-b needs 132.0 GiB of device memory (132.0 GiB for weights, which are "
        "their files x 1.1, and 0.0 GiB for the KV of one full context), and GPU 0 and GPU 1 give "
        "117.8 GiB (0.92 of 128.0 GiB): 14.2 GiB too little. Lower its max_model_len, or raise "
        "tensor_parallel_size or gpu_memory_utilization in its engine_args"
    )


async def test_a_model_on_too_few_devices_is_refused(registry: Path):
    with pytest.raises(SettingsError, match="needs 2 adjacent devices of one kind"):
        await agents_on(FOUR, options(registry, devices="3"))


async def test_devices_and_agents_can_be_chosen(registry: Path):
    chosen = await agents_on(FOUR, options(registry, devices="GPU-1,2,3", agents=2))
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in chosen] == ["GPU-1,GPU-2", "3"]
    with pytest.raises(SettingsError, match="can have 1 to 3"):
        await agents_on(FOUR, options(registry, agents=4))


async def test_a_model_without_a_device_of_its_own_is_named_as_a_swap(registry: Path):
    (agent,) = await agents_on(FOUR, options(registry, devices="0,1"))
    assert agent.place == (
        "GPU 0 and GPU 1, 2 x H200, tiny-llama-b; swaps to tiny-llama, tiny-qwen"
    )


async def test_an_agent_with_little_memory_names_the_models_that_fit(registry: Path):
    found = ModelRegistry.load(registry)
    large = msgspec.structs.replace(found.entry(ModelName("tiny-qwen")), weight_bytes=60 * GIB)
    write_registry(registry, (found.entry(ModelName("tiny-llama")), large))
    small = msgspec.structs.replace(FOUR[0], kind="L4", memory_bytes=24 * GIB)
    agents = await agents_on((small, FOUR[1]), options(registry))
    assert [each.place for each in agents] == ["GPU 0, L4, tiny-llama", "GPU 1, H200, tiny-qwen"]
    assert [each.settings.get("models") for each in agents] == [["tiny-llama"], None]


async def test_a_preset_variable_limits_the_devices(
    registry: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2,3")
    agents = await agents_on(FOUR, options(registry))
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in agents] == ["1,2", "3"]


async def test_without_devices_there_are_as_many_agents_as_before(registry: Path):
    agents = await agents_on((), options(registry))
    assert [(each.place, each.environment) for each in agents] == [("", {}), ("", {})]


def test_engines_that_use_no_devices_refuse_them():
    with pytest.raises(SettingsError, match="--devices needs engines that use GPUs"):
        engine_devices("simulated", "0", {}, lambda: FOUR)
    with pytest.raises(SettingsError, match="--devices 0: this process sees no NVIDIA GPU"):
        engine_devices("vllm", "0", {}, tuple)
    assert engine_devices("simulated", None, {}, lambda: FOUR) == ()
    assert engine_devices("added", None, {}, lambda: FOUR) == ()


async def test_vllm_for_cpus_uses_no_devices(registry: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CPU_BUILD, lambda: True)
    assert [each.place for each in await agents_on(FOUR, options(registry))] == ["", ""]
    monkeypatch.setenv(VLLM_PYTHON, "/other/python")  # may have the build for GPUs
    assert len(await agents_on(FOUR, options(registry))) == 3
