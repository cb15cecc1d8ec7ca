"""Options of the composed scheduling policy; each part can be disabled to measure its effect."""

import math
from dataclasses import dataclass, replace

from shared.contracts.base import Seconds
from solver.scheduling.engine.priority import Ordering


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions:
    """Enabled parts and settings of `solver.scheduling.engine.qoserve.QoServePolicy`."""

    ordering: Ordering = Ordering.HYBRID
    dynamic_chunking: bool = True
    curve_chunking: bool = True
    """True: the chunk is the multiple of a tile with the most prefill tokens per second."""
    relegation: bool = True
    overload_mode: bool = True
    """True: in an overload, work of low importance is ordered as if it were due later."""
    preemption: bool = True
    """True: the policy may pause a running prefill for a waiting request of higher priority."""
    max_chunk_tokens: int = 4096
    """
    Maximum tokens of one iteration, decodes included.

    Differs: QoServe §4.1.4 stops at 2500, where its engine saturates. Here the measured curve
    includes saturation, and the maximum only bounds how long a new request waits for the current
    iteration.
    """
    fixed_chunk_tokens: int = 256
    """Chunk size in tokens if dynamic chunking is disabled."""
    low_work_weight_s_per_token: Seconds = 0.001
    high_work_weight_s_per_token: Seconds = 0.008
    """
    Weight of remaining work in the key at high load (QoServe's alpha, eqs 4-5). At low load, the
    weight is `low_work_weight_s_per_token`.
    """
    high_load_s: Seconds = 3.0
    """Predicted duration of the waiting prefills above which the high work weight applies."""
    low_load_s: Seconds = 0.5
    """Predicted duration of the waiting prefills below which the low work weight applies again."""
    overload_s: Seconds = 30.0
    """Predicted duration of the waiting prefills above which the overload mode begins."""
    recovered_s: Seconds = 3.0
    """Predicted duration of the waiting prefills below which the overload mode ends."""
    unimportant_delay_s: Seconds = 500.0
    """Delay that is added to the deadlines of low-importance work in the overload mode."""
    latency_margin: float = 0.0
    """Share of each time limit that is reserved for errors of the latency model."""
    iteration_limit_s: Seconds = math.inf
    """Longest iteration while interactive work is running (ConServe's TBT budget)."""
    steady_pace: bool = False
    """
    True: each gap between tokens of interactive work is limited to its TBT target (ConServe).

    False: a request that is ahead of its deadlines allows longer gaps (QoServe eq. 2).
    """
    best_effort_kv_reserve: float = 0.0
    """
    Share of the KV that best-effort work leaves free for other work when a best-effort request
    starts.
    """
    best_effort_decode_share: float = math.inf
    """
    Share of the iteration limit that all decodes may take when another best-effort request starts.
    """
    best_effort_yields: bool = False
    """True: best-effort prefills and decodes give up their KV when other work needs it."""
    best_effort_spares_first_tokens: bool = False
    """True: best-effort prefills must not make a first token of their iteration late."""
    default_decode_tokens: int = 128
    """Expected answer length of an application without history."""
    fairness_weight: float = 0.0
    """
    Delay in a request's key, in seconds per second of engine time that its tenant used before.
    """
    aging_bound_s: Seconds = 7200.0
    """Age from which relegated and best-effort work gets a guaranteed share of iterations."""
    aged_share: int = 16
    """
    Inverse of the share of iterations that begin with a request older than `aging_bound_s`, if
    there is one.
    """

    @property
    def work_weights(self) -> tuple[Seconds, ...]:
        """Work weights by load level; a single weight if the load level is not used."""
        low, high = self.low_work_weight_s_per_token, self.high_work_weight_s_per_token
        return (low,) if low == high else (low, high)


def _fixed_weight(options: SchedulingOptions) -> SchedulingOptions:
    """
    Options with QoServe's setting for steady load: a work weight of 8 ms per token at any load.
    """
    return replace(options, low_work_weight_s_per_token=options.high_work_weight_s_per_token)


_BASE = SchedulingOptions()
DEFAULT = replace(
    _BASE,
    best_effort_yields=True,
    best_effort_kv_reserve=0.05,
    best_effort_decode_share=0.4,
    best_effort_spares_first_tokens=True,
)

_FULL = _fixed_weight(_BASE)
_PAPER = replace(_FULL, curve_chunking=False, max_chunk_tokens=2500)
_DC = replace(_PAPER, ordering=Ordering.EDF, relegation=False, overload_mode=False)
_CO_SERVING = replace(
    _FULL,
    ordering=Ordering.FCFS,
    max_chunk_tokens=2500,
    relegation=False,
    overload_mode=False,
    steady_pace=True,
    best_effort_yields=True,
)

VARIANTS: dict[str, SchedulingOptions] = {
    "edf": replace(_DC, dynamic_chunking=False),
    "fcfs": replace(_DC, dynamic_chunking=False, ordering=Ordering.FCFS),
    "srpf": replace(_DC, dynamic_chunking=False, ordering=Ordering.SRPF),
    "dc": _DC,
    "dc-fcfs": replace(_DC, ordering=Ordering.FCFS),
    "dc+er": replace(_DC, relegation=True, overload_mode=True),
    "qoserve": _PAPER,
    "qoserve-1ms": replace(
        _PAPER, low_work_weight_s_per_token=0.001, high_work_weight_s_per_token=0.001
    ),
    "qoserve-4ms": replace(
        _PAPER, low_work_weight_s_per_token=0.004, high_work_weight_s_per_token=0.004
    ),
    "qoserve+curve": _FULL,
    "adaptive": DEFAULT,
    "conserve": _CO_SERVING,
    "conserve+admission": replace(
        _CO_SERVING,
        best_effort_kv_reserve=0.05,
        best_effort_decode_share=0.4,
        best_effort_spares_first_tokens=True,
    ),
    "prefill": replace(_PAPER, max_chunk_tokens=8192),
    "quartz": replace(_FULL, ordering=Ordering.QUARTZ),
    "combined": replace(_FULL, ordering=Ordering.COMBINED, fairness_weight=0.02),
}
"""
Options by name, from Sarathi with priority queues to all features.

QoServe's ablation is `edf`, `dc`, `dc+er`, `qoserve` (table 5). `qoserve-1ms` and `qoserve-4ms`
have a work weight below QoServe's 8 ms per token (figure 14). `qoserve+curve` adds the measured
curve. `adaptive`, the default, also adapts the work weight to the load. `conserve` is ConServe's
algorithm 1: online work in order of arrival, and offline work within the time that the TBT limits
leave. `conserve+admission` also limits the start of offline work, and the duration of iterations in
which online prefills end. `prefill` is for engines that only prefill (§4.1.3).
"""
