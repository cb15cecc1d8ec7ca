"""What the composed scheduling policy does; every part can be switched off to measure it."""

import math
from dataclasses import dataclass, replace

from shared.contracts.base import Seconds
from solver.scheduling.priority import Ordering


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions:
    """Features and settings of `solver.scheduling.qoserve.QoServePolicy`."""

    ordering: Ordering = Ordering.HYBRID
    dynamic_chunking: bool = True
    curve_chunking: bool = True
    """Pick the chunk with most prefill tokens per second among multiples of a tile."""
    relegation: bool = True
    overload_mode: bool = True
    """While overloaded, work of low importance is ordered as if it were due later."""
    preemption: bool = True
    """A waiting request may make a running prefill of lower priority rest."""
    max_chunk_tokens: int = 2500
    """Tokens of one iteration at most, decodes included (QoServe §4.1.4)."""
    fixed_chunk_tokens: int = 256
    """Instead, without dynamic chunking."""
    low_work_weight_s_per_token: Seconds = 0.001
    high_work_weight_s_per_token: Seconds = 0.008
    """QoServe's alpha (eqs 4-5) while little waits, and while much does."""
    high_load_s: Seconds = 3.0
    """Predicted time of the waiting prefills from which on the high weight holds."""
    low_load_s: Seconds = 0.5
    """And below which the low one does."""
    overload_s: Seconds = 30.0
    """Predicted time of the waiting prefills from which on the overload mode holds."""
    recovered_s: Seconds = 3.0
    """And below which it ends."""
    unimportant_delay_s: Seconds = 500.0
    """How much later work of low importance is taken to be due then."""
    latency_margin: float = 0.05
    """Share of each slack that is left for errors of the latency model."""
    iteration_limit_s: Seconds = math.inf
    """Longest iteration while interactive work is running (ConServe's TBT budget)."""
    default_decode_tokens: int = 128
    """Expected of an application without history."""
    fairness_weight: float = 0.0
    """Seconds of delay per second of engine time that the tenant had before."""
    aging_bound_s: Seconds = 7200.0
    """Age from which on relegated and best-effort work gets a share whatever else waits."""
    aged_share: int = 16
    """Of so many iterations one begins with the oldest such request."""

    @property
    def work_weights(self) -> tuple[Seconds, ...]:
        """One per load level; a single one where the load does not matter."""
        low, high = self.low_work_weight_s_per_token, self.high_work_weight_s_per_token
        return (low,) if low == high else (low, high)


def _fixed_weight(options: SchedulingOptions) -> SchedulingOptions:
    """The paper's setting for steady load: 8 ms per token always."""
    return replace(options, low_work_weight_s_per_token=options.high_work_weight_s_per_token)


DEFAULT = SchedulingOptions()

_FULL = _fixed_weight(DEFAULT)
_PAPER = replace(_FULL, curve_chunking=False)
_DC = replace(_PAPER, ordering=Ordering.EDF, relegation=False, overload_mode=False)

VARIANTS: dict[str, SchedulingOptions] = {
    "edf": replace(_DC, dynamic_chunking=False),
    "fcfs": replace(_DC, dynamic_chunking=False, ordering=Ordering.FCFS),
    "srpf": replace(_DC, dynamic_chunking=False, ordering=Ordering.SRPF),
    "dc": _DC,
    "dc-fcfs": replace(_DC, ordering=Ordering.FCFS),
    "dc+er": replace(_DC, relegation=True, overload_mode=True),
    "qoserve": _PAPER,
    "qoserve+curve": _FULL,
    "adaptive": DEFAULT,
    "prefill": replace(_PAPER, max_chunk_tokens=8192),
    "quartz": replace(_FULL, ordering=Ordering.QUARTZ),
    "combined": replace(_FULL, ordering=Ordering.COMBINED, fairness_weight=0.02),
}
"""
By name, from Sarathi with priority queues to all of it.

QoServe's ablation is `edf`, `dc`, `dc+er`, `qoserve` (table 5); `qoserve+curve` adds the
measured curve, and `adaptive`, the default, the work weight that follows the load. `prefill`
is for engines that only prefill (§4.1.3).
"""
