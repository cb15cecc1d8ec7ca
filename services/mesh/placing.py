"""Places the models of a mesh on the GPUs of this machine: one agent for each group of devices."""

from collections.abc import Mapping, Sequence

from services.agent.backends.vllm.front.parallel import num_devices, num_ranks
from services.agent.devices.found import (
    Device,
    Provider,
    cuda_variables,
    named_devices,
    names_of,
    visible_devices,
)
from services.agent.devices.warm_memory import HOST_SHARE
from services.mesh.spec import AgentSpec
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry
from shared.models.files.sizes import kv_bytes_per_token, weight_bytes
from solver.planning.placement.problem import DevicePlace, Fleet, ModelNeed
from solver.planning.placement.program import AgentPlace, Placement, place

VLLM = "vllm"
DEVICE_SHARE = 0.92
"""vLLM's default of `gpu_memory_utilization`."""


def engine_devices(
    backend: str, chosen: str | None, environ: Mapping[str, str], provider: Provider
) -> tuple[Device, ...]:
    """
    The devices for the engines of `up`; none if they run on the CPU.

    Args:
        backend: Backend of the engines.
        chosen: Value of `--devices`.
        environ: The environment of the process.
        provider: Returns the devices of this machine.

    Raises:
        SettingsError: A device that is asked for is not visible, or the engines use no devices.
    """
    if backend == "simulated" and chosen is not None:
        raise SettingsError("--devices needs engines that use GPUs, for example --engine vllm")
    if chosen is None and backend != VLLM:
        return ()
    visible = visible_devices(provider, environ)
    if chosen is None:
        return visible
    if not visible:
        raise SettingsError(
            f"--devices {chosen}: this process sees no NVIDIA GPU (nvidia-smi lists them, "
            "CUDA_VISIBLE_DEVICES restricts them); without --devices, engines run on the CPU"
        )
    return named_devices(chosen, visible, source="--devices")


def placed_agents(
    entries: Sequence[ModelEntry],
    devices: Sequence[Device],
    *,
    backend: str,
    num_agents: int | None,
    host_bytes: int,
) -> list[AgentSpec]:
    """
    Agents for *entries* on *devices*.

    Args:
        num_agents: Value of `--agents`; None: as many as use most devices.
        host_bytes: Host memory that is available.

    Raises:
        SettingsError: A model fits no devices, or there are more agents than devices; the message
            has the sizes.
    """
    fleet = Fleet(
        # CUDA shows one MIG instance to a process: it forms no group with others.
        devices=tuple(
            DevicePlace(
                name=each.label,
                kind=each.uuid if each.is_part else each.kind,
                memory_bytes=each.memory_bytes,
            )
            for each in devices
        ),
        models=tuple(map(_need, entries)),
        host_bytes=int(host_bytes * HOST_SHARE),
        num_agents=num_agents,
    )
    placement = place(fleet)
    if placement.misfits:
        raise SettingsError("; ".join(placement.misfits))
    return [
        _agent(number, agent, [devices[at] for at in agent.devices], placement, backend)
        for number, agent in enumerate(placement.agents)
    ]


def _need(entry: ModelEntry) -> ModelNeed:
    ranks = num_ranks(entry)
    return ModelNeed(
        name=entry.name,
        num_devices=num_devices(entry),
        weight_bytes=ranks * weight_bytes(entry),
        context_bytes=ranks * kv_bytes_per_token(entry) * entry.max_model_len,
        memory_share=float(entry.engine_args.get("gpu_memory_utilization", DEVICE_SHARE)),
    )


def _agent(
    number: int,
    agent: AgentPlace,
    devices: Sequence[Device],
    placement: Placement,
    backend: str,
) -> AgentSpec:
    settings: dict[str, object] = {
        "initial_model": agent.first,
        "devices": names_of(devices),
    }
    # An agent leaves out by itself what needs more devices, also of models that are added later.
    if agent.models != agent.wide_enough:
        settings["models"] = list(agent.models)
    if agent.warm and backend == VLLM:
        settings["engine"] = {VLLM: {"warm_bytes": agent.warm_bytes}}
    return AgentSpec(
        instance_id=f"agent-{number}",
        engine=backend,
        settings=settings,
        environment=cuda_variables(devices),
        place=_line(agent, devices, placement),
    )


def _line(agent: AgentPlace, devices: Sequence[Device], placement: Placement) -> str:
    """For example `GPU 2, H200, tiny-qwen`."""
    kind = devices[0].kind if len(devices) == 1 else f"{len(devices)} x {devices[0].kind}"
    begun = {each.first for each in placement.agents}
    others = [
        model if model in agent.warm else f"{model} (from storage)"
        for model in agent.models
        if model not in begun
    ]
    swaps = f"; swaps to {', '.join(others)}" if others else ""
    return f"{' and '.join(each.label for each in devices)}, {kind}, {agent.first}{swaps}"
