"""Location of models' weights for one instance: active, in host memory, or in storage."""

from collections.abc import Mapping, Sequence

from ops.sim.mesh.kinds import ModelKind
from shared.contracts.base import ModelName, Seconds, UnixTime
from shared.contracts.telemetry import Residency
from solver.planning.lso.situation import WarmSet


class HostWeights:
    """
    Models that one instance has in host memory.

    The active model has no copy in host memory. When another model replaces it, its weights are
    parked in host memory if they fit.

    Args:
        models: Models that the instance can serve; the first that fit are warm at the start.
        budget_bytes: Host memory for weights.
        swap_scale: Factor of all times.
    """

    def __init__(
        self, models: Mapping[ModelName, ModelKind], *, budget_bytes: int, swap_scale: float
    ) -> None:
        self._models = models
        self._budget_bytes = budget_bytes
        self._scale = swap_scale
        self._warm_at: dict[ModelName, UnixTime] = {}
        for model in models:
            self.park(model, 0.0)

    @property
    def models(self) -> Sequence[ModelName]:
        """Models that the instance can serve."""
        return tuple(self._models)

    def activate_s(self, model: ModelName, now: UnixTime) -> Seconds:
        """Time to activate *model*, beginning at the time *now*."""
        kind = self._models[model]
        cold_s, warm_s = self._scale * kind.cold_s, self._scale * kind.warm_s
        warm_at = self._warm_at.get(model)
        return cold_s if warm_at is None else min(cold_s, warm_s + max(0.0, warm_at - now))

    def return_s(self, model: ModelName | None) -> Seconds:
        """Time to activate the currently active *model* again after another model replaced it."""
        if model is None:
            return 0.0
        kind = self._models[model]
        fits = self._used_bytes() + kind.weight_bytes <= self._budget_bytes
        return self._scale * (kind.warm_s if fits else kind.cold_s)

    def activated(self, model: ModelName) -> None:
        """Record that *model* is active on the device; free its host memory."""
        self._warm_at.pop(model, None)

    def park(self, model: ModelName, now: UnixTime) -> None:
        """Remove *model* from the device; its weights remain in host memory if they fit."""
        if self._used_bytes() + self._models[model].weight_bytes <= self._budget_bytes:
            self._warm_at[model] = now

    def warm(self, model: ModelName, now: UnixTime) -> None:
        """Load *model* from storage into host memory."""
        kind = self._models[model]
        self._warm_at[model] = now + self._scale * max(0.0, kind.cold_s - kind.warm_s)

    def cool(self, model: ModelName) -> None:
        """Drop the copy of *model* in host memory."""
        self._warm_at.pop(model, None)

    def warm_set(self, active: ModelName | None) -> WarmSet:
        """Residency of the models, as input of selecting LSOs."""
        residency = {
            model: Residency.ACTIVE
            if model == active
            else (Residency.WARM if model in self._warm_at else Residency.COLD)
            for model in self._models
        }
        return WarmSet(
            residency=residency,
            num_bytes={model: kind.weight_bytes for model, kind in self._models.items()},
            budget_bytes=self._budget_bytes,
        )

    def _used_bytes(self) -> int:
        return sum(self._models[model].weight_bytes for model in self._warm_at)
