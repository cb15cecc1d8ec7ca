"""Settings of the estimator."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.runtime.settings import ServiceSettings
from solver.prediction.alarms.alarm import AlarmOptions


class AlarmSettings(AlarmOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    Thresholds of slow instances, as multiples of the times of peers with the same model and device.
    """

    period_s: Annotated[float, Meta(gt=0)] = 1.0
    """Period of evaluating instances."""


class TreesSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quantile trees of prefill times, in `profile_dir`."""

    reload_period_s: Annotated[float, Meta(gt=0)] = 1.0
    """Period of looking for new files."""
    refresh_period_s: Annotated[float, Meta(gt=0)] = 30.0
    """Period of publishing all trees, for new routers."""
    max_samples: Annotated[int, Meta(ge=500)] = 20_000
    """Samples kept per model, engine and device for fits; up to twice as many are on disk."""
    fit_period_s: Annotated[float, Meta(gt=0)] | None = None
    """
    Period of fitting trees in a separate process, if there are new samples; None: an operator runs
    `headway-estimator fit`.
    """


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the estimator."""

    publish_period_s: Annotated[float, Meta(gt=0)] = 1.0
    """Period of publishing changed profiles."""
    refresh_period_s: Annotated[float, Meta(gt=0)] = 5.0
    """Period of publishing all profiles, for new services."""
    iteration_memory: Annotated[float, Meta(ge=50)] = 2000.0
    """
    Number of later iterations after which an iteration weighs 1/e in the latency model; after twice
    as many it weighs 1/e² and is forgotten.
    """
    request_memory: Annotated[float, Meta(ge=10)] = 500.0
    """Number of later requests after which a request weighs 1/e in lengths and prefill times."""
    max_applications: Annotated[int, Meta(ge=1)] = 1000
    """Maximum number of applications per model; the one that was silent longest is dropped."""
    pooled_requests: Annotated[float, Meta(gt=0)] = 10.0
    """
    Weight, as a number of requests, that the answer lengths of all applications have in the
    estimate for one application, and that a prior has in the estimate for all applications.
    """
    alarms: AlarmSettings = AlarmSettings()
    trees: TreesSettings = TreesSettings()
    profile_dir: str | None = None
    """
    Directory of profiles, samples of prefill times, and trees, kept across restarts. None: profiles
    are learnt again, samples are dropped, and there are no trees.
    """

    @property
    def samples_directory(self) -> Path | None:
        """Directory of `services.estimator.trees.sample_files`."""
        return Path(self.profile_dir) / "samples" if self.profile_dir else None

    @property
    def trees_directory(self) -> Path | None:
        """Directory of `services.estimator.trees.artefacts`."""
        return Path(self.profile_dir) / "trees" if self.profile_dir else None
