"""Cells of `ops.bench qoserve`: each is one simulation or search."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from ops.bench.qoserve_probe import probed_share, recorded
from ops.bench.store import code_digest
from ops.sim.profiles import load
from ops.sim.pulling import PullOptions
from ops.sim.scenario import Scenario, Wave
from ops.sim.search import highest_rate, least_replicas
from ops.sim.summary import rolling_p99, summarize
from ops.sim.workload import CLASSES, TrafficClass
from shared.contracts.qos import Importance, Slo

CLASS_SETS: dict[str, tuple[TrafficClass, ...]] = {
    "table3": CLASSES,
    "tight": (
        TrafficClass(name="Q1", slo=Slo(ttft_s=3, tbt_s=0.05), share=1 / 3),
        TrafficClass(name="Q2", slo=Slo(ttft_s=6, tbt_s=0.05), share=1 / 3),
        TrafficClass(name="Q3", slo=Slo(ttlt_s=1000), share=1 / 3),
    ),
    "two-tbt": (
        TrafficClass(name="Q1", slo=Slo(ttft_s=6, tbt_s=0.05), share=1 / 2),
        TrafficClass(name="Q2", slo=Slo(ttft_s=6, tbt_s=0.1), share=1 / 2),
    ),
}
"""Sets of request classes: QoServe's table 3, §4.4.2 and §4.5.2."""
WINDOW_S = 60.0
"""Length of the window of the rolling p99 in figure 13 of QoServe."""


_REACH = 4.0
"""Upper limit of the rate in a search for the goodput, as a multiple of the start rate."""


class Cell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of one simulation or search; equal cells of equal code give equal figures."""

    kind: str = "simulate"
    """
    Kind of measurement.

    `simulate`, `goodput` (highest rate with `allowed` violations), `replicas` (fewest) or
    `iterations` (tokens and time of each iteration).
    """
    profile: str = "28"
    policy: str = "qoserve+curve"
    rate_rps: float = 6.0
    """Start rate of a search for the goodput."""
    tolerance: float = 0.01
    """Tolerance of a search for the goodput, as a share of `rate_rps`."""
    hours: float = 4.0
    seed: int = 0
    replicas: int = 1
    classes: str = "table3"
    """Name of the set of request classes, a key of `CLASS_SETS`."""
    shares: tuple[float, ...] | None = None
    """Share of each request class; None: equal shares."""
    only_class: str | None = None
    """The only request class that sends requests; None: all classes send requests."""
    wave: tuple[float, float] | None = None
    low_share: float = 0.0
    lengths: str = "code"
    prefill_only: bool = False
    allowed: float = 0.01
    silo: tuple[tuple[str, str, int], ...] = ()
    dispatch: str = "round-robin"
    """Assignment of requests to replicas: `round-robin` or `pull`."""
    window: int | None = None
    """
    Maximum number of requests in the window of a replica that pulls; None: the agents' default.
    """

    def scenario(self) -> Scenario:
        """The simulated scenario of the cell."""
        return Scenario(
            profile=load(self.profile),
            policy=self.policy,
            pull=self._pull(),
            replicas=self.replicas,
            silo=self.silo,
            rate_rps=self.rate_rps,
            duration_s=3600 * self.hours,
            lengths=self.lengths,
            wave=None if self.wave is None else Wave(low_rps=self.wave[0], high_rps=self.wave[1]),
            classes=self._classes(),
            low_share=self.low_share,
            prefill_only=self.prefill_only,
            seed=self.seed,
        )

    def _pull(self) -> PullOptions | None:
        if self.dispatch != "pull":
            return None
        return PullOptions() if self.window is None else PullOptions().with_window(self.window)

    def _classes(self) -> tuple[TrafficClass, ...]:
        classes = CLASS_SETS[self.classes]
        if self.only_class is not None:
            return tuple(replace(c, share=1.0) for c in classes if c.name == self.only_class)
        if self.shares is None:
            return classes
        total = sum(self.shares)
        return tuple(
            replace(c, share=share / total) for c, share in zip(classes, self.shares, strict=True)
        )


def code_of() -> Callable[[Cell], bytes]:
    """
    Function that returns the digest of the code on which a cell depends; all cells depend on the
    same code.
    """
    code = code_digest([__name__], data=["ops/sim/profiles"])
    return lambda _: code


def measure(cell: Cell) -> dict[str, Any]:
    """Simulate or search; return JSON-able figures, with the total CPU time in `cell_cpu_s`."""
    began = time.process_time()
    figures = _KINDS[cell.kind](cell)
    return figures | {"cell_cpu_s": time.process_time() - began}


def _simulated(cell: Cell) -> dict[str, Any]:
    outcome = cell.scenario().run()
    figures = summarize(outcome)
    if cell.wave is not None:
        important = [r for r in outcome.requests if r.arrival.importance is Importance.HIGH]
        figures["rolling_p99_s"] = rolling_p99(important, window_s=WINDOW_S)
    return figures


def _goodput(cell: Cell) -> dict[str, Any]:
    scenario = cell.scenario()
    shares: dict[float, float] = {}

    def tried(rate_rps: float) -> float:
        share = probed_share(replace(scenario, rate_rps=rate_rps), allowed=cell.allowed)
        shares[rate_rps] = share
        return share

    rate_rps = highest_rate(
        tried,
        allowed=cell.allowed,
        low_rps=0.0,
        high_rps=_REACH * cell.rate_rps,
        tolerance_rps=cell.tolerance * cell.rate_rps,
        start_rps=cell.rate_rps,
    )
    return {"goodput_rps": rate_rps, "tried": sorted(shares.items())}


def _replicas(cell: Cell) -> dict[str, Any]:
    scenario = cell.scenario()
    least = least_replicas(
        lambda count: probed_share(replace(scenario, replicas=count), allowed=cell.allowed),
        allowed=cell.allowed,
        most=16,
    )
    return {"replicas": least}


def _iterations(cell: Cell) -> dict[str, Any]:
    steps = recorded(cell.scenario())
    shares = [0.05, 0.25, 0.5, 0.75, 0.95]
    prefilling = [step for step in steps if step.prefill_tokens]
    return {
        "iterations": len(steps),
        "quantiles": shares,
        "tokens": np.quantile([s.tokens for s in prefilling], shares).tolist(),
        "prefill_tokens": np.quantile([s.prefill_tokens for s in prefilling], shares).tolist(),
        "duration_s": np.quantile([s.duration_s for s in prefilling], shares).tolist(),
    }


_KINDS: dict[str, Callable[[Cell], dict[str, Any]]] = {
    "simulate": _simulated,
    "goodput": _goodput,
    "replicas": _replicas,
    "iterations": _iterations,
}
