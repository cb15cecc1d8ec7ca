"""Settings of the estimator."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from services.estimator.stories.shelf import ShelfSettings
from shared.contracts.base import NonEmpty
from shared.runtime.settings import ServiceSettings
from solver.prediction.alarms.alarm import AlarmOptions


class AlarmSettings(AlarmOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    Thresholds above which an instance counts as slow, as multiples of its peers' iteration times.
    """

    period_s: Annotated[float, Meta(gt=0)] = 1.0
    """Period of comparing instances with their peers."""


class TreesSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of quantile trees of prefill times, which are stored in `profile_dir`."""

    reload_period_s: Annotated[float, Meta(gt=0)] = 1.0
    """Period of checking `profile_dir` for new files of trees."""
    refresh_period_s: Annotated[float, Meta(gt=0)] = 30.0
    """Period of publishing all trees again, for new routers."""
    max_samples: Annotated[int, Meta(ge=500)] = 20_000
    """Number of samples kept per model, engine and device; up to twice as many are on disk."""
    fit_period_s: Annotated[float, Meta(gt=0)] | None = None
    """
    Period of fitting trees in a separate process when there are new samples. None: an operator runs
    `headway-estimator fit`.
    """


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the estimator."""

    publish_period_s: Annotated[float, Meta(gt=0)] = 1.0
    """Period of publishing the profiles that have changed."""
    refresh_period_s: Annotated[float, Meta(gt=0)] = 5.0
    """Period of publishing all profiles again, for new services."""
    iteration_memory: Annotated[float, Meta(ge=50)] = 2000.0
    """
    Number of later iterations after which an iteration has weight 1/e in the latency model. After
    twice as many later iterations, an iteration is dropped.
    """
    request_memory: Annotated[float, Meta(ge=10)] = 500.0
    """
    Number of later requests after which a request has weight 1/e in answer lengths and prefill
    times.
    """
    max_applications: Annotated[int, Meta(ge=1)] = 1000
    """Maximum number of applications per model; the application seen least recently is dropped."""
    pooled_requests: Annotated[float, Meta(gt=0)] = 10.0
    """
    Weight, in requests, of the prior that an estimate of answer lengths starts from.

    The estimate for one application starts from the lengths of all applications; the estimate for
    all applications starts from a fixed prior.
    """
    alarms: AlarmSettings = AlarmSettings()
    trees: TreesSettings = TreesSettings()
    profile_dir: NonEmpty | None = None
    """
    Directory of profiles, samples of prefill times and trees, kept across restarts. None: profiles
    are learnt again after a restart, samples are dropped, and there are no trees.
    """
    usage_dir: NonEmpty | None = None
    """
    Directory of the usage of tenants. Of several estimators, one at a time counts, which all must
    have the same directory. None: usage is counted in memory, until the process ends.
    """
    usage_days: Annotated[int, Meta(ge=1)] = 400
    """
    Number of days for which usage is kept. It is in memory as one row per hour, tenant, model and
    class with requests.
    """
    kept_stories: ShelfSettings = ShelfSettings()
    """Bounds of the records of finished requests, which are kept in memory if `stories` is true."""

    @property
    def samples_directory(self) -> Path | None:
        """Directory with the layout of `services.estimator.trees.sample_files`."""
        return Path(self.profile_dir) / "samples" if self.profile_dir else None

    @property
    def trees_directory(self) -> Path | None:
        """Directory with the layout of `services.estimator.trees.artefacts`."""
        return Path(self.profile_dir) / "trees" if self.profile_dir else None
