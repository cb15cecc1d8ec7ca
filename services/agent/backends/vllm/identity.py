"""What the vLLM backend is, before and after its host has started."""

from services.agent.backends.base import Capability, EngineIdentity
from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.arguments import has_checkpoints, safepoint_layers
from services.agent.backends.vllm.wire import HostReady

_CAPABILITIES = frozenset(
    {
        Capability.MODEL_SWAP,
        Capability.WARM_START,
        Capability.SCHEDULING,
        Capability.TELEMETRY,
    }
)


def identity_of(settings: VllmSettings, host: HostReady | None) -> EngineIdentity:
    """Version and device are known once there is a *host*; until then a CPU is supposed."""
    capabilities = _CAPABILITIES
    is_cpu = host is None or host.is_cpu
    if has_checkpoints(settings, is_cpu=is_cpu):
        capabilities |= {Capability.CHECKPOINT}
    if safepoint_layers(settings, is_cpu=is_cpu):
        capabilities |= {Capability.LAYER_PREEMPTION}
    if host is None:
        return EngineIdentity(engine="vllm", device="unknown", capabilities=capabilities)
    version = host.version.partition("+")[0]  # without the build
    return EngineIdentity(engine=f"vllm-{version}", device=host.device, capabilities=capabilities)
