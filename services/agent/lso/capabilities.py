"""What an engine must be able to do, asked for before it is told to."""

from services.agent.backends.base import Capability, EngineBackend
from services.agent.lso.results import LsoRefusedError


def require(engine: EngineBackend, capability: Capability, what: str) -> None:
    """
    Check that *engine* says it can do *what*.

    Raises:
        LsoRefusedError: It does not.
    """
    if capability not in engine.identity.capabilities:
        raise LsoRefusedError(
            f"the engine {engine.identity.engine} on {engine.identity.device} cannot {what}: "
            f"it lacks the capability {capability.value}"
        )
