"""Settings of the agent."""

from typing import Annotated

import msgspec
from msgspec import Meta

from services.agent.backends.settings import EngineSettings
from shared.contracts.base import NonEmpty
from shared.runtime.settings import ServiceSettings
from solver.scheduling.pull_room import DEFAULT_BOUNDS, PullBounds


class PullSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds and periods of pulling requests from queues."""

    window: Annotated[int, Meta(ge=1)] = DEFAULT_BOUNDS.window
    """Maximum number of pulled requests that have no first token yet."""
    best_effort_window: Annotated[int, Meta(ge=0)] = DEFAULT_BOUNDS.best_effort_window
    """Maximum number of best-effort and relegated requests in the window."""
    max_backlog_s: Annotated[float, Meta(gt=0)] = DEFAULT_BOUNDS.max_backlog_s
    """
    Maximum predicted work of the pulled requests, in seconds; one request is allowed in any case.
    """
    backlog_level: Annotated[float, Meta(gt=0, lt=1)] = DEFAULT_BOUNDS.backlog_level
    """Quantile level at which `max_backlog_s` bounds predicted work; 0.5 selects the mean."""
    best_effort_running_share: Annotated[float, Meta(gt=0, le=1)] = 0.75
    """
    Share of the engine's running slots that best-effort and relegated work may fill while regular
    requests run; without regular requests, it may fill all slots.
    """
    poll_s: Annotated[float, Meta(gt=0)] = 1.0
    """
    Time until an empty queue is polled again if no notice arrives; it doubles with each poll, up to
    5 s.
    """
    workers: Annotated[int, Meta(ge=1, le=16)] = 3
    """Number of pulls that run concurrently; one for each attached server, which take turns."""
    evict_hold_s: Annotated[float, Meta(ge=0)] = 2.0
    """Time after an eviction in which this instance does not pull the request again."""
    aging_bound_s: Annotated[float, Meta(gt=0)] = 600.0
    """Age at which relegated and best-effort work competes with other work."""

    @property
    def bounds(self) -> PullBounds:
        """Convert the bounds to the input of `solver.scheduling.pull_room`."""
        return PullBounds(
            window=self.window,
            best_effort_window=self.best_effort_window,
            max_backlog_s=self.max_backlog_s,
            backlog_level=self.backlog_level,
        )


class LsoSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits and cost priors of LLM serving operations."""

    swap_lease_s: Annotated[float, Meta(gt=0)] = 30.0
    """Time after which a swapped-out request that has not run again is evicted."""
    transfer_bytes_per_s: Annotated[float, Meta(gt=0)] = float(4 << 30)
    """Assumed rate of KV transfers from host memory to the engine, until it is measured."""


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the agent."""

    instance_id: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
    """Name of this serving instance, unique in the mesh."""
    engine: EngineSettings = EngineSettings()
    """Selection and settings of the engine backend; an unknown name fails at start-up."""
    devices: str = ""
    """
    GPUs of the agent, which other agents of the machine then cannot take: numbers of `nvidia-smi`
    or UUIDs with commas, as in CUDA_VISIBLE_DEVICES. Empty: all that the agent sees, also if
    others use them.
    """
    models: tuple[str, ...] = ()
    """
    Base models that this instance may serve; empty means all models of the registry, or all that
    need no more `devices` than it has.
    """
    initial_model: str | None = None
    """Model that the agent activates at start, before the first plan."""
    warm_models: tuple[str, ...] = ()
    """
    Models that the agent loads into host memory at the start, while it serves `initial_model`, so
    that the first swap to each of them is a warm start. The agent is ready when they are loaded.
    """
    pull: PullSettings = PullSettings()
    lso: LsoSettings = LsoSettings()
    flush_period_s: Annotated[float, Meta(gt=0, le=1)] = 0.04
    """
    Time for which tokens are batched per reply destination; first tokens are sent immediately.
    """
    status_period_s: Annotated[float, Meta(gt=0)] = 1.0
    swap_drain_s: Annotated[float, Meta(ge=0)] = 10.0
    """
    Maximum time for running requests to finish before a model swap; the time is shorter if evicting
    the requests is predicted to be cheaper.
    """
    consumer_timeout_s: Annotated[float, Meta(ge=1)] = 1800.0
    """
    Time after which the broker takes back a request that is not acknowledged: RabbitMQ's setting
    `consumer_timeout`, whose default is 30 minutes. The agent publishes requests that it holds for
    longer again, with their progress, after a quarter to a half of this time.
    """
    record: NonEmpty | None = None
    """
    File to which the agent appends every event of its instance, from which its decisions can be
    repeated. The file has the prompts and grows without limit.
    """
    orphan_patience_s: Annotated[float, Meta(gt=0)] = 10.0
    """Time without a plan and without work after which the agent looks for work of other models."""
