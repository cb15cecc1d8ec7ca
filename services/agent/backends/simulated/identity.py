"""What the simulated backend is."""

from services.agent.backends.base import Capability, EngineIdentity
from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.safepoints import has_safepoints

_CAPABILITIES = frozenset(
    {
        Capability.MODEL_SWAP,
        Capability.WARM_START,
        Capability.SCHEDULING,
        Capability.TELEMETRY,
    }
)


def identity_of(settings: SimulatedSettings) -> EngineIdentity:
    """With what *settings* switch on."""
    capabilities = _CAPABILITIES
    if settings.host_kv_tokens:
        capabilities |= {Capability.CHECKPOINT}
    if has_safepoints(settings):
        capabilities |= {Capability.LAYER_PREEMPTION}
    return EngineIdentity(engine="simulated", device="simulated", capabilities=capabilities)
