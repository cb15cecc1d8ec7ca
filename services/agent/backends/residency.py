"""Residency of models: the location of each model, its memory, and the cost of activating it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.contracts.base import ModelName, Seconds
from shared.contracts.telemetry import ActivationPath, ModelState, Residency

_EXCESS_DECAY = 0.1
"""
Share by which a path's measured time approaches its prior time each time the instance takes another
path.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Host memory that a model needs, and the shape of its engine."""

    weight_bytes: int
    engine_bytes: int
    """Host memory of the model's engine while it is parked."""
    shape: str = ""
    """
    Shape of the model's engine. Engines of equal shape differ only in weights; an empty shape
    equals none.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """The path by which a model is about to become active."""

    model: ModelName
    path: ActivationPath
    donor: ModelName | None = None
    """Model whose engine loads the new weights; only set for the path `RELOAD`."""
    drop: tuple[ModelName, ...] = ()
    """Models that must be removed from host memory before the activation."""


class ResidencyTable:
    """
    The active model, the warm models within a host memory budget (QLM §5), and the cold models.

    A warm model has its own parked engine, or only its weights in host memory.

    Differs: QLM keeps weights in host memory, but no engines. A parked engine takes more host
    memory, and its activation moves no weights.

    Args:
        footprints: One per known model.
        warm_bytes: Host memory for parked engines and held weights.
        prior_s: Activation time of each path until it is measured.
    """

    def __init__(
        self,
        footprints: Mapping[ModelName, Footprint],
        *,
        warm_bytes: int,
        prior_s: Mapping[ActivationPath, Seconds],
    ) -> None:
        self._footprints = dict(footprints)
        self._engine_bytes = {name: each.engine_bytes for name, each in footprints.items()}
        self.warm_bytes = warm_bytes
        """Budget of host memory for warm models."""
        self._prior_s = dict(prior_s)
        self._measured_s: dict[tuple[ModelName | None, ActivationPath], Seconds] = {}
        """
        (model, path) -> duration of the model's last activation by that path; (None, path) ->
        duration of the last activation of any model by that path.
        """
        self._engines: dict[ModelName, None] = {}
        self._held: dict[ModelName, None] = {}
        self.active: ModelName | None = None
        """The active model of the instance; only this class writes this field."""
        self.is_activating = False
        """True while the active model changes; the owner of this table writes the field."""

    def add(self, model: ModelName, footprint: Footprint) -> None:
        """Add a cold model."""
        self._footprints[model] = footprint
        self._engine_bytes[model] = footprint.engine_bytes

    def replace(self, model: ModelName, footprint: Footprint) -> None:
        """Replace the memory and the shape of a known model, whose residency does not change."""
        self._footprints[model] = footprint

    def remove(self, model: ModelName) -> None:
        """Forget *model*, which has neither an engine nor held weights any more."""
        self.drop((model,))
        del self._footprints[model], self._engine_bytes[model]
        for path in ActivationPath:
            self._measured_s.pop((model, path), None)

    @property
    def used_bytes(self) -> int:
        """Host memory of all warm models."""
        return self._bytes(self._parked(), self._held_warm())

    def residency(self, model: ModelName) -> Residency:
        """Current residency of *model*."""
        if model == self.active:
            return Residency.ACTIVE
        warm = model in self._engines or model in self._held
        return Residency.WARM if warm else Residency.COLD

    def path(self, model: ModelName) -> ActivationPath | None:
        """
        Cheapest path to activate *model* from its current residency; None if *model* is active.
        """
        if model == self.active:
            return None
        if model in self._engines:
            return ActivationPath.PARKED
        ways = [ActivationPath.START if model in self._held else ActivationPath.COLD]
        if self.donor(model) is not None:
            ways.append(ActivationPath.RELOAD)
        return min(ways, key=lambda way: self._expected_s(model, way))

    def donor(self, model: ModelName) -> ModelName | None:
        """
        The model of equal shape that was active least recently; None if there is none.

        The engine of this donor can load the weights of *model*.
        """
        shape = self._footprints[model].shape
        if not shape:
            return None
        return next((name for name in self._engines if self._footprints[name].shape == shape), None)

    def activation(self, model: ModelName) -> Activation | None:
        """The path to activate *model*, and the models to drop first; None if *model* is active."""
        path = self.path(model)
        if path is None:
            return None
        donor = self.donor(model) if path is ActivationPath.RELOAD else None
        parked = [name for name in self._engines if name not in (model, donor)]
        held = [name for name in self._held if name != model]
        drop: list[ModelName] = []
        while (parked or held) and self._bytes(parked, held) > self.warm_bytes:
            drop.append((parked or held).pop(0))
        return Activation(model=model, path=path, donor=donor, drop=tuple(drop))

    def room_for_engine(self, model: ModelName) -> bool:
        """
        True if a parked engine of *model* fits into host memory in addition to all warm models.
        """
        return self._bytes([*self._parked(), model], self._held_warm()) <= self.warm_bytes

    def room_for_weights(self, model: ModelName) -> bool:
        """True if the weights of *model* fit into host memory in addition to all warm models."""
        return self._bytes(self._parked(), [*self._held_warm(), model]) <= self.warm_bytes

    def parked(self, model: ModelName) -> None:
        """Record that *model* has a parked engine."""
        self._engines = {model: None, **self._engines}

    def held(self, model: ModelName) -> None:
        """Record that the weights of *model* are in host memory."""
        self._held[model] = None

    def measured(self, model: ModelName, engine_bytes: int) -> None:
        """Record the measured host memory of *model*'s engine."""
        self._engine_bytes[model] = engine_bytes

    def drop(self, models: Iterable[ModelName]) -> None:
        """
        Record that *models* are cold: neither their engines nor their weights are in host memory.
        """
        for model in models:
            self._engines.pop(model, None)
            self._held.pop(model, None)
            if model == self.active:
                self.active = None

    def lose(self, model: ModelName) -> None:
        """Record that *model* has no engine now, neither active nor parked."""
        self._engines.pop(model, None)
        if model == self.active:
            self.active = None

    def clear(self) -> None:
        """Record that all engines died. Held weights and measured times remain."""
        self._engines.clear()
        self.active = None

    def activated(self, activation: Activation, duration_s: Seconds) -> None:
        """Record that *activation* was carried out."""
        model = activation.model
        self.drop(activation.drop)
        for name in (model, activation.donor):
            if name is not None:
                self._engines.pop(name, None)
        self._engines[model] = None
        self.active = model
        self._measured_s[model, activation.path] = duration_s
        self._measured_s[None, activation.path] = duration_s
        for path in self._prior_s:
            if path is not activation.path:
                self._decay_excess(model, path)

    def activate_s(self, model: ModelName) -> Seconds:
        """Expected time to activate *model* from its current residency."""
        path = self.path(model)
        return 0.0 if path is None else self._expected_s(model, path)

    def states(self) -> tuple[ModelState, ...]:
        """Residency and activation time of every model, for status messages."""
        return tuple(
            ModelState(
                model=model,
                residency=self.residency(model),
                activate_s=self.activate_s(model),
                path=self.path(model),
                warm_bytes=self._warm_bytes_of(model),
            )
            for model in self._footprints
        )

    def _warm_bytes_of(self, model: ModelName) -> int:
        if model in self._held or (model not in self._engines and self.donor(model) is not None):
            return self._footprints[model].weight_bytes
        return self._engine_bytes[model]

    def _parked(self) -> list[ModelName]:
        return [name for name in self._engines if name != self.active]

    def _held_warm(self) -> list[ModelName]:
        """Models with held weights, except the active model, whose weights are not counted."""
        return [name for name in self._held if name != self.active]

    def _bytes(self, parked: Iterable[ModelName], held: Iterable[ModelName]) -> int:
        parked = set(parked)
        engines = sum(self._engine_bytes[name] for name in parked)
        return engines + sum(self._footprints[name].weight_bytes for name in {*held} - parked)

    def _decay_excess(self, model: ModelName, path: ActivationPath) -> None:
        """
        Move the measured times of a path that was not taken toward the prior, if they exceed it.

        A single long time may be an outlier, and no new measurement would correct it.
        """
        prior_s = self._prior_s[path]
        for key in ((model, path), (None, path)):
            if (measured_s := self._measured_s.get(key, 0.0)) > prior_s:
                self._measured_s[key] = measured_s + _EXCESS_DECAY * (prior_s - measured_s)

    def _expected_s(self, model: ModelName, path: ActivationPath) -> Seconds:
        usual_s = self._measured_s.get((None, path), self._prior_s[path])
        return self._measured_s.get((model, path), usual_s)
