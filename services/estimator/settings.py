"""Settings of the estimator."""

from typing import Annotated

from msgspec import Meta

from shared.runtime.settings import ServiceSettings


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the estimator can be told."""

    publish_period_s: Annotated[float, Meta(gt=0)] = 1.0
    """Profiles that changed are published so often."""
    refresh_period_s: Annotated[float, Meta(gt=0)] = 5.0
    """All profiles are published so often, for services that have just come."""
    iteration_memory: Annotated[float, Meta(ge=50)] = 2000.0
    """Iterations after which an old one weighs 1/e in the latency model, 1/e² at last."""
    request_memory: Annotated[float, Meta(ge=10)] = 500.0
    """Requests after which an old one weighs 1/e in lengths and prefill times."""
    max_applications: Annotated[int, Meta(ge=1)] = 1000
    """Applications told apart per model; further ones count as `*` only."""
    profile_dir: str | None = None
    """Where profiles are kept over restarts; none: learnt anew."""
