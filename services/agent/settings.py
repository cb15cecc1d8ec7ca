"""Settings of the agent."""

from typing import Annotated

import msgspec
from msgspec import Meta

from services.agent.backends.settings import EngineSettings
from shared.runtime.settings import ServiceSettings
from solver.scheduling.pull_room import DEFAULT_BOUNDS, PullBounds


class PullSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much is taken, and when."""

    window: Annotated[int, Meta(ge=1)] = DEFAULT_BOUNDS.window
    """Requests pulled and without a first token, at most."""
    best_effort_window: Annotated[int, Meta(ge=0)] = DEFAULT_BOUNDS.best_effort_window
    """Of these, best-effort and relegated ones."""
    max_backlog_s: Annotated[float, Meta(gt=0)] = DEFAULT_BOUNDS.max_backlog_s
    """Predicted work of these, at most; one request is always allowed."""
    backlog_level: Annotated[float, Meta(gt=0, lt=1)] = DEFAULT_BOUNDS.backlog_level
    """Of the quantile of that work which is bounded; 0.5 is its mean."""
    best_effort_running_share: Annotated[float, Meta(gt=0, le=1)] = 0.75
    """Running slots that best-effort work may fill; the rest is kept for urgent arrivals."""
    poll_s: Annotated[float, Meta(gt=0)] = 1.0
    """An empty queue is asked again so often without being told to."""
    workers: Annotated[int, Meta(ge=1, le=16)] = 3
    """Pulls under way at once."""
    evict_hold_s: Annotated[float, Meta(ge=0)] = 2.0
    """What was evicted here is not taken back here for so long."""
    aging_bound_s: Annotated[float, Meta(gt=0)] = 600.0
    """Age at which relegated and best-effort work competes with the rest."""

    @property
    def bounds(self) -> PullBounds:
        """What `solver.scheduling.pull_room` decides by."""
        return PullBounds(
            window=self.window,
            best_effort_window=self.best_effort_window,
            max_backlog_s=self.max_backlog_s,
            backlog_level=self.backlog_level,
        )


class LsoSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What LLM serving operations may take and cost."""

    swap_lease_s: Annotated[float, Meta(gt=0)] = 30.0
    """A swapped-out request that has not run again for so long is evicted."""
    transfer_bytes_per_s: Annotated[float, Meta(gt=0)] = float(4 << 30)
    """Of KV from host memory to the engine, until it was measured."""


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the agent can be told."""

    instance_id: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
    """Name of this serving instance, unique in the mesh."""
    engine: EngineSettings = EngineSettings()
    """`engine.backend` names the backend; unknown names fail start-up."""
    models: tuple[str, ...] = ()
    """Base models it may serve; empty: all of the registry."""
    initial_model: str | None = None
    """Activated at start, before any plan."""
    pull: PullSettings = PullSettings()
    lso: LsoSettings = LsoSettings()
    flush_period_s: Annotated[float, Meta(gt=0, le=1)] = 0.04
    """Tokens are gathered for so long per reply destination; first tokens go at once."""
    status_period_s: Annotated[float, Meta(gt=0)] = 1.0
    swap_drain_s: Annotated[float, Meta(ge=0)] = 10.0
    """
    Before a model swap, running requests may finish for so long; less where evicting them is
    predicted to be cheaper.
    """
    orphan_patience_s: Annotated[float, Meta(gt=0)] = 10.0
    """
    Without a plan and without work for so long, the agent looks for work of other models by itself.
    """
