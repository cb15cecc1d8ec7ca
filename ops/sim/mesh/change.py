"""A model swap in progress on an instance of the simulated mesh."""

from dataclasses import dataclass

from shared.contracts.base import ModelName, UnixTime


@dataclass(slots=True, kw_only=True)
class ModelChange:
    """A model swap in progress."""

    model: ModelName
    drain_until: UnixTime
    ready_at: UnixTime | None = None
    """Time at which the new model becomes active; None while earlier requests drain."""
