"""Checks whether an engine supports an operation."""

from services.agent.backends.base import Capability, EngineBackend
from services.agent.lso.results import LsoRefusedError


def require(engine: EngineBackend, capability: Capability, what: str) -> None:
    """
    Check that *engine* has the capability that the operation *what* needs.

    Raises:
        LsoRefusedError: The engine does not have the capability.
    """
    if capability not in engine.identity.capabilities:
        raise LsoRefusedError(
            f"the engine {engine.identity.engine} on {engine.identity.device} cannot {what}: "
            f"it lacks the capability {capability.value}"
        )
