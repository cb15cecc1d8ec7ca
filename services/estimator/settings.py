"""Settings of the estimator."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.runtime.settings import ServiceSettings
from solver.prediction.alarms import AlarmOptions


class AlarmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When an instance is slow: times as slow as its peers, on the same model and device."""

    period_s: Annotated[float, Meta(gt=0)] = 1.0
    """Instances are judged so often."""
    raise_above: Annotated[float, Meta(gt=1)] = 1.5
    clear_below: Annotated[float, Meta(gt=1)] = 1.2
    """Less than `raise_above`; in between, nothing changes."""
    patience: Annotated[int, Meta(ge=1)] = 5
    """Judgements in a row that it takes, either way."""

    def __post_init__(self) -> None:
        self.options  # noqa: B018 - refused here is refused at the start

    @property
    def options(self) -> AlarmOptions:
        """The same for the solver."""
        return AlarmOptions(
            raise_above=self.raise_above, clear_below=self.clear_below, patience=self.patience
        )


class TreesSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quantile trees of prefill times, in `profile_dir`."""

    reload_period_s: Annotated[float, Meta(gt=0)] = 1.0
    """Files are looked for so often."""
    refresh_period_s: Annotated[float, Meta(gt=0)] = 30.0
    """All trees are published so often, for routers that have just come."""
    max_samples: Annotated[int, Meta(ge=500)] = 20_000
    """Of each model, engine and device, the latest, to fit by; up to twice as many are on disk."""
    fit_period_s: Annotated[float, Meta(gt=0)] | None = None
    """The estimator has trees fitted so often, in a process beside it, if there are new samples;
    none: `headway-estimator fit` is somebody else's to run."""


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
    """Applications told apart per model; the one that did not come for longest is forgotten."""
    pooled_requests: Annotated[float, Meta(gt=0)] = 10.0
    """An application's lengths are drawn to those of all as if these were so many requests of its
    own, and those of all to a prior."""
    alarms: AlarmSettings = AlarmSettings()
    trees: TreesSettings = TreesSettings()
    profile_dir: str | None = None
    """Where profiles are kept over restarts, samples of prefill times, and trees; none: profiles
    are learnt anew, samples are dropped, and there are no trees."""

    @property
    def samples_directory(self) -> Path | None:
        """Of `services.estimator.sample_files`."""
        return Path(self.profile_dir) / "samples" if self.profile_dir else None

    @property
    def trees_directory(self) -> Path | None:
        """Of `services.estimator.artefacts`."""
        return Path(self.profile_dir) / "trees" if self.profile_dir else None
